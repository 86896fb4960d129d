"""Why a unit is unsharded: one reason at a time, whatever happens in whatever order."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fullshard.engine.runtime.residency import Reason, Residency

EVENTS = {
    "prefetch": (),
    "request": ([1],),
    "use": (),
    "leave_to_backward": ([2],),
    "keep": (),
    "pin": (),
    "reshard": (),
}


def after(*events: str) -> Residency:
    residency = Residency()
    for event in events:
        arguments: Any = EVENTS[event]
        getattr(residency, event)(*arguments)
    return residency


def test_a_step_under_full_shard_goes_through_the_reasons_in_order() -> None:
    seen = [
        after(*events.split()).reason
        for events in (
            "prefetch",
            "prefetch use",
            "prefetch use leave_to_backward",
            "prefetch use leave_to_backward use",
            "prefetch use leave_to_backward use reshard",
        )
    ]

    assert seen == [
        Reason.PREFETCHED,
        Reason.IN_USE,
        Reason.AWAITS_BACKWARD,
        Reason.IN_USE,
        Reason.NONE,
    ]


def test_only_what_computes_is_left_to_a_backward() -> None:
    assert after("request", "leave_to_backward").reason is Reason.REQUESTED
    assert after("leave_to_backward").reason is Reason.NONE


def test_a_sharded_unit_is_neither_kept_nor_pinned() -> None:
    assert after("keep").reason is after("pin").reason is Reason.NONE


@given(st.lists(st.sampled_from(["request", "use", "leave_to_backward"])))
def test_a_pinned_unit_stays_pinned_whoever_uses_it(events: list[str]) -> None:
    assert after("use", "pin", *events).reason is Reason.PINNED


@given(st.lists(st.sampled_from([*EVENTS])))
def test_resharding_leaves_nothing_behind(events: list[str]) -> None:
    residency = after(*events, "reshard")

    assert residency.reason is Reason.NONE
    assert not residency.is_requested
    assert not residency.is_stale
    assert not residency.serves_next_pass(lambda: [1], any_changed=False)


@given(st.lists(st.sampled_from([*EVENTS])), st.booleans())
def test_the_next_pass_uses_what_was_requested_kept_or_pinned_and_nothing_else(
    events: list[str], any_changed: bool
) -> None:
    residency = after(*events)
    serves = residency.serves_next_pass(lambda: [1], any_changed)

    if residency.is_requested:
        assert serves
        assert not residency.serves_next_pass(lambda: [7], any_changed)
    elif residency.reason in (Reason.KEPT, Reason.PINNED):
        assert serves is not any_changed
    else:
        assert not serves
