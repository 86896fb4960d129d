"""Buffers of full parameters and gradients in the row layout.

The output of an all-gather, and the input of a reduce-scatter, are in another order than full
parameters: see ``row_layout.py``. After the all-gather, and before the reduce-scatter, one
multi-tensor copy between views, which are made once, changes the order.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..comm.custom import Memory, allocate
from .buffers import FullBuffer, ReduceBuffer
from .layout import Layout
from .row_layout import RowLayout

_LAYOUT = operator.attrgetter("layout")
_DENSE = {torch.strided}


class RowFullBuffer(FullBuffer):
    """Full parameters, and the memory that an all-gather of them fills.

    That memory exists while the all-gather runs. Memory for the full parameters is allocated when
    the result is copied there.
    """

    is_copied_out = True

    def _make_views(self, layout: Layout) -> None:
        assert isinstance(layout, RowLayout)
        super()._make_views(layout)
        self._layout = layout
        gathered = torch.empty_like(self.flat)
        self._gathered = gathered.untyped_storage()
        self._gather_into(gathered)
        self.slots = layout.slots
        self._places = by_parameter(self.alias, layout, [slot.offset for slot in self.slots])
        self._sizes = _sizes(layout)
        self._whole_places = _padded_by_parameter(self.alias, layout) if self._sizes else []
        self._gathered.resize_(0)

    def __init__(self, *args: Any, memory: Memory | None = None) -> None:
        super().__init__(*args)
        self._memory = memory
        self._release_full = self.release
        self.release = self._release_all
        if memory is None:
            self.allocate = functools.partial(self._gathered.resize_, self._nbytes)
            self._release_gathered: Callable[[], object] = functools.partial(
                self._gathered.resize_, 0
            )
        else:
            self.allocate, self._release_gathered = self._borrow, self._hand_back

    def _gather_into(self, gathered: torch.Tensor) -> None:
        layout = self._layout
        self.gather_output = gathered
        self.own = gathered[layout.shard_numel * self._rank :][: layout.shard_numel]
        self._sources = by_rank(gathered, layout)
        self._rows = gathered.view(layout.world_size, layout.shard_numel)

    def _borrow(self) -> None:
        """Let all-gathers fill memory that the user's allocator gives."""
        assert self._memory is not None
        flat = self.flat
        self._gather_into(allocate(self._memory, flat.numel(), flat.dtype, flat.device))
        if self.filled_from is not None:
            self.gather_input = self.own

    def _hand_back(self) -> None:
        self.gather_output = self.own = self._rows = self.flat
        self._sources = []
        if self.filled_from is not None:
            self.gather_input = self.own

    def copy_out(self) -> None:
        """Copy all-gathered data to the full parameters, and release its memory."""
        self.allocate_whole()
        if self._sizes and self.flat.device.type != "cpu":
            # One kernel; on a host it takes many times as long as the copies below.
            torch.split_with_sizes_copy(self._rows, self._sizes, dim=1, out=self._whole_places)
        else:
            torch._foreach_copy_(self._places, self._sources)
        self._release_gathered()

    def _release_all(self) -> None:
        self._release_gathered()
        self._release_full()


class RowReduceBuffer(ReduceBuffer):
    """Full gradients in the order of ranks; ``places`` have all ranks' room for a parameter."""

    def __init__(
        self,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        memory: Memory | None = None,
    ) -> None:
        super().__init__(layout, dtype, device)
        if memory is not None:
            self._kind = (memory, layout.padded_numel, dtype, device)
            self.allocate, self.release = self._borrow, self._hand_back

    def _borrow(self) -> None:
        """Have gradients copied into memory that the user gives."""
        self.flat = self.alias = allocate(*self._kind)
        self._make_views(self._layout)

    def _hand_back(self) -> None:
        self.flat = self.alias = self._rows = self.flat.new_empty(0)
        self.places = []
        self._cuts.clear()

    def _make_views(self, layout: Layout) -> None:
        assert isinstance(layout, RowLayout)
        self._layout = layout
        rows = self.alias.view(layout.world_size, layout.shard_numel)
        self.places = [rows[:, c.offset : c.offset + c.numel] for c in layout.chunks]
        self._cuts = [_Cut(layout, index, rows) for index in range(len(layout.chunks))]
        self._rows = rows
        sizes = _sizes(layout)
        self._by_rows = sizes is not None and all(chunk.numel for chunk in layout.chunks)
        #: Zeros for the alignment gaps, by the dtype of the gradients that they go between, and the
        #: gradients that they go before; last come first.
        self._fillers: dict[torch.dtype, list[tuple[int, torch.Tensor]]] = {}

    def fill(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Copy all gradients in one operation, padding with zeros; False if that cannot be.

        For accelerators: on a host it takes many times as long as one copy per gradient.
        """
        present = [g for g in gradients if g is not None]
        if not self._by_rows or len(present) < len(gradients):
            return False
        if not _DENSE.issuperset(map(_LAYOUT, present)):
            return False
        # Uninitialised gaps would do, but operation and buffer have to agree on every element.
        parts = self._with_gaps(present)
        torch._chunk_cat(parts, 0, len(self._rows), out=self._rows)
        return True

    def _with_gaps(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        layout = self._layout
        assert isinstance(layout, RowLayout)
        dtype = gradients[0].dtype
        if dtype not in self._fillers:
            ends = [0, *(c.offset + c.numel for c in layout.chunks)]
            widths = [c.offset - end for c, end in zip(layout.chunks, ends, strict=False)]
            zeros = functools.partial(torch.zeros, dtype=dtype, device=self.flat.device)
            gaps = [(index, zeros(layout.world_size, w)) for index, w in enumerate(widths) if w]
            self._fillers[dtype] = gaps[::-1]
        for index, gap in self._fillers[dtype]:
            gradients.insert(index, gap)
        return gradients

    def copies(
        self, gradients: Sequence[torch.Tensor | None]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The destinations of gradients, and the parts of them to copy there."""
        places: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for cut, gradient in zip(self._cuts, gradients, strict=True):
            if gradient is not None:
                places += cut.places
                sources += cut.parts_of(gradient)
        return places, sources

    def mark_all(self) -> bool:
        return False


class _Cut:
    """The cut of a full gradient into the parts that a reduce buffer keeps apart."""

    def __init__(self, layout: RowLayout, index: int, rows: torch.Tensor) -> None:
        chunk, shape = layout.chunks[index], layout.slots[index].shape
        self._shape = shape
        columns = rows[:, chunk.offset : chunk.offset + chunk.numel]
        self._ranks, self._columns = layout.world_size, chunk.numel
        self._dim, self._size = chunk.dim, chunk.size
        self._is_even = chunk.size * layout.world_size == shape[chunk.dim]
        if chunk.dim != 0:
            split = (layout.world_size, *shape[: chunk.dim], chunk.size, *shape[chunk.dim + 1 :])
            self.places = [_unflatten_columns(columns, split)]
        elif self._is_even:
            self.places = [columns]
        else:
            whole = shape[0] // chunk.size if chunk.size else 0
            self._whole = whole
            self._whole_rows = whole * chunk.size
            rest = math.prod(shape) - whole * chunk.numel
            self.places = [columns[:whole]]
            if rest:
                self.places.append(columns[whole, :rest])

    def parts_of(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        """The parts of ``gradient``, one for each of the places."""
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        if self._dim != 0:
            split = (*self._shape[: self._dim], self._ranks, self._size)
            apart = gradient.reshape(*split, *self._shape[self._dim + 1 :])
            return [apart.movedim(self._dim, 0)]
        if self._is_even:
            return [gradient.reshape(self._ranks, self._columns)]
        whole = gradient[: self._whole_rows].reshape(self._whole, self._columns)
        if len(self.places) == 1:
            return [whole]
        return [whole, gradient[self._whole_rows :].reshape(-1)]


def _unflatten_columns(columns: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Columns of a matrix with their contiguous content seen as ``shape[1:]``."""
    inner = torch.empty(tuple(shape[1:]), device="meta").stride()
    return columns.as_strided(tuple(shape), (columns.stride(0), *inner), columns.storage_offset())


def by_rank(gathered: torch.Tensor, layout: RowLayout) -> list[torch.Tensor]:
    """Each parameter in what was all-gathered: ranks first, then the rank's chunk."""
    rows = gathered.view(layout.world_size, layout.shard_numel)
    views: list[torch.Tensor] = []
    for chunk, slot in zip(layout.chunks, layout.slots, strict=True):
        columns = rows[:, chunk.offset : chunk.offset + chunk.numel]
        if chunk.dim != 0:
            shape = slot.shape
            split = (layout.world_size, *shape[: chunk.dim], chunk.size, *shape[chunk.dim + 1 :])
            columns = _unflatten_columns(columns, split)
        views.append(columns)
    return views


def whole_parameters(gathered: torch.Tensor, layout: RowLayout) -> list[torch.Tensor]:
    """The parameters in what was all-gathered, copied into their own shapes."""
    found: list[torch.Tensor] = []
    for columns, chunk, slot in zip(
        by_rank(gathered, layout), layout.chunks, layout.slots, strict=True
    ):
        if chunk.dim == 0:
            found.append(columns.reshape(-1)[: slot.numel].view(slot.shape))
        else:
            found.append(columns.movedim(0, chunk.dim).reshape(slot.shape))
    return found


def by_parameter(
    flat: torch.Tensor, layout: RowLayout, offsets: Sequence[int]
) -> list[torch.Tensor]:
    """The same elements as :func:`by_rank` has, with each parameter where ``offsets`` say."""
    ranks = layout.world_size
    views = [
        flat[offset : offset + ranks * chunk.numel].view(ranks, chunk.numel)
        for chunk, offset in zip(layout.chunks, offsets, strict=True)
    ]
    for index, (chunk, slot) in enumerate(zip(layout.chunks, layout.slots, strict=True)):
        if chunk.dim != 0:
            shape = slot.shape
            split = (*shape[: chunk.dim], layout.world_size, chunk.size, *shape[chunk.dim + 1 :])
            views[index] = views[index].view(split).movedim(chunk.dim, 0)
    return views


def _padded_by_parameter(flat: torch.Tensor, layout: RowLayout) -> list[torch.Tensor]:
    """The full buffer cut at each parameter, and at each gap, with the ranks' rows apart."""
    views: list[torch.Tensor] = []
    ranks, position = layout.world_size, 0
    for chunk in layout.chunks:
        if chunk.offset > position:
            views.append(flat[ranks * position : ranks * chunk.offset].view(ranks, -1))
        position = chunk.offset + chunk.numel
        room = flat[ranks * chunk.offset : ranks * position]
        views.append(room.view(ranks, chunk.numel))
    return views


def _sizes(layout: RowLayout) -> list[int] | None:
    """Sizes that cut a shard at each parameter and gap; None where some are not cut by rows."""
    sizes: list[int] = []
    position = 0
    for chunk in layout.chunks:
        if chunk.dim != 0:
            return None
        if chunk.offset > position:
            sizes.append(chunk.offset - position)
        sizes.append(chunk.numel)
        position = chunk.offset + chunk.numel
    return sizes
