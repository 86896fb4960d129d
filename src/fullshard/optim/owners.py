"""Which rank owns which parameter, and which parameters travel together.

Pure integers: no tensors, no process group. All ranks compute the same from the same numbers.

Note: rounds
    Parameters travel to their owners in rounds, so that one round travels while another is
    stepped. Each owner's parameters are sorted by cost, and the first round has the most expensive
    parameter of each, the second round the next one: every rank receives about as much as it sends,
    in every round, however a unit's few matrices are distributed. Small rounds are merged up to a
    number of elements, because each costs two collectives.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def assign_owners(
    costs: Sequence[float], ranks: int, holders: Sequence[Collection[int]] = ()
) -> list[int]:
    """The owner of each parameter: the rank with the least cost so far, for the costliest first.

    No two ranks' sums of costs differ by more than the largest cost. Of ranks with the same cost so
    far, one of a parameter's ``holders`` is its owner, if there is one: a rank that has a piece
    knows whether there is a gradient.
    """
    owners = [0] * len(costs)
    loads = [0.0] * ranks
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        least = min(loads)
        free = [rank for rank, load in enumerate(loads) if load == least]
        held = [rank for rank in free if rank in holders[item]] if holders else []
        owners[item] = (held or free)[0]
        loads[owners[item]] += costs[item]
    return owners


def arrange_rounds(
    costs: Sequence[float],
    numels: Sequence[int],
    owners: Sequence[int],
    ranks: int,
    limit: int,
) -> list[list[int]]:
    """Parameters by the round in which they travel; see the note above.

    Two rounds are merged while no rank owns more than ``limit`` elements of them together.
    """
    queues: list[list[int]] = [[] for _ in range(ranks)]
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        queues[owners[item]].append(item)
    rounds: list[list[int]] = []
    held = [0] * ranks
    for position in range(max(map(len, queues), default=0)):
        items = [queue[position] for queue in queues if position < len(queue)]
        added = list(held)
        for item in items:
            added[owners[item]] += numels[item]
        if rounds and max(added) <= limit:
            rounds[-1] += items
            held = added
        else:
            rounds.append(items)
            held = [0] * ranks
            for item in items:
                held[owners[item]] = numels[item]
    return rounds
