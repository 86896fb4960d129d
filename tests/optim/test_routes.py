"""All-to-alls by a route bring each piece to its owner, and back: simulated with lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fullshard.optim.routes import Journey, Parcel, from_owners, to_owners


@st.composite
def parcels_and_ranks(draw: Any) -> tuple[list[Parcel], int]:
    ranks = draw(st.integers(1, 5))
    parcels = []
    for _ in range(draw(st.integers(0, 6))):
        owner = draw(st.integers(0, ranks - 1))
        if draw(st.booleans()):
            sizes = draw(st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks))
            parcels.append(Parcel(owner, tuple(sizes)))
        else:
            parcels.append(Parcel(owner, (draw(st.integers(0, 4)),) * ranks, is_sharded=False))
    return parcels, ranks


def pieces(parcels: Sequence[Parcel], rank: int) -> list[list[str]]:
    """A rank's piece of each parcel, with a name for every element."""
    found = []
    for index, parcel in enumerate(parcels):
        start = sum(parcel.sizes[:rank]) if parcel.is_sharded else 0
        found.append([f"{index}.{start + i}" for i in range(parcel.sizes[rank])])
    return found


def whole(parcels: Sequence[Parcel], rank: int) -> list[str]:
    """All that ``rank`` owns."""
    owned = [(i, parcel) for i, parcel in enumerate(parcels) if parcel.owner == rank]
    return [f"{index}.{element}" for index, parcel in owned for element in range(parcel.numel)]


def exchange(journeys: Sequence[Journey], cuts: Sequence[list[list[str]]]) -> list[list[str]]:
    """What each rank has after an all-to-all, in the order of its journey."""
    sent = [[x for i in j.order for x in cuts[r][i]] for r, j in enumerate(journeys)]
    arrived: list[list[str]] = [[] for _ in journeys]
    for source, journey in enumerate(journeys):
        assert len(sent[source]) == sum(journey.sent)
        position = 0
        for destination, count in enumerate(journey.sent):
            assert count == journeys[destination].received[source]
            arrived[destination] += sent[source][position : position + count]
            position += count
    found = []
    for journey, elements in zip(journeys, arrived, strict=True):
        assert len(elements) == sum(journey.parts)
        parts = []
        for size in journey.parts:
            parts.append(elements[:size])
            elements = elements[size:]
        found.append([x for places in journey.places for place in places for x in parts[place]])
    return found


def cut(elements: list[str], sizes: Sequence[int]) -> list[list[str]]:
    found = []
    for size in sizes:
        found.append(elements[:size])
        elements = elements[size:]
    assert not elements
    return found


@given(parcels_and_ranks())
def test_owners_get_all_elements_in_order(case: tuple[list[Parcel], int]) -> None:
    parcels, ranks = case
    journeys = [to_owners(parcels, rank, ranks) for rank in range(ranks)]

    found = exchange(journeys, [pieces(parcels, rank) for rank in range(ranks)])

    assert found == [whole(parcels, rank) for rank in range(ranks)]


@given(parcels_and_ranks())
def test_every_rank_gets_its_pieces_back(case: tuple[list[Parcel], int]) -> None:
    parcels, ranks = case
    journeys = [from_owners(parcels, rank, ranks) for rank in range(ranks)]

    cuts = [cut(whole(parcels, rank), journeys[rank].cuts) for rank in range(ranks)]
    found = exchange(journeys, cuts)

    for rank in range(ranks):
        assert found[rank] == [x for piece in pieces(parcels, rank) for x in piece]


def test_the_drawing_of_the_module() -> None:
    parcels = [Parcel(1, (2, 1)), Parcel(0, (1, 1))]
    first, second = (to_owners(parcels, rank, 2) for rank in range(2))
    assert first.order == second.order == (1, 0)
    assert (first.sent, second.sent) == ((1, 2), (1, 1))
    assert (first.received, second.received) == ((1, 1), (2, 1))


def test_what_is_not_sharded_travels_back_only() -> None:
    parcels = [Parcel(0, (3, 3), is_sharded=False)]
    assert to_owners(parcels, 0, 2).sent == (3, 0)
    assert to_owners(parcels, 1, 2).sent == (0, 0)
    assert from_owners(parcels, 0, 2).sent == (3, 3)
