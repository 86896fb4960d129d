"""Where each parameter lies in its group's flat buffer, and which part each rank owns.

Pure integers: no tensors, no process group. Three parameters of 21, 35 and 25 fp32 elements,
each but the last padded to 16 bytes, over two ranks:

    offset   0                   24                                 60            85 86
             |--- 0: 21 ---|(3)|------------ 1: 35 -----------|(1)|---- 2: 25 ----|(1)
             |<-------------- rank 0: 43 ------------->|<---------- rank 1: 43 --------->|

``(n)`` are ``n`` elements that belong to no parameter: alignment gaps between parameters, and the
tail that makes the buffer divisible by the number of ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

#: Every parameter but the last starts on a multiple of this when a layout is aligned.
ALIGNMENT_BYTES = 16


class FlatParamShardMetadata(NamedTuple):
    """The parameters that a range of a flat buffer touches, with inclusive offset pairs."""

    param_names: tuple[str, ...]
    param_shapes: tuple[tuple[int, ...], ...]
    param_numels: tuple[int, ...]
    param_offsets: tuple[tuple[int, int], ...]

    def __eq__(self, other: object) -> bool:
        """As tuples are, also to one that was made of lists."""
        return isinstance(other, tuple) and _as_tuples(self) == _as_tuples(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(_as_tuples(self))


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, (list, tuple)) else value


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place: ``numel`` elements from ``offset`` on, seen with shape and stride."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    numel: int
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.numel


class Piece(NamedTuple):
    """The part of a parameter that lies in a range of the buffer.

    ``start`` counts from the parameter's first element, ``offset`` from the range's first. A
    parameter outside the range has ``numel`` 0.
    """

    in_shard: bool
    offset: int
    start: int
    numel: int


OUTSIDE = Piece(in_shard=False, offset=0, start=0, numel=0)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The arithmetic of one flat buffer shared by ``world_size`` ranks."""

    slots: tuple[Slot, ...]
    numel: int
    world_size: int

    @classmethod
    def pack(
        cls,
        names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        strides: Sequence[Sequence[int]],
        *,
        world_size: int,
        alignment: int = 1,
    ) -> Layout:
        """Lay parameters one after another, each but the last padded to ``alignment`` elements."""
        slots: list[Slot] = []
        offset = end = 0
        for name, shape, stride in zip(names, shapes, strides, strict=True):
            numel = math.prod(shape)
            slots.append(Slot(name, tuple(shape), tuple(stride), numel, offset))
            end = offset + numel
            offset = _round_up(end, alignment)
        return cls(tuple(slots), end, world_size)

    @functools.cached_property
    def shard_numel(self) -> int:
        """Elements per rank, the tail's padding included."""
        return -(-self.numel // self.world_size)

    @functools.cached_property
    def padded_numel(self) -> int:
        return self.shard_numel * self.world_size

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """For each parameter, the part of it that ``rank`` owns."""
        start = rank * self.shard_numel
        return self.pieces_between(start, start + self.shard_numel)

    def pieces_between(self, start: int, end: int) -> tuple[Piece, ...]:
        """For each parameter, the part of it in ``[start, end)`` of the unsharded buffer."""
        return tuple(_intersect(slot, start, end) for slot in self.slots)

    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The ``[start, end)`` ranges of the padded buffer that belong to no parameter."""
        edges = [(slot.offset, slot.end) for slot in self.slots]
        edges.append((self.padded_numel, self.padded_numel))
        gaps: list[tuple[int, int]] = []
        position = 0
        for start, end in edges:
            if start > position:
                gaps.append((position, start))
            position = max(position, end)
        return tuple(gaps)

    def metadata(self, pieces: Sequence[Piece]) -> FlatParamShardMetadata:
        """Describe ``pieces`` (one per parameter) by name; parameters outside are left out."""
        inside = [(slot, piece) for slot, piece in zip(self.slots, pieces, strict=True) if piece[0]]
        return FlatParamShardMetadata(
            tuple(slot.name for slot, _ in inside),
            tuple(slot.shape for slot, _ in inside),
            tuple(slot.numel for slot, _ in inside),
            tuple((piece.start, piece.start + piece.numel - 1) for _, piece in inside),
        )


def alignment_elements(itemsize: int) -> int:
    """How many elements of ``itemsize`` bytes make up one alignment step."""
    return max(1, ALIGNMENT_BYTES // itemsize)


def _intersect(slot: Slot, start: int, end: int) -> Piece:
    first = max(slot.offset, start)
    last = min(slot.end, end)
    if first >= last:
        return OUTSIDE
    return Piece(True, first - start, first - slot.offset, last - first)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
