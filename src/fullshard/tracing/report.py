"""A trace in words and numbers: the tables of the page, and ``Trace.summary()``. Pure."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from .advice import advise
from .analysis import seconds_by_kind, straggler
from .records import CAUSES, Foretold, Memory, RankTrace, TraceData, What

__all__ = [
    "compared",
    "counted",
    "duration_text",
    "in_text",
    "peak_of",
    "size_text",
    "step_seconds",
]


def step_seconds(trace: RankTrace) -> float:
    """The median time of a step."""
    return statistics.median(step.seconds for step in trace.steps) if trace.steps else 0.0


def peak_of(trace: RankTrace) -> Memory | None:
    """The moment of the most memory, of those that were sampled."""
    return max(trace.memory, key=lambda moment: moment.total, default=None)


def compared(foretold: Sequence[Foretold], trace: RankTrace) -> list[Foretold]:
    """Predicted numbers, each with the measured one.

    Names are those of :data:`CAUSES` at the peak, ``peak memory`` and ``step``.
    """
    peak = peak_of(trace)
    measured: dict[str, float | None] = {"step": step_seconds(trace)}
    if peak is not None:
        measured["peak memory"] = peak.total
        measured.update({name: getattr(peak, cause) for cause, name in CAUSES.items()})
    return [
        dataclasses.replace(each, measured=measured.get(each.name, each.measured))
        for each in foretold
    ]


def in_text(data: TraceData) -> str:
    """A few lines: the time of a step on the first rank by activity, memory, and advice."""
    trace = data.ranks[0]
    by_kind = seconds_by_kind(trace)
    whole = sum(by_kind.values()) or 1.0
    count = len(trace.steps)
    took = f" of {duration_text(step_seconds(trace))}" if count else ""
    lines = [
        f"{counted(count, 'step')}{took} of {data.model} in {counted(len(data.units), 'unit')} on "
        f"{counted(len(data.summaries), 'rank')} ({trace.device}); "
        + (f"rank {trace.rank}:" if count else "no backward ended in the trace")
    ]
    for what in What:
        if by_kind.get(what):
            share = 100 * by_kind[what] / whole
            lines.append(f"  {what:24} {duration_text(by_kind[what]):>10} {share:5.1f} %")
    peak = peak_of(trace)
    if peak is not None:
        parts = [
            f"{name} {size_text(getattr(peak, cause) or 0)}"
            for cause, name in CAUSES.items()
            if getattr(peak, cause)
        ]
        lines.append(f"  peak memory {size_text(peak.total)}: {', '.join(parts)}")
    slow = straggler(data.summaries)
    if slow is not None:
        lines.append(
            f"  rank {slow.rank} is busy for {duration_text(slow.seconds)} longer than the others, "
            "which wait for it"
        )
    lines += [f"  {advice.text}" for advice in advise(data, trace)[:5]]
    return "\n".join(lines)


def counted(number: int, noun: str) -> str:
    """A number with its noun, such as 1 step or 3 steps."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def duration_text(seconds: float) -> str:
    """A duration with three digits, such as 12.3 ms."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return (
                f"{seconds * factor:.3g} {unit}" if seconds * factor < 1000 else f"{seconds:.0f} s"
            )
    return f"{seconds * 1e6:.3g} µs"


def size_text(size: float) -> str:
    """A size with three digits, such as 1.23 GiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(size) < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
