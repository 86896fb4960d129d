"""Which calls of a step run eagerly, are captured, are replayed: decided from what came before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.captured.calls import RESTLESS_AFTER, Action, Calls

KINDS = st.lists(st.integers(0, 5), max_size=80)
WARMUPS, LIMITS = st.integers(1, 4), st.integers(1, 3)


def follow(calls: Calls, kinds: list[int]) -> list[Action]:
    """Make the calls, every capture a success."""
    actions = []
    for kind in kinds:
        actions.append(calls.decide(kind))
        if actions[-1] is Action.CAPTURE:
            calls.keep(kind)
    return actions


@given(KINDS, WARMUPS, LIMITS)
def test_a_kind_is_captured_after_its_warm_up_and_replayed_while_it_is_kept(
    kinds: list[int], warmup: int, limit: int
) -> None:
    calls, seen = Calls(warmup, limit), dict.fromkeys(range(6), 0)
    kept: list[int] = []
    for kind in kinds:
        action = calls.decide(kind)
        if kind in kept:
            assert action is Action.REPLAY
            kept.remove(kind)
            kept.append(kind)
        elif seen[kind] == warmup:
            assert action is Action.CAPTURE
            gone = calls.keep(kind)
            kept.append(kind)
            assert gone == (kept.pop(0) if len(kept) > limit else None)
            seen[kind] = 0
        else:
            assert action is Action.EAGER
            seen[kind] += 1
        assert calls.kept == kept
        assert len(kept) <= limit


@given(KINDS, WARMUPS, LIMITS)
def test_the_same_calls_get_the_same_decisions(kinds: list[int], warmup: int, limit: int) -> None:
    # That is why ranks that make the same calls need not ask each other.
    assert follow(Calls(warmup, limit), kinds) == follow(Calls(warmup, limit), kinds)


@given(WARMUPS, LIMITS, st.integers(0, 300))
def test_kinds_that_never_return_are_never_captured(warmup: int, limit: int, count: int) -> None:
    assert set(follow(Calls(warmup, limit), [*range(count)])) <= {Action.EAGER}


def test_a_capture_that_failed_is_tried_again_at_the_next_call() -> None:
    calls = Calls(warmup=1, limit=1)
    assert [calls.decide("a") for _ in range(3)] == [Action.EAGER, Action.CAPTURE, Action.CAPTURE]


def test_calls_that_are_all_different_are_told_of_once() -> None:
    calls = Calls(warmup=2, limit=2)
    told = []
    for kind in range(3 * RESTLESS_AFTER):
        calls.decide(kind)
        told.append(calls.is_restless)
    assert told.count(True) == 1


@given(st.integers(1, 4), st.integers(1, 3))
def test_graphs_that_have_to_be_made_again_and_again_are_told_of_once(
    limit: int, warmup: int
) -> None:
    told = {}
    for kinds in (limit, limit + 1):
        calls, told[kinds] = Calls(warmup, limit), 0
        for call in range(20 * (limit + 1) * (warmup + 1)):
            if calls.decide(call % kinds) is Action.CAPTURE:
                calls.keep(call % kinds)
                told[kinds] += calls.is_crowded
    assert told == {limit: 0, limit + 1: 1}


@pytest.mark.parametrize(("warmup", "limit", "name"), [(0, 1, "warmup"), (1, 0, "graphs")])
def test_numbers_below_one_are_refused(warmup: int, limit: int, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Calls(warmup, limit)
