"""Resolving ``ignored_modules`` and ``ignored_states``, without changing the model."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from fullshard.wrap.marker import WRAPPED_MODULE_NAME, is_unit

__all__ = ["NOTHING_IGNORED", "Ignored", "resolve_ignored"]


@dataclass(frozen=True)
class Ignored:
    """The modules (with everything below them), parameters and buffers that no unit manages.

    ``buffer_names`` are relative to the root and without wrapper prefixes.
    """

    modules: frozenset[nn.Module] = frozenset()
    parameters: frozenset[nn.Parameter] = frozenset()
    buffer_names: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.modules or self.parameters)


NOTHING_IGNORED = Ignored()


def resolve_ignored(
    root: nn.Module,
    ignored_modules: Iterable[nn.Module] | None = None,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
) -> Ignored:
    """Return all modules, parameters and buffers that the unit of ``root`` must ignore.

    Ignoring a module ignores everything below it, except what nested units manage. What a nested
    unit ignores (its ``_ignored_modules`` and ``_ignored_params``) is ignored here, too.
    ``ignored_states`` holds either modules or parameters; it replaces ``ignored_modules``, so only
    one of the two may be given.
    """
    modules, parameters = _given(ignored_modules, ignored_states)
    if any(map(is_unit, modules)):
        raise ValueError("`ignored_modules` should not include FSDP modules")
    if root in modules:
        warnings.warn(
            "Trying to ignore the top-level module passed into the FSDP constructor itself will "
            f"result in all parameters being ignored and is not well-supported: {root}",
            UserWarning,
            stacklevel=3,
        )
    all_modules = _with_everything_below(modules)
    all_parameters = set(parameters)
    for module in all_modules:
        all_parameters.update(p for p in module._parameters.values() if p is not None)
    for unit in filter(is_unit, root.modules()):
        all_modules |= getattr(unit, "_ignored_modules", None) or set()
        all_parameters |= getattr(unit, "_ignored_params", None) or set()
    if not (all_modules or all_parameters):
        return NOTHING_IGNORED
    return Ignored(
        frozenset(all_modules), frozenset(all_parameters), _buffer_names(root, all_modules)
    )


def _given(
    ignored_modules: Iterable[nn.Module] | None,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
) -> tuple[list[nn.Module], list[nn.Parameter]]:
    """Validate the two arguments and return them as modules and parameters."""
    if ignored_modules is None and ignored_states is None:
        return [], []
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError(
            "Cannot pass both ignored_modules and ignored_states at the same time. "
            "Please just pass ignored_states."
        )
    if ignored_modules is not None:
        modules: list[object] = _listed(ignored_modules, "ignored_modules")
        found = [module for module in modules if isinstance(module, nn.Module)]
        if len(found) < len(modules):
            raise ValueError(
                "ignored_modules expects nn.Module list elements but got types "
                f"{_types_of(modules)}"
            )
        return found, []
    states: list[object] = (
        [] if ignored_states is None else _listed(ignored_states, "ignored_states")
    )
    state_modules = [state for state in states if isinstance(state, nn.Module)]
    state_parameters = [state for state in states if isinstance(state, nn.Parameter)]
    if len(states) not in (len(state_modules), len(state_parameters)):
        raise ValueError(
            "ignored_states expects all nn.Parameter or all nn.Module list elements but got "
            f"types {_types_of(states)}"
        )
    return state_modules, state_parameters


def _listed(given: Iterable[object], argument: str) -> list[object]:
    # A container such as nn.Sequential is iterable, but the user means the module itself.
    if isinstance(given, (nn.Module, torch.Tensor)) or not isinstance(given, Iterable):
        raise TypeError(
            f"{argument} expects a list, but got a single {type(given).__name__}. Pass "
            f"{argument}=[...] instead."
        )
    return list(given)


def _types_of(entries: Iterable[object]) -> list[type]:
    return sorted({type(entry) for entry in entries}, key=repr)


def _with_everything_below(modules: Iterable[nn.Module]) -> set[nn.Module]:
    found: set[nn.Module] = set()
    stack = list(modules)
    while stack:
        module = stack.pop()
        if module not in found and not is_unit(module):
            found.add(module)
            stack.extend(child for child in module._modules.values() if child is not None)
    return found


def _buffer_names(root: nn.Module, ignored: set[nn.Module]) -> frozenset[str]:
    if not ignored:
        return frozenset()
    names: set[str] = set()
    stack = [("", root)]
    seen = {root}
    while stack:
        prefix, module = stack.pop()
        if module in ignored:
            names.update(prefix + name for name, b in module._buffers.items() if b is not None)
        for name, child in module._modules.items():
            if child is not None and child not in seen:
                seen.add(child)
                hidden = name == WRAPPED_MODULE_NAME and is_unit(module)
                stack.append((prefix if hidden else f"{prefix}{name}.", child))
    return frozenset(names)
