"""The places at which a rank marks the gradients that it has: see the note in ``gradients.py``."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

import torch

from .layout import Layout

#: Combinations of gradients that are there and not for which a group keeps marks.
_PATTERNS_KEPT = 64


class Marks(Protocol):
    """Something that adds zero at certain places of a flat buffer."""

    def add_to(self, flat: torch.Tensor) -> None: ...


class IndexedMarks:
    """Indices into any flat buffer, and as many zeros to add there: one operation, on any host.

    Units that are laid out alike, which most of a model's are, share them.
    """

    __slots__ = ("__weakref__", "_starts", "_zeros")

    def __init__(self, starts: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self._starts = torch.tensor(starts, dtype=torch.long, device=device)
        self._zeros = torch.zeros((), dtype=dtype, device=device).expand(len(starts))

    def add_to(self, flat: torch.Tensor) -> None:
        flat.index_add_(0, self._starts, self._zeros)


class ViewedMarks:
    """Views of one flat buffer whose tensor stays: an accelerator has no indices to keep."""

    def __init__(
        self, flat: torch.Tensor, layout: Layout, present: Sequence[bool] | None = None
    ) -> None:
        slots = [s for i, s in enumerate(layout.slots) if present is None or present[i]]
        self._firsts = [flat.as_strided((1,), (1,), s.offset) for s in slots if s.numel]
        # What other ranks' pieces begin with lies as far apart as shards do. To mark what belongs
        # to no parameter does no harm, so that one view serves where all gradients are there.
        size = layout.shard_numel
        spans = (
            [(0, layout.padded_numel)] if present is None else [(s.offset, s.end) for s in slots]
        )
        bounds = [range((start // size + 1) * size, end, size) for start, end in spans if size]
        self._rests = [flat.as_strided((len(b),), (size,), b.start) for b in bounds if b]

    def add_to(self, flat: torch.Tensor) -> None:
        if self._firsts:
            torch._foreach_add_(self._firsts, 0.0)
        for rest in self._rests:
            rest.add_(0.0)


class Presence:
    """The marks of one group, by which of its gradients are there.

    ``stays`` says that it is always the same flat tensor that is marked.
    """

    def __init__(
        self, layout: Layout, dtype: torch.dtype, device: torch.device, stays: bool
    ) -> None:
        self._layout = layout
        self._dtype = dtype
        self._device = device
        self._views = stays and device.type != "cpu"
        self._by_pattern: dict[tuple[bool, ...] | None, Marks] = {}

    def mark(self, flat: torch.Tensor, present: tuple[bool, ...] | None) -> None:
        """Mark the gradients in ``flat`` that are ``present``; None for all of them."""
        marks = self._by_pattern.get(present)
        if marks is None:
            if len(self._by_pattern) >= _PATTERNS_KEPT:
                self._by_pattern.clear()
            marks = self._by_pattern[present] = self._make(flat, present)
        marks.add_to(flat)

    def _make(self, flat: torch.Tensor, present: tuple[bool, ...] | None) -> Marks:
        if self._views:
            return ViewedMarks(flat, self._layout, present)
        return _marks_at(piece_starts(self._layout, present), self._dtype, self._device)


_known: weakref.WeakValueDictionary[tuple[object, ...], IndexedMarks] = (
    weakref.WeakValueDictionary()
)


def _marks_at(starts: Sequence[int], dtype: torch.dtype, device: torch.device) -> IndexedMarks:
    """The marks at these places; the same object for all who ask for the same."""
    key = (tuple(starts), dtype, device)
    marks = _known.get(key)
    if marks is None:
        marks = _known[key] = IndexedMarks(starts, dtype, device)
    return marks


def piece_starts(layout: Layout, present: Sequence[bool] | None) -> list[int]:
    """Where each rank's piece of each present parameter begins; None for all of them."""
    starts: list[int] = []
    size = layout.shard_numel
    for index, slot in enumerate(layout.slots):
        if slot.numel and (present is None or present[index]):
            starts += [slot.offset, *range((slot.offset // size + 1) * size, slot.end, size)]
    return starts
