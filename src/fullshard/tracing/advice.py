"""A sentence of advice on each kind of wait that is large: pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .analysis import Straggler, UnitTimes, lateness, straggler, times_by_unit
from .records import RankTrace, TraceData

#: Waits of one kind that are below this part of a step together are left alone.
_LARGE = 0.01
#: A single wait below this part of a step is none.
_NOTHING = 0.0005
#: All-gathers of fewer bytes take long for their latency, not for their size.
_SMALL_BYTES = 2**20
#: Issued this little before its use, an all-gather was not prefetched.
_AT_ONCE = 2e-4


@dataclass(frozen=True)
class Advice:
    """Advice about waits of one kind; ``seconds`` is the time they take of a step."""

    units: tuple[str, ...]
    seconds: float
    text: str


def advise(data: TraceData, trace: RankTrace) -> list[Advice]:
    """Advice on the units for which one rank waits, those that cost most first.

    Units that wait for the same kind of thing, for the same reason, share a sentence.
    """
    step = statistics.fmean(s.seconds for s in trace.steps) if trace.steps else 0.0
    facts = _Facts(
        {unit.name: unit.strategy for unit in data.units},
        lateness(data.ranks),
        straggler(data.summaries),
        trace.rank,
        trace.device == "cpu",
    )
    times = times_by_unit(trace)
    first = next((each.unit for each in times if each.all_gather), None)
    reasons: dict[tuple[str, str], list[tuple[float, UnitTimes]]] = defaultdict(list)
    for each in times:
        for what, seconds in _waits_of(each).items():
            if seconds > _NOTHING * step:
                reason = _reason(each, what, seconds, facts, each.unit == first)
                reasons[what, reason].append((seconds, each))
    found = [
        Advice(
            tuple(unit.unit for _, unit in waiting),
            sum(seconds for seconds, _ in waiting),
            _sentence(what, reason, waiting),
        )
        for (what, reason), waiting in reasons.items()
    ]
    large = [advice for advice in found if advice.seconds > _LARGE * step]
    return sorted(large, key=lambda advice: -advice.seconds)


@dataclass(frozen=True)
class _Facts:
    strategies: Mapping[str, str]
    late: Mapping[int, Mapping[str, float]]
    slow: Straggler | None
    rank: int
    is_host: bool

    def lateness(self, unit: str) -> float:
        """Seconds for which the straggler keeps the others waiting at a unit's collectives."""
        return 0.0 if self.slow is None else self.late.get(self.slow.rank, {}).get(unit, 0.0)


def _waits_of(unit: UnitTimes) -> dict[str, float]:
    return {
        "all-gather in forward": unit.exposed_forward,
        "all-gather in backward": unit.exposed_backward,
        "reduce-scatter": unit.exposed_reduce,
    }


def _sentence(what: str, reason: str, waiting: Sequence[tuple[float, UnitTimes]]) -> str:
    # Those that wait longest first; equally long ones, to the nanosecond, stay in their order.
    waiting = sorted(waiting, key=lambda each: -round(each[0], 9))
    names = [unit.unit for _, unit in waiting]
    if len(names) == 1:
        return f"{names[0]} waits {_ms(waiting[0][0])} for its {what}: {reason}"
    shown = ", ".join(names[:3]) if len(names) > 3 else ", ".join(names[:-1])
    last = f"{len(names) - 3} more" if len(names) > 3 else names[-1]
    total = sum(seconds for seconds, _ in waiting)
    return f"{shown} and {last} wait {_ms(total)} for their {what}: {reason}"


def _reason(unit: UnitTimes, what: str, wait: float, facts: _Facts, is_first: bool) -> str:
    slow = facts.slow
    if slow is not None and slow.rank != facts.rank and facts.lateness(unit.unit) > wait / 2:
        return (
            f"rank {slow.rank} joins later than the others, so look at what it does before "
            "that (data, other programs, a slower device)."
        )
    is_full = facts.strategies.get(unit.unit) == "FULL_SHARD"
    if what == "reduce-scatter":
        return _about_reduce(unit, is_full, facts.is_host)
    if is_first and what == "all-gather in forward":
        return (
            "it is the first of the step, so nothing can run beside it; fewer parameters outside "
            "of nested units make it shorter."
        )
    if unit.gathered_bytes < _SMALL_BYTES:
        return "the units are small, and latency is most of that; make units larger."
    if unit.leads and statistics.median(unit.leads) < _AT_ONCE:
        option = (
            "forward_prefetch=True"
            if what == "all-gather in forward"
            else "backward_prefetch=BackwardPrefetch.BACKWARD_PRE"
        )
        return f"it is issued only when it is needed; prefetch it ({option})."
    more = (
        "keep parameters after forward (SHARD_GRAD_OP), shard inside of hosts only (HYBRID_SHARD), "
        "or compute more per step (a larger batch)."
        if is_full
        else "compute more per step (a larger batch), or send less (lower precision)."
    )
    return f"that takes longer than the compute beside it; {more}"


def _about_reduce(unit: UnitTimes, is_full: bool, is_host: bool) -> str:
    if is_host and is_full and unit.exposed_reduce > unit.reduce_scatter / 2:
        return (
            "on a CPU hardly any of that runs beside compute; SHARD_GRAD_OP reduces behind the "
            "next unit's backward, and accumulating gradients (no_sync) reduces less often."
        )
    return (
        "that takes longer than the compute beside it; compute more per step (a larger batch), "
        "reduce in lower precision (reduce_dtype), or less often (no_sync)."
    )


def _ms(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.{1 if milliseconds < 100 else 0}f} ms"
