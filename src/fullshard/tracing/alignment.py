"""Brings the ranks of several hosts onto one clock: pure.

Note: clocks by collectives
    Ranks of one host read the same clock. For those of two hosts, the collectives are messages in
    both directions: one cannot end on a rank before it was issued on another. If rank s adds x to
    its clock to be on rank r's, each collective says

        issued on s + x ≤ ended on r        and        issued on r ≤ ended on s + x

    All of them together leave an interval for x, as wide as the fastest collective's way there and
    back, and its middle is taken. Nothing is sent for this.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from .records import COLLECTIVES, RankTrace, Record, What

_Key = tuple[What, str, int]


def aligned(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """The traces on the clock of the first one, from zero."""
    if not traces:
        return []
    first = traces[0]
    by_host = {first.host: 0.0}
    for trace in traces:
        if trace.host not in by_host:
            by_host[trace.host] = offset(first, trace)
    starts = [s.started + by_host[t.host] for t in traces for s in t.steps[:1]]
    begin = min(starts, default=0.0)
    return [trace.moved(by_host[trace.host] - begin) for trace in traces]


def offset(of: RankTrace, other: RankTrace) -> float:
    """The seconds to add to the times of ``other`` to be on the clock of ``of``; 0 if unknown."""
    own, others = _collectives(of), _collectives(other)
    shared = own.keys() & others.keys()
    if not shared:
        return 0.0
    at_most = min(own[key].ended - others[key].issued for key in shared)
    at_least = max(own[key].issued - others[key].ended for key in shared)
    return (at_least + at_most) / 2


def _collectives(trace: RankTrace) -> dict[_Key, Record]:
    """The collectives by kind, unit, and how many of both there were before."""
    count: dict[tuple[What, str], int] = defaultdict(int)
    found: dict[_Key, Record] = {}
    for record in sorted(trace.records, key=lambda record: record.issued):
        if record.what in COLLECTIVES:
            key = (record.what, record.unit)
            found[(*key, count[key])] = record
            count[key] += 1
    return found
