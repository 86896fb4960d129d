"""Computes waits and times from a trace: pure functions."""

from __future__ import annotations

import bisect
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from .records import COLLECTIVES, WAITS, RankSummary, RankTrace, Record, Step, What

#: A rank is a straggler if it is busy for longer than the median rank by this part of a step.
_STRAGGLES = 0.05


@dataclass(frozen=True, slots=True)
class Segment:
    """The activity of compute between two moments: the innermost of nested ones."""

    what: What
    unit: str
    started: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.started


def segments(records: Iterable[Record], step: Step) -> list[Segment]:
    """The activities of compute during a step, without gaps and overlaps.

    Of nested spans, the one that began last counts. Time that no span covers is the program's own;
    instead of a unit, it has its position in the step.
    """
    spans = [r for r in _spans(records) if r.ended > step.started and r.started < step.ended]
    return _without_overlaps(spans, step)


def segments_by_step(trace: RankTrace) -> list[list[Segment]]:
    """The segments of compute in each step of a trace."""
    spans = _spans(trace.records)
    found, taken, last = [], 0, list[Record]()
    for step in trace.steps:
        until = bisect.bisect_left(spans, step.ended, lo=taken, key=lambda span: span.started)
        # Of earlier spans, those that reach into this step.
        last = [span for span in (*last, *spans[taken:until]) if span.ended > step.started]
        taken = until
        found.append(_without_overlaps(last, step))
    return found


def _spans(records: Iterable[Record]) -> list[Record]:
    """The spans of compute by their beginnings; inner spans follow those around them."""
    spans = [record for record in records if record.what not in COLLECTIVES]
    return sorted(spans, key=lambda record: (record.started, -record.ended))


def _without_overlaps(spans: Sequence[Record], step: Step) -> list[Segment]:
    found: list[Segment] = []
    at, begun, place = step.started, list[Record](), _Place()
    for span in [*spans, None]:
        until = step.ended if span is None else max(span.started, at)
        while at < until:
            while begun and begun[-1].ended <= at:
                begun.pop()
            if begun:
                inner = begun[-1]
                end = min(until, inner.ended)
                place.note(inner.what)
                _append(found, Segment(inner.what, inner.unit, at, end))
            else:
                end = until
                _append(found, Segment(What.OUTSIDE, place.name, at, end))
            at = end
        if span is not None:
            begun.append(span)
    return found


#: The program's own work after a unit, or the optimizer, did this.
_WORK_AFTER = {
    What.FORWARD: "loss",
    What.BACKWARD: "after the backward",
    What.OPTIMIZER: "after the optimizer",
}


class _Place:
    """The position in a step of the program's own work."""

    name = "before the forward"

    def note(self, what: What) -> None:
        self.name = _WORK_AFTER.get(what, self.name)


def _append(found: list[Segment], segment: Segment) -> None:
    last = found[-1] if found else None
    if last is not None and (last.what, last.unit) == (segment.what, segment.unit):
        found[-1] = Segment(last.what, last.unit, last.started, segment.ended)
    else:
        found.append(segment)


def rows_by_record(records: Iterable[Record]) -> dict[int, int]:
    """The row of each collective, by the record's id, among those of its kind.

    On a host several may be under way at the same time. Those of a row do not overlap.
    """
    ends: dict[What, list[float]] = {kind: [] for kind in COLLECTIVES}
    found = {}
    beside = (record for record in records if record.what in COLLECTIVES)
    for record in sorted(beside, key=lambda record: record.started):
        rows = ends[record.what]
        row = next((n for n, end in enumerate(rows) if end <= record.started), len(rows))
        rows[row : row + 1] = [record.ended]
        found[id(record)] = row
    return found


def seconds_by_kind(trace: RankTrace) -> dict[What, float]:
    """Seconds of compute per step, by activity."""
    totals: dict[What, float] = defaultdict(float)
    for found in segments_by_step(trace):
        for segment in found:
            totals[segment.what] += segment.seconds / len(trace.steps)
    return dict(totals)


def accounted_for(trace: RankTrace) -> float:
    """The part of the median step's time in which a unit or the optimizer did something."""
    parts = []
    for found in segments_by_step(trace):
        whole = sum(segment.seconds for segment in found)
        outside = sum(segment.seconds for segment in found if segment.what is What.OUTSIDE)
        if whole:
            parts.append(1 - outside / whole)
    return statistics.median(parts) if parts else 0.0


def summarized(trace: RankTrace) -> RankSummary:
    """The little of a trace that is kept of every rank."""
    by_kind = seconds_by_kind(trace)
    step = statistics.fmean(s.seconds for s in trace.steps) if trace.steps else 0.0
    waits = sum(by_kind.get(what, 0.0) for what in WAITS)
    return RankSummary(trace.rank, trace.host, step, waits, trace.peak)


# -- by unit ------------------------------------------------------------------------------------


@dataclass
class UnitTimes:
    """Seconds per step of one unit on one rank. "Exposed" is what compute waited for."""

    unit: str
    forward: float = 0.0
    recompute: float = 0.0
    backward: float = 0.0
    copies: float = 0.0
    engine: float = 0.0
    all_gather: float = 0.0
    reduce_scatter: float = 0.0
    exposed_forward: float = 0.0
    exposed_backward: float = 0.0
    exposed_reduce: float = 0.0
    gathered_bytes: int = 0
    #: Of the all-gathers that were waited for: how long before its use each was issued.
    leads: list[float] = field(default_factory=list)

    @property
    def exposed(self) -> float:
        return self.exposed_forward + self.exposed_backward + self.exposed_reduce

    @property
    def compute(self) -> float:
        return self.forward + self.recompute + self.backward


_COMPUTING = {
    What.FORWARD: "forward",
    What.RECOMPUTE: "recompute",
    What.BACKWARD: "backward",
    What.COPY: "copies",
    What.ENGINE: "engine",
    What.RESHARD: "engine",
    What.WAIT_REDUCE: "exposed_reduce",
}


def times_by_unit(trace: RankTrace) -> list[UnitTimes]:
    """The times of all units, in the order in which they first did something."""
    found: dict[str, UnitTimes] = {}
    count = max(len(trace.steps), 1)
    for step, segments_of_step in zip(trace.steps, segments_by_step(trace), strict=True):
        backward = _begin_of_backward(trace.records, step)
        for segment in segments_of_step:
            if segment.what in (What.OUTSIDE, What.OPTIMIZER):
                continue
            times = found.setdefault(segment.unit, UnitTimes(segment.unit))
            name = _COMPUTING.get(segment.what)
            if segment.what is What.WAIT_ALL_GATHER:
                is_early = segment.started < backward
                name = "exposed_forward" if is_early else "exposed_backward"
            assert name is not None
            setattr(times, name, getattr(times, name) + segment.seconds / count)
        for record in _within(trace.records, step):
            times = found.setdefault(record.unit, UnitTimes(record.unit))
            if record.what is What.ALL_GATHER:
                times.all_gather += record.seconds / count
                times.gathered_bytes = max(times.gathered_bytes, record.nbytes)
            elif record.what is What.REDUCE_SCATTER:
                times.reduce_scatter += record.seconds / count
    for wait, gather in awaited_gathers(trace):
        # Those of an evaluation after the last step, too.
        found.setdefault(wait.unit, UnitTimes(wait.unit)).leads.append(wait.started - gather.issued)
    return [*found.values()]


def _within(records: Iterable[Record], step: Step) -> Iterator[Record]:
    return (r for r in records if r.what in COLLECTIVES and step.started <= r.started < step.ended)


def _begin_of_backward(records: Iterable[Record], step: Step) -> float:
    reached = (
        r.started
        for r in records
        if r.what is What.BACKWARD and step.started <= r.started < step.ended
    )
    return min(reached, default=step.ended)


def awaited_gathers(trace: RankTrace) -> Iterator[tuple[Record, Record]]:
    """Each wait for an all-gather, with the all-gather."""
    last: dict[str, Record] = {}
    for record in sorted(trace.records, key=lambda record: record.issued):
        if record.what is What.ALL_GATHER:
            last[record.unit] = record
        elif record.what is What.WAIT_ALL_GATHER and record.unit in last:
            yield record, last.pop(record.unit)


# -- ranks side by side -------------------------------------------------------------------------


@dataclass(frozen=True)
class Straggler:
    """A rank for which the others wait, and by how much longer than the median it is busy."""

    rank: int
    seconds: float


def straggler(summaries: Sequence[RankSummary]) -> Straggler | None:
    """The rank that the others wait for, if there is one.

    All ranks' steps take as long, since they wait for each other. The one that waits least is the
    one that has most to do.
    """
    if len(summaries) < 2:
        return None
    slowest = max(summaries, key=lambda each: each.busy)
    others = [each.busy for each in summaries if each is not slowest]
    behind = slowest.busy - statistics.median(others)
    step = statistics.fmean(each.step for each in summaries)
    return Straggler(slowest.rank, behind) if behind > _STRAGGLES * step else None


def lateness(traces: Sequence[RankTrace]) -> dict[int, dict[str, float]]:
    """By rank and unit, the seconds per step for which other ranks' collectives waited for it.

    A collective cannot end before the last rank has issued it.
    """
    issued: dict[tuple[What, str, int], list[tuple[float, int]]] = defaultdict(list)
    for trace in traces:
        seen: dict[tuple[What, str], int] = defaultdict(int)
        for record in trace.records:
            if record.what in COLLECTIVES:
                key = (record.what, record.unit)
                issued[(*key, seen[key])].append((record.issued, trace.rank))
                seen[key] += 1
    steps = max((len(trace.steps) for trace in traces), default=1) or 1
    late: dict[int, dict[str, float]] = {trace.rank: defaultdict(float) for trace in traces}
    for (_, unit, _), times in issued.items():
        if len(times) == len(traces) > 1:
            *_, (before, _), (last, rank) = sorted(times)
            late[rank][unit] += (last - before) / steps
    return late
