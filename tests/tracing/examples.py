"""Traces made by hand, for tests of what is computed from them."""

from __future__ import annotations

from fullshard.tracing.analysis import summarized
from fullshard.tracing.records import Memory, RankTrace, Record, Step, TraceData, UnitFacts, What

MS = 1e-3


def record(what: What, unit: str, started: float, ended: float, nbytes: int = 0) -> Record:
    """A record in milliseconds that ran when it was issued."""
    return Record(what, unit, started * MS, started * MS, ended * MS, nbytes)


def rank_trace(
    records: list[Record], rank: int = 0, until: float = 100.0, host: str = "here"
) -> RankTrace:
    """The trace of one step of ``until`` milliseconds."""
    memory = [Memory(0.0, 4, 8, 0, 0, 0, 0), Memory(until * MS / 2, 4, 8, 4, 2, 1, 5)]
    return RankTrace(rank, host, "cpu", [Step(1, 0.0, until * MS)], records, memory)


def trace_data(*traces: RankTrace, strategy: str = "FULL_SHARD") -> TraceData:
    names = dict.fromkeys(r.unit for trace in traces for r in trace.records if r.unit)
    units = [UnitFacts(name, 1000, strategy) for name in names]
    return TraceData("Model", units, traces, [summarized(trace) for trace in traces])
