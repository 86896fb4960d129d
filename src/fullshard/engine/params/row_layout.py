"""The layout in which every rank holds whole rows of each parameter, as ``Shard(0)`` wants.

Pure integers: no tensors, no process group. Each parameter is cut along one dimension as
``torch.chunk`` cuts it, and a rank's shard is its chunks, one after another, each padded to the
largest. Two parameters, ``A`` of five rows and ``b`` of two, over two ranks (a letter is a row, a
dot a row of padding, ``|`` an alignment gap):

    shard of rank 0     A0 A1 A2 | b0
    shard of rank 1     A3 A4 .  | b1

    all-gathered        A0 A1 A2 | b0 A3 A4 . | b1      one rank after another
    full buffer         A0 A1 A2 A3 A4 . | | b0 b1      one parameter after another

The padding is at a parameter's end, so the rows of a full parameter are contiguous. The two orders
have the same size, ``world_size`` times a shard's, and a parameter that begins at ``offset`` in a
shard begins at ``world_size * offset`` in the full buffer. One copy per parameter, of strided
views that are made once, leads from the one order to the other (``row_buffers.py``).

A parameter that is cut along another dimension than the first is cut evenly; its chunks are
contiguous in a shard, as is the whole one in the full buffer.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from .layout import Layout, Piece, Slot, _contiguous_stride, _round_up


class RowChunk(NamedTuple):
    """The cut of one parameter: ``size`` indices of dimension ``dim`` per rank.

    ``numel`` is the size of the largest chunk, for which every rank's shard has space, from
    ``offset`` on.
    """

    dim: int
    size: int
    numel: int
    offset: int


@dataclasses.dataclass(frozen=True)
class RowLayout(Layout):
    """The arithmetic of parameters that ``world_size`` ranks share by rows.

    ``slots`` are the parameters' places in the full buffer, ``pieces`` those in a shard.
    """

    chunks: tuple[RowChunk, ...] = ()

    @classmethod
    def pack_rows(
        cls,
        names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        dims: Sequence[int],
        *,
        world_size: int,
        alignment: int = 1,
    ) -> RowLayout:
        """Lay parameters one after another, each cut along its entry of ``dims``."""
        slots: list[Slot] = []
        chunks: list[RowChunk] = []
        offset = end = 0
        for name, shape, dim in zip(names, shapes, dims, strict=True):
            size = -(-shape[dim] // world_size)
            if dim != 0 and size * world_size != shape[dim]:
                raise ValueError(
                    f"Parameter {name!r} of shape {tuple(shape)} is cut along dim {dim}, whose "
                    f"size {shape[dim]} is not divisible by {world_size} ranks"
                )
            numel = size * math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])
            chunks.append(RowChunk(dim, size, numel, offset))
            stride = _contiguous_stride(shape)
            slots.append(Slot(name, tuple(shape), stride, math.prod(shape), world_size * offset))
            end = offset + numel
            offset = _round_up(end, alignment)
        return cls(tuple(slots), world_size * end, world_size, tuple(chunks))

    @functools.cached_property
    def shard_numel(self) -> int:
        """Elements per rank, padding included."""
        return self.chunks[-1].offset + self.chunks[-1].numel if self.chunks else 0

    def chunk_shape(self, index: int, rank: int) -> tuple[int, ...]:
        """The shape of a rank's chunk of a parameter; without elements where it has no rows."""
        shape, chunk = self.slots[index].shape, self.chunks[index]
        rows = min(chunk.size, max(0, shape[chunk.dim] - rank * chunk.size))
        return (*shape[: chunk.dim], rows, *shape[chunk.dim + 1 :])

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """For each parameter, the rank's chunk: its place in the shard.

        ``start`` counts a parameter's elements in the order in which ranks hold them.
        """
        pieces: list[Piece] = []
        for index, chunk in enumerate(self.chunks):
            numel = math.prod(self.chunk_shape(index, rank))
            start = rank * chunk.numel if numel else 0
            pieces.append(Piece(numel > 0, chunk.offset, start, numel))
        return tuple(pieces)

    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The ``[start, end)`` ranges of the all-gathered order that belong to no parameter."""
        gaps: list[tuple[int, int]] = []
        for rank in range(self.world_size):
            position = rank * self.shard_numel
            ends = [*self.pieces(rank), Piece(False, self.shard_numel, 0, 0)]
            for piece in ends:
                start = rank * self.shard_numel + piece.offset
                if start > position:
                    gaps.append((position, start))
                position = max(position, start + piece.numel)
        return tuple(gaps)

    def piece_starts(self, present: Sequence[bool] | None) -> list[int]:
        """The offset of each rank's slot for each present parameter, in the all-gathered order.

        This includes ranks without rows: their padding shows them whether any rank has a gradient
        of the parameter.
        """
        chosen = [
            chunk
            for index, chunk in enumerate(self.chunks)
            if chunk.numel and (present is None or present[index])
        ]
        return [
            rank * self.shard_numel + chunk.offset
            for chunk in chosen
            for rank in range(self.world_size)
        ]
