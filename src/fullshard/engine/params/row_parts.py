"""A rank's part of full parameters that a few ranks share between forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .row_buffers import RowFullBuffer, by_parameter, by_rank
from .row_layout import RowLayout


class RowPart:
    """This rank's rows of the parameters of ``full``, as ``layout`` cuts them for a few ranks.

    The rows of all of these fill ``full`` again, which lies as it does for all ranks: a smaller
    number of ranks never has more padding.
    """

    def __init__(self, full: RowFullBuffer, layout: RowLayout, rank: int) -> None:
        self.full = full
        flat = full.alias
        with torch.no_grad():
            kept = flat.new_empty(layout.shard_numel)
            gathered = flat.new_empty(layout.padded_numel)
            pieces = layout.pieces(rank)
            shapes = [layout.chunk_shape(index, rank) for index in range(len(pieces))]
            pairs = zip(pieces, shapes, strict=True)
            #: This rank's rows of each parameter.
            self.rows = [kept[p.offset : p.offset + p.numel].view(s) for p, s in pairs]
            self._sources = by_rank(gathered, layout)
            self._places = by_parameter(flat, layout, [slot.offset for slot in full.slots])
            self._own = [
                view.detach().narrow(c.dim, min(rank * c.size, view.shape[c.dim]), shape[c.dim])
                for view, c, shape in zip(full.views, layout.chunks, shapes, strict=True)
            ]
        self.gather_input, self.gather_output = kept, gathered
        self._kept, self._gathered = kept.untyped_storage(), gathered.untyped_storage()
        self._sizes = self._kept.nbytes(), self._gathered.nbytes()
        self._kept.resize_(0)
        self._gathered.resize_(0)

    def keep(self) -> None:
        """Copy this rank's rows from the full parameters, which may go then."""
        self._kept.resize_(self._sizes[0])
        torch._foreach_copy_(self.rows, self._own)

    def begin_gather(self) -> None:
        """Have memory for the rows of all ranks."""
        self._gathered.resize_(self._sizes[1])

    def copy_out(self) -> None:
        """Fill the full parameters with the all-gathered data."""
        self.full.allocate_whole()
        torch._foreach_copy_(self._places, self._sources)
        self._gathered.resize_(0)

    def release(self) -> None:
        """Give the memory of this rank's rows back."""
        self._kept.resize_(0)


def part_of(
    full: RowFullBuffer, layout: RowLayout, dims: Sequence[int], size: int, rank: int
) -> RowPart:
    """The part that the ``rank``-th of ``size`` ranks keeps of the parameters in ``layout``."""
    smaller = RowLayout.pack_rows(
        [slot.name for slot in layout.slots],
        [slot.shape for slot in layout.slots],
        dims,
        world_size=size,
        alignment=1,
    )
    return RowPart(full, smaller, rank)
