"""What holds for the layout of any parameters, aligned or not, over any number of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from fullshard.engine.params.layout import Layout


@dataclass(frozen=True)
class Case:
    shapes: tuple[tuple[int, ...], ...]
    alignment: int
    world_size: int

    def layout(self) -> Layout:
        names = [f"p{index}" for index in range(len(self.shapes))]
        # The arithmetic does not look at strides.
        strides = [tuple(1 for _ in shape) for shape in self.shapes]
        return Layout.pack(
            names, self.shapes, strides, world_size=self.world_size, alignment=self.alignment
        )


# Zero-element shapes and scalars included; world sizes beyond the number of elements, too.
shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)
cases = st.builds(
    Case,
    st.lists(shapes, min_size=1, max_size=8).map(tuple),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.integers(1, 40),
)


@given(cases)
def test_pieces_of_all_ranks_tile_each_parameter_in_order(case: Case) -> None:
    layout = case.layout()

    for index, shape in enumerate(case.shapes):
        covered = 0
        for rank in range(case.world_size):
            piece = layout.pieces(rank)[index]
            assert piece.in_shard == (piece.numel > 0)
            if piece.in_shard:
                assert piece.start == covered
                covered += piece.numel
        assert covered == math.prod(shape)


@given(cases)
def test_every_element_is_found_where_the_pieces_say(case: Case) -> None:
    layout = case.layout()
    # Number the elements through, write them where the slots say, cut at the ranks' borders.
    buffer: list[tuple[int, int] | None] = [None] * layout.padded_numel
    for index, slot in enumerate(layout.slots):
        for element in range(math.prod(case.shapes[index])):
            assert buffer[slot.offset + element] is None
            buffer[slot.offset + element] = (index, element)

    for rank in range(case.world_size):
        shard = buffer[rank * layout.shard_numel : (rank + 1) * layout.shard_numel]
        listed: list[tuple[int, int] | None] = [None] * len(shard)
        for index, piece in enumerate(layout.pieces(rank)):
            for element in range(piece.numel):
                listed[piece.offset + element] = (index, piece.start + element)
        assert listed == shard


@given(cases)
def test_gaps_and_parameters_tile_the_padded_buffer(case: Case) -> None:
    layout = case.layout()
    slots = [(s.offset, s.offset + math.prod(s.shape)) for s in layout.slots if s.numel]

    position = 0
    for start, end in sorted([*slots, *layout.gaps()]):
        assert start == position
        assert end > start
        position = end
    assert position == layout.padded_numel


@given(cases)
def test_shards_are_of_equal_size_and_waste_less_than_one_element_each(case: Case) -> None:
    layout = case.layout()

    assert layout.shard_numel * case.world_size == layout.padded_numel
    assert 0 <= layout.padded_numel - layout.numel < case.world_size


@given(cases)
def test_every_parameter_starts_aligned_after_the_shortest_gap(case: Case) -> None:
    layout = case.layout()

    assert layout.slots[0].offset == 0
    for before, slot in zip(layout.slots, layout.slots[1:], strict=False):
        assert slot.offset % case.alignment == 0
        assert 0 <= slot.offset - before.end < case.alignment
    assert layout.numel == layout.slots[-1].end


@given(cases, st.data())
def test_a_range_lists_exactly_the_elements_in_it(case: Case, data: st.DataObject) -> None:
    layout = case.layout()
    start = data.draw(st.integers(0, layout.padded_numel))
    end = data.draw(st.integers(start, layout.padded_numel))

    found = layout.metadata(layout.pieces_between(start, end))

    listed = {
        (name, element)
        for name, (first, last) in zip(found.param_names, found.param_offsets, strict=True)
        for element in range(first, last + 1)
    }
    assert listed == {
        (slot.name, element)
        for slot in layout.slots
        for element in range(slot.numel)
        if start <= slot.offset + element < end
    }


@given(st.integers(0, 5), st.integers(1, 64))
def test_ranks_beyond_the_last_element_own_nothing(elements: int, world_size: int) -> None:
    layout = Case(((elements,),), 1, world_size).layout()

    owned = [layout.pieces(rank)[0].numel for rank in range(world_size)]

    assert sum(owned) == elements
    share = -(-elements // world_size)
    owners = -(-elements // share) if elements else 0
    assert all(owned[:owners])
    assert not any(owned[owners:])
