"""A trace as JSON for Perfetto (ui.perfetto.dev) and chrome://tracing: pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .analysis import awaited_gathers, rows_by_record, segments_by_step
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
            yield _span(shown, each.what, rank, 0, each.started, each.ended, {})
    rows = rows_by_record(trace.records)
    for what, row in sorted({(r.what, rows[id(r)]) for r in trace.records if rows.get(id(r))}):
        yield _named("thread_name", rank, _thread(what, row), f"{what} {row + 1}")
    for record in trace.records:
        if record.what in COLLECTIVES:
            facts = {"bytes": record.nbytes, "issued (ms)": round(1e3 * record.issued, 3)}
            lane = _thread(record.what, rows[id(record)])
            yield _span(record.unit, record.what, rank, lane, record.started, record.ended, facts)
    yield from _arrows(trace, rows)
    for moment in trace.memory:
        sizes = {name: getattr(moment, cause) or 0 for cause, name in CAUSES.items()}
        yield {
            "ph": "C",
            "name": "memory",
            "pid": rank,
            "ts": _us(moment.at),
            "args": sizes,
        }


def _thread(what: What, row: int) -> int:
    """The thread of a row of a lane: spans of a thread must not overlap."""
    return _LANES[what] if row == 0 else 100 * _LANES[what] + row


def _arrows(trace: RankTrace, rows: Mapping[int, int]) -> Iterator[dict[str, Any]]:
    """From each all-gather to the wait for it."""
    for number, (wait, gather) in enumerate(awaited_gathers(trace)):
        if gather.started > wait.started:
            continue
        of_both = {"name": "awaited", "cat": "wait", "id": f"{trace.rank}-{number}"}
        for phase, lane, at in (
            ("s", _thread(What.ALL_GATHER, rows[id(gather)]), gather.started),
            ("f", _LANES["compute"], wait.started),
        ):
            end = {"bp": "e"} if phase == "f" else {}
            place = {"ph": phase, "pid": trace.rank, "tid": lane, "ts": _us(at)}
            yield {**of_both, **place, **end}


def _named(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": {"name": name}}


def _span(
    name: str,
    category: str,
    rank: int,
    thread: int,
    started: float,
    ended: float,
    facts: dict[str, Any],
) -> dict[str, Any]:
    begin = _us(started)
    return {
        "ph": "X",
        "name": name,
        "cat": str(category),
        "pid": rank,
        "tid": thread,
        "ts": begin,
        "dur": round(_us(ended) - begin, 3),
        "args": facts,
    }


def _us(seconds: float) -> float:
    """Microseconds, to the nanosecond: spans that follow each other do not overlap."""
    return round(_MICROSECONDS * seconds, 3)
