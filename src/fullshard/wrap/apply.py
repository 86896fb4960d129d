"""Carrying out a plan: the only file of this package that changes a model."""

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
    """Wrap what ``policy`` picks below ``root``; the root itself is left to the caller.

    Everything that can be wrong with the plan is found before the first module is changed.
    """
    plan = decide(root, policy, ignored=ignored, root_arguments=root_arguments)
    for message in plan.warnings:
        warnings.warn(message, UserWarning, stacklevel=3)
    check_plan_is_uniform(plan)
    apply_plan(plan, wrapper_class)
    return plan


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """For wrapping, which makes hundreds of thousands of objects that stay.

    The cyclic garbage collector would go through all of them again and again, which takes as long
    as the wrapping itself on a model of 10,000 modules.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def apply_plan(plan: Plan, wrapper_class: Callable[..., nn.Module]) -> tuple[nn.Module, ...]:
    """Wrap the modules of ``plan``, children first, and put each unit in its module's places.

    Returns the units in the order of ``plan.decisions``. A unit is constructed as
    ``wrapper_class(module, **arguments)``; it gets ``ignored_states`` if it meets ignored
    modules or parameters, and ``_left_to_ancestor`` if it must leave parameters to a unit
    above it.
    """
    units = []
    for decision in plan.decisions:
        try:
            unit = wrapper_class(decision.module, **_constructor_arguments(decision))
        except Exception as error:
            error.add_note(f"While wrapping {decision.path!r} ({type(decision.module).__name__})")
            raise
        for place in decision.places:
            # Not setattr: a parent may define one of its own, and the name is registered already.
            place.parent._modules[place.name] = unit
            _have_it_called(place.parent)
        units.append(unit)
    return tuple(units)


def _have_it_called(parent: nn.Module) -> None:
    """Let what ``torch.compile`` makes of a module call what it holds, not what it was made of."""
    # Not imported: that takes a second, and where it is not there, nothing was compiled.
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
    """The ignored modules, or parameters: the argument takes one kind only."""
    if not decision.ignored_parameters:
        return list(decision.ignored_modules)
    parameters = dict.fromkeys(decision.ignored_parameters)
    for module in decision.ignored_modules:
        parameters.update(dict.fromkeys(module.parameters()))
    return list(parameters)
