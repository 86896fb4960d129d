"""Tensors that modules keep as attributes or put into what they are called with, such as
auxiliary losses: outputs in all but name.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import nn

from .build import own_modules
from .structures import tensors_in
from .unit import Unit


class SideOutputs:
    """The attributes of a unit's modules by which autograd may enter it, beside its outputs.

    Which of them to look at is decided at the unit's first forward, and again when modules have
    got further attributes: those that hold tensors, and those that stand for a value to come.
    Modules inside of nested units, whose own modules are among those ``of_units``, are theirs.
    """

    def __init__(self, unit: Unit, of_units: Container[nn.Module]) -> None:
        self._unit = unit
        own = own_modules(unit.module, of_units.__contains__)
        self._attributes = [vars(module) for module in own]
        self._count = -1
        self._places: list[tuple[dict[str, Any], str]] = []

    def made_since(self, birth: int, inputs: Any) -> Iterator[torch.Tensor]:
        """Those that lead into the unit by nodes not older than ``birth``, in autograd's count.

        Among them are those that the unit put into containers among its ``inputs``.
        """
        for tensor in tensors_in([*self._stored(), inputs]):
            node = tensor.grad_fn
            if node is not None and node._sequence_nr() >= birth and self._unit.made(tensor):
                yield tensor

    def _stored(self) -> Iterator[Any]:
        count = sum(map(len, self._attributes))
        if count != self._count:
            self._count = count
            self._places = [
                (attributes, name)
                for attributes in self._attributes
                for name, value in attributes.items()
                if not name.startswith("_") and self._is_of_interest(value)
            ]
        for attributes, name in self._places:
            yield attributes.get(name)

    def _is_of_interest(self, value: Any) -> bool:
        """Whether there is such a tensor, or a place that a later forward may put one in."""
        if isinstance(value, (int, float)):
            return value == 0 and value is not False
        if value is None:
            return True
        if isinstance(value, (list, dict)) and not value:
            return True
        if isinstance(value, torch.Tensor) and value.grad_fn is None:
            # Larger ones are a module's constants, or parameters.
            return value.numel() == 1
        return any(map(self._unit.made, tensors_in(value)))
