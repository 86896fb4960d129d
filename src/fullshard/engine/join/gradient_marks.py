"""Notices whether the user cleared, kept or changed gradients after a backward.

Ranks that have run out of data (``joining.py``) hold shards of the same gradients and must do the
same to theirs. Programs clear gradients in many ways, and not only after a step, so there is no
call to intercept. Instead, gradients are compared with those that the backward left.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import torch

from ..params.tensor_parallel import local_part


class Since(Enum):
    """The user's changes to the gradients of an optimizer since the last backward."""

    #: This rank had none, and cannot tell.
    UNKNOWN = "unknown"
    KEPT = "kept"
    REMOVED = "removed"
    ZEROED = "zeroed"
    CHANGED = "changed"


class _Mark(NamedTuple):
    parameter: torch.Tensor
    address: int
    version: int


class GradientMarks:
    """Remembers the gradients of ``parameters``, one list for every optimizer."""

    def __init__(self, parameters: Sequence[Sequence[torch.Tensor]]) -> None:
        self._parameters = parameters
        self._marks: list[list[_Mark]] = [[] for _ in parameters]

    @property
    def optimizers(self) -> range:
        """The numbers of the optimizers."""
        return range(len(self._parameters))

    def note(self) -> None:
        """Remember what there is now."""
        self._marks = [
            [_Mark(p, *_look_at(p.grad)) for p in parameters if p.grad is not None]
            for parameters in self._parameters
        ]

    def since(self, number: int) -> Since:
        """The user's changes to one optimizer's gradients since they were noted."""
        marks = self._marks[number]
        if not marks:
            return Since.UNKNOWN
        gradients = [mark.parameter.grad for mark in marks]
        left = [gradient for gradient in gradients if gradient is not None]
        if not left:
            return Since.REMOVED
        pairs = zip(marks, gradients, strict=True)
        if all(g is not None and _look_at(g) == (m.address, m.version) for m, g in pairs):
            return Since.KEPT
        return Since.CHANGED if any(g.any() for g in left) else Since.ZEROED


def _look_at(gradient: torch.Tensor) -> tuple[int, int]:
    """A tensor's address and version, by which changes are noticed."""
    return local_part(gradient).data_ptr(), gradient._version
