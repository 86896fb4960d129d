"""Marks of the gradients that a rank has: where they are, and that there are none elsewhere."""

from __future__ import annotations

import torch
from hypothesis import example, given, strategies

from fullshard.engine.params.buffers import ReduceBuffer
from fullshard.engine.params.layout import Layout
from fullshard.engine.params.unused_parameters import Marks, UsedParameterMarks, piece_starts
from fullshard.testing import device


def layout_of(sizes: list[int], ranks: int) -> Layout:
    names = [f"p{i}" for i in range(len(sizes))]
    return Layout.pack(
        names, [(n,) for n in sizes], [(1,)] * len(sizes), world_size=ranks, alignment=4
    )


def marked(flat: torch.Tensor) -> set[int]:
    """Where a buffer of negative zeros has positive ones."""
    return set((~flat.signbit()).nonzero().flatten().tolist())


@given(
    sizes=strategies.lists(strategies.integers(0, 40), min_size=1, max_size=5),
    ranks=strategies.integers(1, 6),
    flags=strategies.lists(strategies.booleans(), min_size=5, max_size=5),
)
def test_every_ranks_piece_of_a_present_gradient_is_marked_and_no_absent_one(
    sizes: list[int], ranks: int, flags: list[bool]
) -> None:
    layout = layout_of(sizes, ranks)
    for present in (None, flags[: len(sizes)]):
        wanted = set(piece_starts(layout, present))
        absent = {
            place
            for slot, is_there in zip(layout.slots, present or [True] * len(sizes), strict=True)
            if not is_there
            for place in range(slot.offset, slot.end)
        }
        flat = torch.full((layout.padded_numel,), -0.0)
        Marks(sorted(wanted), flat.dtype, flat.device).add_to(flat)

        assert marked(flat) == wanted
        assert not wanted & absent


def test_marks_of_a_device_leave_what_they_mark_as_it_is() -> None:
    layout = layout_of([7, 3, 11], 2)
    marks = UsedParameterMarks(layout, torch.float32, device())
    flat = torch.randn(layout.padded_numel, device=device())
    before = flat.clone()

    marks.mark(flat, None)
    marks.mark(flat, (True, False, True))

    torch.testing.assert_close(flat, before, rtol=0, atol=0)


@given(
    sizes=strategies.lists(
        strategies.integers(0, 40) | strategies.integers(500, 6000), min_size=1, max_size=8
    ),
    ranks=strategies.integers(1, 6),
)
@example(sizes=[512] * 40, ranks=6)
def test_a_grid_has_an_element_in_every_ranks_piece_of_every_gradient(
    sizes: list[int], ranks: int
) -> None:
    layout = layout_of(sizes, ranks)
    buffer = ReduceBuffer(layout, torch.float32, device())
    buffer.allocate()
    buffer.alias.fill_(-0.0)

    if not buffer.mark_all():
        small = [
            piece for rank in range(ranks) for piece in layout.pieces(rank) if 0 < piece.numel < 256
        ]
        assert len(small) > 4 or not any(sizes)
        return

    found = marked(buffer.alias)
    for rank in range(ranks):
        for slot, piece in zip(layout.slots, layout.pieces(rank), strict=True):
            first = slot.offset + piece.start
            assert not piece.numel or found & set(range(first, first + piece.numel))


def test_a_grid_leaves_what_it_marks_as_it_is() -> None:
    layout = layout_of([700, 3, 1100], 2)
    buffer = ReduceBuffer(layout, torch.float32, device())
    buffer.allocate()
    before = torch.randn(layout.padded_numel, device=device())
    buffer.alias.copy_(before)

    assert buffer.mark_all()

    torch.testing.assert_close(buffer.alias, before, rtol=0, atol=0)


def test_many_small_parameters_are_not_marked_by_a_grid() -> None:
    buffer = ReduceBuffer(layout_of([1] * 100, 2), torch.float32, device())
    buffer.allocate()

    assert not buffer.mark_all()
