"""A trace as JSON for Perfetto (ui.perfetto.dev) and chrome://tracing: pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .analysis import awaited_gathers, segments_by_step
from .records import CAUSES, COLLECTIVES, RankTrace, TraceData, What

_LANES = {"compute": 0, What.ALL_GATHER: 1, What.REDUCE_SCATTER: 2}
_MICROSECONDS = 1e6


def as_chrome(data: TraceData) -> dict[str, Any]:
    """The trace in Chrome's format: a process for each rank, a thread for each lane."""
    events = [event for trace in data.ranks for event in _events(trace)]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"model": data.model, **data.facts},
    }


def _events(trace: RankTrace) -> Iterator[dict[str, Any]]:
    rank = trace.rank
    yield _named("process_name", rank, 0, f"rank {rank} ({trace.device})")
    for name, number in _LANES.items():
        yield _named("thread_name", rank, number, str(name))
    for found in segments_by_step(trace):
        for each in found:
            shown = f"{each.what} {each.unit}".strip()
            yield _span(shown, each.what, rank, 0, each.started, each.seconds, {})
    for record in trace.records:
        if record.what in COLLECTIVES:
            facts = {"bytes": record.nbytes, "issued (ms)": round(1e3 * record.issued, 3)}
            lane = _LANES[record.what]
            yield _span(record.unit, record.what, rank, lane, record.started, record.seconds, facts)
    yield from _arrows(trace)
    for moment in trace.memory:
        sizes = {name: getattr(moment, cause) or 0 for cause, name in CAUSES.items()}
        yield {
            "ph": "C",
            "name": "memory",
            "pid": rank,
            "ts": _MICROSECONDS * moment.at,
            "args": sizes,
        }


def _arrows(trace: RankTrace) -> Iterator[dict[str, Any]]:
    """From each all-gather to the wait for it."""
    for number, (wait, gather) in enumerate(awaited_gathers(trace)):
        if gather.started > wait.started:
            continue
        of_both = {"name": "awaited", "cat": "wait", "id": f"{trace.rank}-{number}"}
        for phase, lane, at in (
            ("s", _LANES[What.ALL_GATHER], gather.started),
            ("f", _LANES["compute"], wait.started),
        ):
            end = {"bp": "e"} if phase == "f" else {}
            place = {"ph": phase, "pid": trace.rank, "tid": lane, "ts": _MICROSECONDS * at}
            yield {**of_both, **place, **end}


def _named(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": {"name": name}}


def _span(
    name: str,
    category: str,
    rank: int,
    thread: int,
    started: float,
    seconds: float,
    facts: dict[str, Any],
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": str(category),
        "pid": rank,
        "tid": thread,
        "ts": _MICROSECONDS * started,
        "dur": _MICROSECONDS * seconds,
        "args": facts,
    }
