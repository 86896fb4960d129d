"""The order in which pieces of tensors travel to their owners, and back.

Pure integers: no tensors, no process group. Two parcels (tensors that travel), ``A`` of which
rank 0 holds two elements and rank 1 one, owned by rank 1, and ``b``, one element on each rank,
owned by rank 0:

    rank 0 sends   b0 | A0 A1        rank 1 sends   b1 | A2          (by destination)
    rank 0 gets    b0 | b1           rank 1 gets    A0 A1 | A2       (by source)
    rank 0 has     b0 b1             rank 1 has     A0 A1 A2         (by parcel)

The way back is the same, read from right to left. A parcel that is not sharded does not travel to
its owner, who has all of it, and travels back to every rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Parcel:
    """One tensor: its owner, and how many elements of it each rank holds.

    If it is not sharded, every rank holds all elements.
    """

    owner: int
    sizes: tuple[int, ...]
    is_sharded: bool = True

    @property
    def numel(self) -> int:
        return sum(self.sizes) if self.is_sharded else self.sizes[0]


@dataclasses.dataclass(frozen=True)
class Journey:
    """One all-to-all, as one rank sees it.

    The rank cuts what it has into ``cuts``, and sends those of them that ``order`` lists, with
    ``sent`` elements for each rank. It receives ``received`` elements from each, and cuts them into
    ``parts``. ``places`` has the parts of each parcel that arrives, in the parcels' order.
    """

    cuts: tuple[int, ...]
    order: tuple[int, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]
    parts: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]


def to_owners(parcels: Sequence[Parcel], rank: int, ranks: int) -> Journey:
    """From pieces, one per parcel, to all of each parcel that ``rank`` owns."""

    def travels(parcel: Parcel, source: int) -> int:
        return parcel.sizes[source] if parcel.is_sharded or source == parcel.owner else 0

    order: list[int] = []
    sent = [0] * ranks
    for destination in range(ranks):
        for index, parcel in enumerate(parcels):
            if parcel.owner == destination and travels(parcel, rank):
                order.append(index)
                sent[destination] += travels(parcel, rank)
    parts: list[int] = []
    received = [0] * ranks
    found: dict[int, list[int]] = {}
    for source in range(ranks):
        for index, parcel in enumerate(parcels):
            if parcel.owner == rank and travels(parcel, source):
                found.setdefault(index, []).append(len(parts))
                parts.append(travels(parcel, source))
                received[source] += travels(parcel, source)
    places = [tuple(found[index]) for index in sorted(found)]
    return Journey(
        tuple(parcel.sizes[rank] for parcel in parcels),
        tuple(order),
        tuple(sent),
        tuple(received),
        tuple(parts),
        tuple(places),
    )


def from_owners(parcels: Sequence[Parcel], rank: int, ranks: int) -> Journey:
    """From all of each parcel that ``rank`` owns to its pieces, one of each parcel that has one."""
    cuts: list[int] = []
    cut_of: dict[tuple[int, int], int] = {}
    for index, parcel in enumerate(parcels):
        if parcel.owner != rank:
            continue
        for holder in range(ranks) if parcel.is_sharded else range(1):
            if parcel.sizes[holder]:
                cut_of[index, holder] = len(cuts)
                cuts.append(parcel.sizes[holder])
    order: list[int] = []
    sent = [0] * ranks
    for destination in range(ranks):
        for index, parcel in enumerate(parcels):
            if parcel.owner == rank and parcel.sizes[destination]:
                order.append(cut_of[index, destination if parcel.is_sharded else 0])
                sent[destination] += parcel.sizes[destination]
    parts: list[int] = []
    received = [0] * ranks
    part_of: dict[int, int] = {}
    for source in range(ranks):
        for index, parcel in enumerate(parcels):
            if parcel.owner == source and parcel.sizes[rank]:
                part_of[index] = len(parts)
                parts.append(parcel.sizes[rank])
                received[source] += parcel.sizes[rank]
    places = tuple((part_of[index],) for index in sorted(part_of))
    return Journey(tuple(cuts), tuple(order), tuple(sent), tuple(received), tuple(parts), places)
