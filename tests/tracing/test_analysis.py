"""Who waited for what, computed from traces made by hand, with numbers that follow from these."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.tracing.advice import advise
from fullshard.tracing.alignment import aligned, offset
from fullshard.tracing.analysis import (
    accounted_for,
    lateness,
    rows_by_record,
    seconds_by_kind,
    segments,
    segments_by_step,
    straggler,
    times_by_unit,
)
from fullshard.tracing.chrome import as_chrome
from fullshard.tracing.records import COLLECTIVES, RankSummary, Record, Step, What
from fullshard.tracing.trace import detailed_ranks

from .examples import MS, rank_trace, record, trace_data

on_compute = [what for what in What if what not in COLLECTIVES]
spans = st.builds(
    lambda what, unit, started, length: record(what, unit, started, started + length),
    st.sampled_from(on_compute),
    st.sampled_from(["a", "b", "c"]),
    st.integers(-20, 110),
    st.integers(1, 60),
)


@given(st.lists(spans, max_size=12))
def test_segments_fill_a_step_without_gaps_and_overlaps(records: list[Record]) -> None:
    step = Step(1, 0.0, 100 * MS)

    found = segments(records, step)

    assert found[0].started == step.started
    assert found[-1].ended == step.ended
    for before, after in itertools.pairwise(found):
        assert before.ended == after.started
        assert before.ended > before.started


@given(st.lists(spans, max_size=12), st.lists(st.integers(-20, 130), min_size=2, unique=True))
def test_the_segments_of_all_steps_are_those_of_each(
    records: list[Record], bounds: list[int]
) -> None:
    between = itertools.pairwise(sorted(bounds))
    steps = [Step(n, begin * MS, end * MS) for n, (begin, end) in enumerate(between)]
    trace = dataclasses.replace(rank_trace(records), steps=steps)

    assert segments_by_step(trace) == [segments(records, step) for step in steps]


@given(st.lists(spans, max_size=12))
def test_a_moment_belongs_to_the_span_that_began_last(records: list[Record]) -> None:
    found = segments(records, Step(1, 0.0, 100 * MS))

    for segment in found:
        middle = (segment.started + segment.ended) / 2
        around = [r for r in records if r.started <= middle < r.ended]
        if not around:
            assert segment.what is What.OUTSIDE
        else:
            latest = max(r.started for r in around)
            assert (segment.what, segment.unit) in [
                (r.what, r.unit) for r in around if r.started == latest
            ]


def test_the_programs_own_work_is_named_by_its_place_in_the_step() -> None:
    records = [
        record(What.FORWARD, "a", 10, 20),
        record(What.BACKWARD, "a", 30, 50),
        record(What.OPTIMIZER, "", 60, 90),
    ]

    found = segments(records, Step(1, 0.0, 100 * MS))

    outside = [s.unit for s in found if s.what is What.OUTSIDE]
    assert outside == ["before the forward", "loss", "after the backward", "after the optimizer"]


def test_a_nested_wait_is_taken_from_what_is_around_it() -> None:
    trace = rank_trace(
        [record(What.FORWARD, "a", 0, 80), record(What.WAIT_ALL_GATHER, "b", 20, 50)]
    )

    by_kind = seconds_by_kind(trace)

    assert by_kind[What.FORWARD] == pytest.approx(50 * MS)
    assert by_kind[What.WAIT_ALL_GATHER] == pytest.approx(30 * MS)
    assert accounted_for(trace) == pytest.approx(0.8)


def test_waits_are_told_apart_by_whether_backward_has_begun() -> None:
    trace = rank_trace(
        [
            record(What.ALL_GATHER, "a", 0, 10, 4000),
            record(What.WAIT_ALL_GATHER, "a", 4, 10),
            record(What.BACKWARD, "b", 50, 60),
            record(What.ALL_GATHER, "a", 55, 63, 4000),
            record(What.WAIT_ALL_GATHER, "a", 60, 63),
            record(What.REDUCE_SCATTER, "a", 80, 95, 4000),
            record(What.WAIT_REDUCE, "a", 85, 95),
        ]
    )

    (times,) = [each for each in times_by_unit(trace) if each.unit == "a"]

    assert times.exposed_forward == pytest.approx(6 * MS)
    assert times.exposed_backward == pytest.approx(3 * MS)
    assert times.exposed_reduce == pytest.approx(10 * MS)
    assert times.all_gather == pytest.approx(18 * MS)
    assert times.reduce_scatter == pytest.approx(15 * MS)
    assert times.leads == [pytest.approx(4 * MS), pytest.approx(5 * MS)]


# -- ranks side by side -------------------------------------------------------------------------


def test_the_rank_that_waits_least_is_the_straggler() -> None:
    summaries = [RankSummary(0, "h", 1.0, 0.5), RankSummary(1, "h", 1.0, 0.1)]

    found = straggler(summaries)

    assert found is not None
    assert found.rank == 1
    assert found.seconds == pytest.approx(0.4)


def test_ranks_that_are_about_as_busy_have_no_straggler() -> None:
    assert straggler([RankSummary(r, "h", 1.0, 0.1 + 0.01 * r) for r in range(4)]) is None
    assert straggler([RankSummary(0, "h", 1.0, 0.1)]) is None


def test_lateness_is_how_long_the_last_but_one_rank_waited_for_the_last() -> None:
    traces = [
        rank_trace([record(What.ALL_GATHER, "a", begin, 60)], rank)
        for rank, begin in enumerate([10, 30, 35])
    ]

    late = lateness(traces)

    assert late[2]["a"] == pytest.approx(5 * MS)
    assert not late[0]
    assert not late[1]


@given(st.integers(1, 200), st.integers(4, 12))
def test_ranks_in_detail_include_the_busiest_and_the_idlest(count: int, limit: int) -> None:
    summaries = [RankSummary(r, "h", 1.0, (r * 37 % 101) / 200) for r in range(count)]

    chosen = detailed_ranks(summaries, limit)

    assert len(chosen) == min(count, limit) or count <= limit
    assert max(summaries, key=lambda s: s.busy).rank in chosen
    assert min(summaries, key=lambda s: s.busy).rank in chosen


# -- clocks of several hosts --------------------------------------------------------------------


@given(
    st.floats(-100, 100),
    st.lists(
        st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0.001, 0.2)), min_size=1, max_size=20
    ),
)
def test_clocks_are_aligned_to_within_the_fastest_collective(
    ahead: float, collectives: list[tuple[float, float, float]]
) -> None:
    """Two ranks issue collectives at their own times; each ends when both have, plus its way."""
    own, others, ways, now = [], [], [], 0.0
    for first, second, way in collectives:
        one, two = now + first, now + second
        now = max(one, two) + way
        own.append(Record(What.ALL_GATHER, "a", one, one, now))
        others.append(Record(What.ALL_GATHER, "a", two - ahead, two - ahead, now - ahead))
        ways.append(abs(one - two) + way)
    # A collective says that clocks differ by no more than the time from each issue to each end.
    here, there = rank_trace(own, 0), rank_trace(others, 1, host="there")

    found = offset(here, there)

    assert abs(found - ahead) <= max(ways) + 1e-6
    for mine, theirs in zip(own, others, strict=True):
        assert theirs.issued + found <= mine.ended + 1e-6
        assert mine.issued <= theirs.ended + found + 1e-6


def test_ranks_of_one_host_keep_their_clock_and_the_trace_begins_at_zero() -> None:
    first = rank_trace([record(What.ALL_GATHER, "a", 1, 5)], 0).moved(100.0)
    second = rank_trace([record(What.ALL_GATHER, "a", 2, 5)], 1).moved(100.002)

    one, two = aligned([first, second])

    assert one.steps[0].started == pytest.approx(0.0)
    assert two.steps[0].started == pytest.approx(2 * MS)


# -- advice -------------------------------------------------------------------------------------


def gathers(lead: float, nbytes: int = 2**24) -> list[Record]:
    """The root's all-gather, and one of unit ``b`` that is waited for, issued ``lead`` before."""
    return [
        record(What.ALL_GATHER, "root", 0, 0.1, nbytes),
        record(What.WAIT_ALL_GATHER, "root", 0, 0.1),
        record(What.FORWARD, "root", 0.1, 90),
        record(What.ALL_GATHER, "b", 30 - lead, 40, nbytes),
        record(What.WAIT_ALL_GATHER, "b", 30, 40),
    ]


def test_an_all_gather_that_is_issued_when_it_is_needed_should_be_prefetched() -> None:
    (advice,) = advise(trace_data(trace := rank_trace(gathers(lead=0))), trace)

    assert advice.units == ("b",)
    assert advice.seconds == pytest.approx(10 * MS)
    assert "b waits 10.0 ms for its all-gather in forward" in advice.text
    assert "forward_prefetch=True" in advice.text


def test_an_all_gather_that_was_prefetched_in_vain_is_longer_than_compute() -> None:
    (advice,) = advise(trace_data(trace := rank_trace(gathers(lead=20))), trace)

    assert "longer than the compute beside it" in advice.text
    assert "SHARD_GRAD_OP" in advice.text


def test_an_all_gather_that_stays_after_forward_anyway_is_not_told_to() -> None:
    data = trace_data(trace := rank_trace(gathers(lead=20)), strategy="SHARD_GRAD_OP")

    (advice,) = advise(data, trace)

    assert "SHARD_GRAD_OP" not in advice.text


def test_small_units_are_told_to_be_larger() -> None:
    (advice,) = advise(trace_data(trace := rank_trace(gathers(lead=20, nbytes=4096))), trace)

    assert "make units larger" in advice.text


def test_a_wait_for_a_straggler_is_said_to_be_one() -> None:
    waiting = rank_trace(
        [record(What.ALL_GATHER, "b", 30, 70, 2**24), record(What.WAIT_ALL_GATHER, "b", 30, 70)]
    )
    slow = rank_trace([record(What.ALL_GATHER, "b", 69, 70, 2**24)], 1)

    (advice,) = advise(trace_data(waiting, slow), waiting)

    assert "rank 1 joins later than the others" in advice.text


def test_short_waits_bring_no_advice() -> None:
    quick = rank_trace([record(What.WAIT_ALL_GATHER, "b", 30, 30.5)])

    assert advise(trace_data(quick), quick) == []


# -- Perfetto -----------------------------------------------------------------------------------


def test_perfetto_gets_a_process_for_each_rank_and_a_lane_for_each_kind() -> None:
    trace = rank_trace(gathers(lead=5))

    chrome = json.loads(json.dumps(as_chrome(trace_data(trace))))

    events = chrome["traceEvents"]
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {"rank 0 (cpu)", "compute", "all-gather", "reduce-scatter"}
    (gather,) = [e for e in events if e["ph"] == "X" and e["tid"] == 1 and e["name"] == "b"]
    assert gather["ts"] == pytest.approx(25_000)
    assert gather["dur"] == pytest.approx(15_000)
    compute = [e for e in events if e["ph"] == "X" and e["tid"] == 0]
    assert sum(e["dur"] for e in compute) == pytest.approx(100_000)
    assert [e["args"]["parameter shards"] for e in events if e["ph"] == "C"] == [4, 4]


def test_spans_that_follow_each_other_do_not_overlap_in_perfetto_which_counts_nanoseconds() -> None:
    bounds = [0, 0.6e-6, 1.2e-6, 1.8e-6, 100]
    spans = [record(What.FORWARD, str(n), *bounds[n : n + 2]) for n in range(4)]

    events = as_chrome(trace_data(rank_trace(spans)))["traceEvents"]

    found = [(round(1e3 * e["ts"]), round(1e3 * e["dur"])) for e in events if e["ph"] == "X"]
    assert all(a[0] + a[1] <= b[0] for a, b in itertools.pairwise(found))


def test_collectives_under_way_at_the_same_time_have_rows_in_which_they_do_not_overlap() -> None:
    bounds = [(0, 30), (10, 60), (20, 25), (30, 40), (40, 90), (60, 70)]
    gathers = [record(What.ALL_GATHER, str(n), *each) for n, each in enumerate(bounds)]
    trace = rank_trace([*gathers, record(What.REDUCE_SCATTER, "0", 15, 20)])

    rows = rows_by_record(trace.records)
    events = as_chrome(trace_data(trace))["traceEvents"]

    assert [rows[id(each)] for each in trace.records] == [0, 1, 2, 0, 0, 1, 0]
    threads = {e["name"]: e["tid"] for e in events if e["ph"] == "X" and e["cat"] == "all-gather"}
    assert threads["0"] == threads["3"] == threads["4"]
    assert len(set(threads.values())) == 3
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names[threads["1"]] == "all-gather 2"


def test_in_perfetto_an_arrow_leads_from_each_all_gather_to_its_wait() -> None:
    events = as_chrome(trace_data(rank_trace(gathers(lead=5)), rank_trace(gathers(5), 1)))

    arrows = [e for e in events["traceEvents"] if e["ph"] in "sf"]
    spans = [e for e in events["traceEvents"] if e["ph"] == "X"]
    assert {(e["pid"], e["ph"]) for e in arrows} == {(0, "s"), (0, "f"), (1, "s"), (1, "f")}

    def lies_on(arrow: dict[str, Any]) -> str:
        (on,) = [
            e
            for e in spans
            if (e["pid"], e["tid"]) == (arrow["pid"], arrow["tid"])
            and e["ts"] <= arrow["ts"] < e["ts"] + e["dur"]
        ]
        return str(on["name"])

    for begin, end in zip(arrows[::2], arrows[1::2], strict=True):
        assert begin["id"] == end["id"]
        assert begin["ts"] <= end["ts"]
        assert lies_on(end) == f"wait for all-gather {lies_on(begin)}"
    assert len({e["id"] for e in arrows}) == len(arrows) / 2
