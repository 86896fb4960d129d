"""The places at which a rank marks the gradients that it has: see the note in ``gradients.py``.

Units that are laid out alike, which most of a model's are, share what is on the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from .layout import Layout


class Marks:
    """Indices into a whole flat buffer, and as many zeros to add there."""

    __slots__ = ("__weakref__", "starts", "zeros")

    def __init__(self, starts: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.starts = torch.tensor(starts, dtype=torch.long, device=device)
        self.zeros = torch.zeros((), dtype=dtype, device=device).expand(len(starts))


_known: weakref.WeakValueDictionary[tuple[object, ...], Marks] = weakref.WeakValueDictionary()


def marks_at(starts: Sequence[int], dtype: torch.dtype, device: torch.device) -> Marks:
    """The marks at these places; the same object for all who ask for the same."""
    key = (tuple(starts), dtype, device)
    marks = _known.get(key)
    if marks is None:
        marks = _known[key] = Marks(starts, dtype, device)
    return marks


def piece_starts(layout: Layout, present: Sequence[bool] | None) -> list[int]:
    """Where each rank's piece of each present parameter begins; None for all of them."""
    starts: list[int] = []
    size = layout.shard_numel
    for index, slot in enumerate(layout.slots):
        if slot.numel and (present is None or present[index]):
            starts += [slot.offset, *range((slot.offset // size + 1) * size, slot.end, size)]
    return starts
