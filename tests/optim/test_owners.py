"""Owners are balanced, and rounds have what each owner can step while the next round travels."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fullshard.optim.owners import arrange_rounds, assign_owners

costs_of_parameters = st.lists(st.integers(1, 1000).map(float), max_size=40)


@given(costs_of_parameters, st.integers(1, 9))
def test_no_two_ranks_differ_by_more_than_the_largest_cost(costs: list[float], ranks: int) -> None:
    owners = assign_owners(costs, ranks)

    loads = [sum(c for c, o in zip(costs, owners, strict=True) if o == r) for r in range(ranks)]
    assert len(owners) == len(costs)
    assert set(owners) <= set(range(ranks))
    assert max(loads) - min(loads) <= max(costs, default=0)


@given(costs_of_parameters, st.integers(1, 9))
def test_the_same_costs_have_the_same_owners_everywhere(costs: list[float], ranks: int) -> None:
    assert assign_owners(costs, ranks) == assign_owners(list(costs), ranks)


@given(costs_of_parameters, st.integers(1, 9), st.randoms())
def test_owners_that_hold_a_piece_are_preferred_without_imbalance(
    costs: list[float], ranks: int, random: Any
) -> None:
    holders = [random.sample(range(ranks), random.randint(0, ranks)) for _ in costs]

    owners = assign_owners(costs, ranks, holders)

    loads = [sum(c for c, o in zip(costs, owners, strict=True) if o == r) for r in range(ranks)]
    assert max(loads) - min(loads) <= max(costs, default=0)
    if costs and holders[costs.index(max(costs))]:
        first = costs.index(max(costs))
        assert owners[first] in holders[first]


def test_the_layers_of_a_transformer_are_spread_evenly() -> None:
    layers = [12.0, 4.0, 16.0, 16.0] * 24
    for ranks in (2, 3, 4, 8):
        owners = assign_owners(layers, ranks)
        loads = [0.0] * ranks
        for cost, owner in zip(layers, owners, strict=True):
            loads[owner] += cost
        assert max(loads) <= 1.02 * sum(layers) / ranks


@given(costs_of_parameters, st.integers(1, 9), st.integers(1, 3000))
def test_every_parameter_travels_once_and_rounds_stay_within_the_limit(
    costs: list[float], ranks: int, limit: int
) -> None:
    numels = [int(cost) for cost in costs]
    owners = assign_owners(costs, ranks)

    rounds = arrange_rounds(costs, numels, owners, ranks, limit)

    assert sorted(item for each in rounds for item in each) == list(range(len(costs)))
    for each in rounds:
        for rank in range(ranks):
            mine = [numels[item] for item in each if owners[item] == rank]
            assert len(mine) <= 1 or sum(mine) <= limit


@given(costs_of_parameters, st.integers(1, 9))
def test_a_round_has_one_parameter_of_each_owner_that_has_any_left(
    costs: list[float], ranks: int
) -> None:
    owners = assign_owners(costs, ranks)

    rounds = arrange_rounds(costs, [1 for _ in costs], owners, ranks, limit=1)

    most = max((owners.count(rank) for rank in range(ranks)), default=0)
    assert len(rounds) == most
    for each in rounds:
        assert len({owners[item] for item in each}) == len(each)
    largest = [max(costs[item] for item in each) for each in rounds]
    assert largest == sorted(largest, reverse=True)


def test_small_parameters_travel_in_one_round() -> None:
    costs = [8.0] * 10
    owners = assign_owners(costs, 2)
    assert len(arrange_rounds(costs, [8] * 10, owners, 2, limit=math.inf)) == 1
    assert len(arrange_rounds(costs, [8] * 10, owners, 2, limit=8)) == 5
