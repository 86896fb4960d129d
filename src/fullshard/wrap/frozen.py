"""Checking for units that mix frozen and trainable parameters, before anything is wrapped."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

from torch import nn

from fullshard.wrap.assignment import assign
from fullshard.wrap.graph import ModuleGraph
from fullshard.wrap.plan import Plan

__all__ = [
    "_validate_frozen_params",
    "check_flat_unit_is_uniform",
    "check_plan_is_uniform",
    "check_unit_is_uniform",
]


def check_unit_is_uniform(
    path: str, names: Sequence[str], parameters: Sequence[nn.Parameter], use_orig_params: bool
) -> None:
    """Raise or warn if some of a unit's ``parameters`` are frozen and others are trainable.

    Raises ``ValueError`` for ``use_orig_params=False`` and warns for ``True``. Users' programs
    match the text of the message, so it is torch's, although this engine allocates no gradient
    memory for frozen parameters.
    """
    message = _mixed_message(path, names, parameters, use_orig_params)
    if message is None:
        return
    if not use_orig_params:
        raise ValueError(message)
    warnings.warn(message, UserWarning, stacklevel=3)


def check_flat_unit_is_uniform(module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """Raise ``ValueError`` for a unit wrapped by hand, with ``use_orig_params=False``, that mixes
    frozen and trainable parameters.
    """
    if len({parameter.requires_grad for parameter in parameters}) > 1:
        found = {parameter: name for name, parameter in module.named_parameters()}
        names = [found[parameter] for parameter in parameters]
        message = _mixed_message(_name_of_root(module), names, parameters, use_orig_params=False)
        raise ValueError(
            "Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`: "
            "wrap the frozen parameters in units of their own, or pass use_orig_params=True. "
            f"{message}"
        )


def _mixed_message(
    path: str, names: Sequence[str], parameters: Sequence[nn.Parameter], use_orig_params: bool
) -> str | None:
    named = list(zip(names, parameters, strict=True))
    trainable = [name for name, parameter in named if parameter.requires_grad]
    frozen = [name for name, parameter in named if not parameter.requires_grad]
    if not trainable or not frozen:
        return None
    message = f"{path} has both parameters with requires_grad=True and False. "
    if use_orig_params:
        total = sum(parameter.numel() for parameter in parameters)
        needed = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        message += (
            "We do not recommend wrapping such modules since the gradient memory usage will be "
            f"higher than expected ({total} numel instead of {needed} numel before sharding via "
            "reduce-scatter). "
        )
    else:
        message += "FSDP does not support wrapping such modules when use_orig_params=False. "
    return message + (
        "If possible, wrap the frozen parameters with FSDP separately.\n"
        f"The following parameters have requires_grad=True:\n{trainable}\n"
        f"The following parameters have requires_grad=False:\n{frozen}"
    )


def check_plan_is_uniform(plan: Plan) -> None:
    """Check every unit of ``plan``, children before parents and the root last.

    The check uses each unit's own value of ``use_orig_params``.
    """
    for decision in (*plan.decisions, plan.root):
        check_unit_is_uniform(
            decision.path or _name_of_root(decision.module),
            decision.managed_names,
            decision.managed,
            bool(decision.arguments.get("use_orig_params", False)),
        )


def _validate_frozen_params(
    root: nn.Module,
    modules_to_wrap: Iterable[nn.Module],
    ignored_params: Iterable[nn.Parameter],
    use_orig_params: bool,
) -> None:
    """Check the units that wrapping ``modules_to_wrap`` would create, children before parents.

    Only these modules are checked; the root is checked only if it is one of them.
    """
    graph = ModuleGraph(root, excluded_parameters=frozenset(ignored_params))
    units = {graph.index_of[module] for module in modules_to_wrap if module in graph.index_of}
    managed = assign(graph, units).managed
    for index in graph.children_first:
        if index in units:
            nodes = managed[index]
            check_unit_is_uniform(
                graph.path(index) or _name_of_root(root),
                [graph.parameter_path(node) for node in nodes],
                [node.parameter for node in nodes],
                use_orig_params,
            )


def _name_of_root(root: nn.Module) -> str:
    return f"The root module ({type(root).__name__})"
