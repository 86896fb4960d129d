"""The flat layout: each parameter's offset in its group's flat buffer, and each rank's part.

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


class _ShardMetadataFields(NamedTuple):
    param_names: tuple[str, ...]
    param_shapes: tuple[tuple[int, ...], ...]
    param_strides: tuple[tuple[int, ...], ...]
    param_contiguities: tuple[bool, ...]
    param_numels: tuple[int, ...]
    param_offsets: tuple[tuple[int, int], ...]


class FlatParamShardMetadata(_ShardMetadataFields):
    """The parameters that a range of a flat buffer touches, with inclusive offset pairs.

    Older versions of torch have no strides and contiguities, and programs written for them leave
    these two out. Such metadata describes contiguous parameters, and is compared by the other four
    fields alone.
    """

    #: Whether strides and contiguities were given.
    _has_strides = True

    def __new__(
        cls,
        param_names: Sequence[str],
        param_shapes: Sequence[Sequence[int]],
        param_strides: Any = None,
        param_contiguities: Any = None,
        param_numels: Any = None,
        param_offsets: Any = None,
    ) -> FlatParamShardMetadata:
        if param_numels is None and param_offsets is None:
            # Four values by position are names, shapes, numels and offsets.
            param_numels, param_offsets = param_strides, param_contiguities
            param_strides = param_contiguities = None
        missing = [
            name
            for name, value in (("param_numels", param_numels), ("param_offsets", param_offsets))
            if value is None
        ]
        if missing:
            raise TypeError(
                f"FlatParamShardMetadata lacks {' and '.join(missing)}: it takes names, shapes, "
                "numels and offsets, or these four with strides and contiguities before numels"
            )
        has_strides = param_strides is not None
        if param_strides is None:
            param_strides = tuple(map(_contiguous_stride, param_shapes))
        if param_contiguities is None:
            param_contiguities = tuple(map(contiguous_in_memory, param_shapes, param_strides))
        self = super().__new__(
            cls,
            param_names,  # type: ignore[arg-type]
            param_shapes,  # type: ignore[arg-type]
            param_strides,
            param_contiguities,
            param_numels,
            param_offsets,
        )
        self._has_strides = has_strides
        return self

    def __eq__(self, other: object) -> bool:
        """Compare like tuples, also with metadata that was made of lists."""
        if not isinstance(other, tuple):
            return False
        complete = self._has_strides and len(other) == 6 and getattr(other, "_has_strides", True)
        compared = _as_tuples if complete else _without_strides
        return bool(compared(self) == compared(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(_without_strides(self))


def _without_strides(metadata: tuple[Any, ...]) -> Any:
    """Names, shapes, numels and offsets, of metadata that may have strides between them."""
    return _as_tuples((*metadata[:2], *metadata[-2:]) if len(metadata) == 6 else metadata)


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    sizes = [max(1, size) for size in shape]
    return tuple(math.prod(sizes[dimension + 1 :]) for dimension in range(len(sizes)))


def contiguous_in_memory(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """True if elements lie one after another; the stride of a dimension of size 1 is irrelevant."""
    if 0 in shape:
        return True
    expected = zip(shape, stride, _contiguous_stride(shape), strict=True)
    return all(size == 1 or step == contiguous for size, step, contiguous in expected)


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, (list, tuple)) else value


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's slot: ``numel`` elements from ``offset`` on, seen with shape and stride."""

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

    def piece_starts(self, present: Sequence[bool] | None) -> list[int]:
        """The offset of each rank's piece of each present parameter; None means all parameters."""
        chosen = (s for i, s in enumerate(self.slots) if present is None or present[i])
        return [start for slot in chosen for start in starts_in(slot, self.shard_numel)]

    def metadata(self, pieces: Sequence[Piece]) -> FlatParamShardMetadata:
        """Describe ``pieces`` (one per parameter) by name; parameters outside are left out."""
        inside = [(slot, piece) for slot, piece in zip(self.slots, pieces, strict=True) if piece[0]]
        return FlatParamShardMetadata(
            tuple(slot.name for slot, _ in inside),
            tuple(slot.shape for slot, _ in inside),
            tuple(slot.stride for slot, _ in inside),
            tuple(contiguous_in_memory(slot.shape, slot.stride) for slot, _ in inside),
            tuple(slot.numel for slot, _ in inside),
            tuple((piece.start, piece.start + piece.numel - 1) for _, piece in inside),
        )


def alignment_elements(itemsize: int) -> int:
    """The number of elements of ``itemsize`` bytes in one alignment step."""
    return max(1, ALIGNMENT_BYTES // itemsize)


def starts_in(slot: Slot, size: int) -> list[int]:
    """The offsets of the pieces of one parameter, for ranks with ``size`` elements each."""
    if not slot.numel:
        return []
    return [slot.offset, *range((slot.offset // size + 1) * size, slot.end, size)]


def _intersect(slot: Slot, start: int, end: int) -> Piece:
    first = max(slot.offset, start)
    last = min(slot.end, end)
    if first >= last:
        return OUTSIDE
    return Piece(True, first - start, first - slot.offset, last - first)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
