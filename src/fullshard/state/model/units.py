"""The units of a model, whichever way it was sharded: by wrappers, or in place by ``fully_shard``.

A wrapper is its unit's module. What ``fully_shard`` was applied to keeps the module's own names, so
its unit is found behind one attribute, and several modules may share one. A module whose parameters
are shared over several meshes has a unit for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ...engine.runtime.forward import Schedule
from ...engine.runtime.unit import Unit
from ...wrap import is_unit
from ...wrap.marker import IN_PLACE_ATTRIBUTE as _IN_PLACE


def units_of(module: Any) -> list[Unit]:
    """The unit of a wrapper, or those of a module that ``fully_shard`` was applied to."""
    in_place = vars(module).get(_IN_PLACE)
    return [module._unit] if in_place is None else [each.unit for each in in_place.with_inner()]


def units_in(model: nn.Module) -> list[Unit]:
    """All units of ``model``, each once, outer ones first."""
    return list(dict.fromkeys(u for module in _unit_modules(model) for u in units_of(module)))


def steps_of(model: nn.Module, *, recurse: bool = True) -> list[tuple[Unit, Schedule | None]]:
    """The units of ``model`` with the schedules of their steps; outermost ones become roots.

    Without ``recurse`` only that of the model itself.
    """
    modules = list(_unit_modules(model))
    inside: set[nn.Module] = set()
    for module in modules:
        if module not in inside and _schedule_of(module) is None:
            _start(module)
        inside.update(module.modules())
    chosen = modules if recurse else [module for module in modules if module is model]
    return list({u: _schedule_of(module) for module in chosen for u in units_of(module)}.items())


def _unit_modules(model: nn.Module) -> Iterator[Any]:
    return filter(is_unit, model.modules())


def _schedule_of(module: Any) -> Schedule | None:
    in_place = vars(module).get(_IN_PLACE)
    schedule: Schedule | None = module._schedule if in_place is None else in_place.schedule
    return schedule


def _start(module: Any) -> None:
    in_place = vars(module).get(_IN_PLACE)
    if in_place is None:
        module._start()
    else:
        in_place.start()
