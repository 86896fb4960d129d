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

import heapq
from collections.abc import Sequence


def assign_owners(costs: Sequence[float], ranks: int) -> list[int]:
    """The owner of each parameter: the rank with the least cost so far, for the costliest first.

    No two ranks' sums of costs differ by more than the largest cost.
    """
    owners = [0] * len(costs)
    loads = [(0.0, rank) for rank in range(ranks)]
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        load, rank = loads[0]
        owners[item] = rank
        heapq.heapreplace(loads, (load + costs[item], rank))
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
