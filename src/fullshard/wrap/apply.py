"""Applying a plan. This is the only file of the package that changes a model."""

from __future__ import annotations

import contextlib
import gc
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from fullshard.wrap.frozen import check_plan_is_uniform
from fullshard.wrap.ignored import NOTHING_IGNORED, Ignored
from fullshard.wrap.plan import Decision, Plan, decide
from fullshard.wrap.selection import Policy

__all__ = ["apply_plan", "collector_paused", "wrap_submodules"]


def wrap_submodules(
    root: nn.Module,
    policy: Policy,
    wrapper_class: Callable[..., nn.Module],
    root_arguments: Mapping[str, Any],
    ignored: Ignored = NOTHING_IGNORED,
) -> Plan:
    """Wrap the modules below ``root`` that ``policy`` picks; the caller wraps the root itself.

    The whole plan is checked before the first module is replaced.
    """
    plan = decide(root, policy, ignored=ignored, root_arguments=root_arguments)
    for message in plan.warnings:
        warnings.warn(message, UserWarning, stacklevel=3)
    check_plan_is_uniform(plan)
    apply_plan(plan, wrapper_class)
    return plan


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Disable the cyclic garbage collector while a model is wrapped.

    Wrapping creates hundreds of thousands of objects that all stay alive. The collector would
    traverse them again and again, which takes as long as the wrapping itself on a model of 10,000
    modules.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def apply_plan(plan: Plan, wrapper_class: Callable[..., nn.Module]) -> tuple[nn.Module, ...]:
    """Wrap the modules of ``plan``, children first, and register each wrapper in their place.

    Returns the wrappers in the order of ``plan.decisions``. Each is constructed as
    ``wrapper_class(module, **arguments)``, with ``ignored_states`` if the unit contains ignored
    modules or parameters, and ``_left_to_ancestor`` if an enclosing unit manages some of the
    parameters that the module uses.
    """
    units = []
    for decision in plan.decisions:
        try:
            unit = wrapper_class(decision.module, **_constructor_arguments(decision))
        except Exception as error:
            error.add_note(f"While wrapping {decision.path!r} ({type(decision.module).__name__})")
            raise
        for place in decision.places:
            # Not setattr: the parent's class may override it, and the name is registered already.
            place.parent._modules[place.name] = unit
            _refresh_compiled_parent(place.parent)
        units.append(unit)
    return tuple(units)


def _refresh_compiled_parent(parent: nn.Module) -> None:
    """Make a module returned by ``torch.compile`` call the wrapper that it now contains.

    Such a module keeps a reference to the forward of the module it was created from.
    """
    # Looked up, not imported: the import takes a second, and a model that has a compiled module
    # in it has imported it already.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is not None and isinstance(parent, compiler.OptimizedModule):
        parent._initialize()


def _constructor_arguments(decision: Decision) -> dict[str, Any]:
    arguments = dict(decision.arguments)
    if decision.ignored_modules or decision.ignored_parameters:
        arguments["ignored_states"] = _ignored_states(decision)
    if decision.left_to_ancestor:
        arguments["_left_to_ancestor"] = decision.left_to_ancestor
    return arguments


def _ignored_states(decision: Decision) -> list[nn.Module] | list[nn.Parameter]:
    """The value for ``ignored_states``, which takes either modules or parameters, not both."""
    if not decision.ignored_parameters:
        return list(decision.ignored_modules)
    parameters = dict.fromkeys(decision.ignored_parameters)
    for module in decision.ignored_modules:
        parameters.update(dict.fromkeys(module.parameters()))
    return list(parameters)
