"""Marks in a reduce buffer for the gradients that a rank has: see the note in ``gradients.py``.

Note: a grid of marks
    Any element of a piece may carry the mark, and if all gradients are present, several may. So
    elements at equal distances are marked, at most as far apart as the smallest piece is long:
    every piece contains one of them. They are one strided view, to which zero is added in one
    operation that needs no memory.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..comm.streams import streams_for
from .layout import Layout, starts_in

#: For how many combinations of present and absent gradients a group keeps marks.
_PATTERNS_KEPT = 64


class Marks:
    """Indices into any flat buffer, and as many zeros to add there: one operation.

    Units that are laid out alike, which most of a model's are, share them.
    """

    __slots__ = ("__weakref__", "_starts", "_zeros")

    def __init__(self, starts: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self._starts = torch.tensor(starts, dtype=torch.long, device=device)
        self._zeros = torch.zeros((), dtype=dtype, device=device).expand(len(starts))

    def add_to(self, flat: torch.Tensor) -> None:
        flat.index_add_(0, self._starts, self._zeros)


class UsedParameterMarks:
    """The marks of one group, for each combination of present gradients."""

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self._layout = layout
        self._dtype = dtype
        self._device = device
        self._by_pattern: dict[tuple[bool, ...] | None, Marks] = {}
        #: Those that CUDA graphs read in every replay, whichever patterns come since.
        self._captured: set[Marks] = set()

    def mark(self, flat: torch.Tensor, present: tuple[bool, ...] | None) -> None:
        """Mark the gradients in ``flat`` that are ``present``; None for all of them."""
        marks = self._by_pattern.get(present)
        if marks is None:
            if len(self._by_pattern) >= _PATTERNS_KEPT:
                self._by_pattern.clear()
            starts = piece_starts(self._layout, present)
            marks = self._by_pattern[present] = _marks_at(starts, self._dtype, self._device)
        if streams_for(self._device).capturing:
            self._captured.add(marks)
        marks.add_to(flat)


_known: weakref.WeakValueDictionary[tuple[object, ...], Marks] = weakref.WeakValueDictionary()


def _marks_at(starts: Sequence[int], dtype: torch.dtype, device: torch.device) -> Marks:
    """The marks at these elements; equal arguments get the same object."""
    key = (tuple(starts), dtype, device)
    marks = _known.get(key)
    if marks is None:
        marks = _known[key] = Marks(starts, dtype, device)
    return marks


def piece_starts(layout: Layout, present: Sequence[bool] | None) -> list[int]:
    """The offsets at which each rank's piece of each present parameter begins; None means all."""
    return layout.piece_starts(present)


class UnusedParameterGrid(NamedTuple):
    """Elements at multiples of ``distance``, and additional single ones (``beside``)."""

    distance: int
    beside: tuple[int, ...]


#: Distances that are tried, the longest first: shorter ones would mark too much of a large buffer.
_DISTANCES = tuple(2**power for power in range(16, 7, -1))
#: Pieces that a grid may miss, which are marked one by one.
_FEW = 4


@functools.lru_cache(maxsize=256)
def find_grid(layout: Layout) -> UnusedParameterGrid | None:
    """A grid that marks every rank's piece of every parameter; None if too many are small."""
    pieces = [
        (start, min(slot.end, (start // layout.shard_numel + 1) * layout.shard_numel))
        for slot in layout.slots
        for start in starts_in(slot, layout.shard_numel)
    ]
    if not pieces:
        return None
    grids = [
        UnusedParameterGrid(distance, tuple(a for a, end in pieces if -a % distance >= end - a))
        for distance in _DISTANCES
    ]
    best = min(grids, key=lambda grid: len(grid.beside))
    return best if len(best.beside) <= _FEW else None


@functools.lru_cache(maxsize=256)
def used_parameter_bytes(count: int, absent: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """A byte for each of ``count`` parameters: 0 if the rank has no gradient of it, else 1.

    Equal arguments get the same tensor: do not write to it.
    """
    missing = set(absent)
    flags = [0 if index in missing else 1 for index in range(count)]
    return torch.tensor(flags, dtype=torch.uint8, device=device)
