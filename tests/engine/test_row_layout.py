"""What holds for parameters that any number of ranks share by rows, and for their buffers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fullshard.engine.params.row_buffers import RowFullBuffer, RowReduceBuffer
from fullshard.engine.params.row_layout import RowLayout


@dataclass(frozen=True)
class Case:
    #: Shapes, and the dimension along which each is cut.
    parameters: tuple[tuple[tuple[int, ...], int], ...]
    alignment: int
    world_size: int

    def layout(self) -> RowLayout:
        shapes = [self.shape(index) for index in range(len(self.parameters))]
        return RowLayout.pack_rows(
            [f"p{index}" for index in range(len(shapes))],
            shapes,
            [dim for _, dim in self.parameters],
            world_size=self.world_size,
            alignment=self.alignment,
        )

    def shape(self, index: int) -> tuple[int, ...]:
        """Dimensions other than the first are cut evenly."""
        shape, dim = self.parameters[index]
        even = self.world_size if dim else 1
        return (*shape[:dim], even * shape[dim], *shape[dim + 1 :])

    def values(self) -> list[torch.Tensor]:
        first, found = 1, []
        for index in range(len(self.parameters)):
            numel = math.prod(self.shape(index))
            found.append(torch.arange(first, first + numel).view(self.shape(index)).float())
            first += numel
        return found

    def chunks(self, rank: int) -> list[torch.Tensor]:
        """What torch itself gives a rank of each parameter."""
        found = []
        for value, (_, dim) in zip(self.values(), self.parameters, strict=True):
            parts = value.chunk(self.world_size, dim)
            empty = value.narrow(dim, 0, 0)
            found.append(parts[rank] if rank < len(parts) else empty)
        return found

    def shard(self, layout: RowLayout, rank: int) -> torch.Tensor:
        shard = torch.zeros(layout.shard_numel)
        for piece, chunk in zip(layout.pieces(rank), self.chunks(rank), strict=True):
            shard[piece.offset : piece.offset + piece.numel] = chunk.reshape(-1)
        return shard


# Dimensions without elements included; world sizes beyond the number of rows, too.
shapes = st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple)
parameters = shapes.flatmap(
    lambda shape: st.tuples(st.just(shape), st.sampled_from([0, 0, len(shape) - 1]))
)
cases = st.builds(
    Case,
    st.lists(parameters, min_size=1, max_size=5).map(tuple),
    st.sampled_from([1, 4, 8]),
    st.integers(1, 9),
)


@given(cases)
def test_each_rank_holds_the_chunks_that_torch_would_give_it(case: Case) -> None:
    layout = case.layout()

    for rank in range(case.world_size):
        for index, chunk in enumerate(case.chunks(rank)):
            assert layout.chunk_shape(index, rank) == tuple(chunk.shape)
            piece = layout.pieces(rank)[index]
            assert piece.numel == chunk.numel()
            assert piece.in_shard == (piece.numel > 0)


@given(cases)
def test_pieces_and_gaps_tile_what_is_all_gathered(case: Case) -> None:
    layout = case.layout()
    pieces = [
        (rank * layout.shard_numel + piece.offset, piece.numel)
        for rank in range(case.world_size)
        for piece in layout.pieces(rank)
        if piece.numel
    ]
    ranges = [(start, start + numel) for start, numel in pieces]

    position = 0
    for start, end in sorted([*ranges, *layout.gaps()]):
        assert start == position
        position = end
    assert position == layout.padded_numel


@given(cases)
def test_every_parameter_begins_on_a_multiple_of_the_alignment(case: Case) -> None:
    layout = case.layout()

    assert all(chunk.offset % case.alignment == 0 for chunk in layout.chunks)
    assert all(slot.offset % case.alignment == 0 for slot in layout.slots)


@given(cases)
def test_full_parameters_are_whole_after_an_all_gather(case: Case) -> None:
    layout = case.layout()
    buffer = RowFullBuffer(layout, 0, case.shard(layout, 0), torch.float32, torch.device("cpu"))
    buffer.allocate()
    shards = [case.shard(layout, rank) for rank in range(case.world_size)]
    buffer.gather_output.copy_(torch.cat(shards))

    buffer.copy_out()

    for view, value in zip(buffer.views, case.values(), strict=True):
        assert view.is_contiguous()
        torch.testing.assert_close(view, value, rtol=0, atol=0)


@given(cases)
def test_a_reduce_buffer_has_each_ranks_rows_together(case: Case) -> None:
    layout = case.layout()
    buffer = RowReduceBuffer(layout, torch.float32, torch.device("cpu"))
    buffer.allocate()
    places, sources = buffer.copies(case.values())

    torch._foreach_copy_(places, sources)

    check_ranks_rows(case, layout, buffer.flat)


@given(cases)
def test_one_operation_fills_a_reduce_buffer_that_is_cut_by_rows(case: Case) -> None:
    layout = case.layout()
    buffer = RowReduceBuffer(layout, torch.float32, torch.device("cpu"))
    buffer.allocate()

    filled = buffer.fill(case.values())

    assert filled == all(chunk.dim == 0 and chunk.numel for chunk in layout.chunks)
    if filled:
        check_ranks_rows(case, layout, buffer.flat)
    assert not buffer.fill([None, *case.values()[1:]])


def check_ranks_rows(case: Case, layout: RowLayout, flat: torch.Tensor) -> None:
    for rank in range(case.world_size):
        shard = flat[rank * layout.shard_numel :][: layout.shard_numel]
        for piece, chunk in zip(layout.pieces(rank), case.chunks(rank), strict=True):
            found = shard[piece.offset : piece.offset + piece.numel]
            torch.testing.assert_close(found, chunk.reshape(-1), rtol=0, atol=0)


@given(cases)
def test_marks_are_in_every_ranks_room_for_a_parameter(case: Case) -> None:
    layout = case.layout()
    present = [index % 2 == 0 for index in range(len(case.parameters))]

    starts = layout.piece_starts(present)

    expected = {
        rank * layout.shard_numel + chunk.offset
        for index, chunk in enumerate(layout.chunks)
        for rank in range(case.world_size)
        if present[index] and chunk.numel
    }
    assert set(starts) == expected


def test_a_dimension_that_is_not_the_first_has_to_be_divisible() -> None:
    with pytest.raises(ValueError, match=r"'weight' of shape \(4, 5\).*dim 1.*5.*2 ranks"):
        RowLayout.pack_rows(["weight"], [(4, 5)], [1], world_size=2)
