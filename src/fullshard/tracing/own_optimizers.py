"""Tells of optimizers' steps, and which of the optimizers step the traced model.

Note: watching begins and ends between steps
    torch calls its hooks in a loop over a dict, so a hook may neither add nor remove one. But a
    trace may begin when a step of an optimizer ends. So one pair of hooks of torch's stands for all
    watchers, as long as there are any, and a watcher may add another one in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..engine.runtime.unit import Unit

Begun = tuple[int, Any]
Told = Callable[[Any], object]

#: What is called when a step begins, and when it has ended.
_watchers: list[tuple[Told, Told]] = []
_handles: list[Any] = []


def watch_steps(begins: Told, ended: Told) -> Callable[[], None]:
    """Have both called with every optimizer that steps; returns what ends that."""
    watcher = (begins, ended)
    if not _watchers:
        _handles.append(register_optimizer_step_pre_hook(_tell_begin))
        _handles.append(register_optimizer_step_post_hook(_tell_end))
    _watchers.append(watcher)

    def stop() -> None:
        _watchers.remove(watcher)
        while _handles and not _watchers:
            _handles.pop().remove()

    return stop


def _tell_begin(optimizer: Any, *_: Any) -> None:
    for begins, _ended in tuple(_watchers):
        begins(optimizer)


def _tell_end(optimizer: Any, *_: Any) -> None:
    for _begins, ended in tuple(_watchers):
        ended(optimizer)


class OwnOptimizers:
    """The optimizers with parameters of some units, and those of them that step now.

    An optimizer may step others inside of its own step: those are a part of it.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._known: dict[torch.optim.Optimizer, bool] = {}
        #: Each steps inside of the one before it. With when they began.
        self._stepping: list[tuple[torch.optim.Optimizer, Begun]] = []

    def has(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if the optimizer has parameters of the units, or of modules in them."""
        known = self._known.get(optimizer)
        if known is None:
            known = self._known[optimizer] = has_parameters_of(optimizer, self._units)
        return known

    def begin(self, optimizer: torch.optim.Optimizer, begun: Begun) -> None:
        """A step of one of them begins."""
        # An earlier step of it may have raised, which nobody is told of.
        self._forget(optimizer)
        self._stepping.append((optimizer, begun))

    def end(self, optimizer: torch.optim.Optimizer) -> Begun | None:
        """Note the end of a step; return when it began, or None inside another optimizer's step."""
        begun = self._forget(optimizer)
        return None if self._stepping else begun

    def _forget(self, optimizer: torch.optim.Optimizer) -> Begun | None:
        for number, (other, begun) in enumerate(self._stepping):
            if other is optimizer:
                del self._stepping[number:]
                return begun
        return None


def has_parameters_of(optimizer: torch.optim.Optimizer, units: Sequence[Unit]) -> bool:
    """True if the optimizer has parameters of some units, or of modules in them."""
    handles = [handle for unit in units for handle in unit.handles]
    own = {id(parameter) for unit in units for parameter in unit.module.parameters()}
    own |= {id(parameter) for handle in handles for parameter in handle.optimizer_params}
    return any(id(p) in own for group in optimizer.param_groups for p in group["params"])
