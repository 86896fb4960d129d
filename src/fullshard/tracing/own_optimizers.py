"""Which optimizers step the traced model, among all whose steps torch tells of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..engine.runtime.unit import Unit

Begun = tuple[int, Any]


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
        """Whether an optimizer has parameters of the units, or of modules in them."""
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
        """A step has ended: when it began; None for others, and inside of another one's step."""
        begun = self._forget(optimizer)
        return None if self._stepping else begun

    def _forget(self, optimizer: torch.optim.Optimizer) -> Begun | None:
        for number, (other, begun) in enumerate(self._stepping):
            if other is optimizer:
                del self._stepping[number:]
                return begun
        return None


def has_parameters_of(optimizer: torch.optim.Optimizer, units: Sequence[Unit]) -> bool:
    """Whether an optimizer has parameters of some of the units, or of modules in them."""
    handles = [handle for unit in units for handle in unit.handles]
    own = {id(parameter) for unit in units for parameter in unit.module.parameters()}
    own |= {id(parameter) for handle in handles for parameter in handle.optimizer_params}
    return any(id(p) in own for group in optimizer.param_groups for p in group["params"])
