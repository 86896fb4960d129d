"""Draws a trace as a picture for papers and talks: the lanes of a step above its memory.

Needs matplotlib, a dependency of the extra ``cli``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .analysis import segments
from .records import CAUSES, COLLECTIVES, RankTrace, Step, TraceData, What
from .report import size_text

_COLORS = {
    What.FORWARD: "#3d7fd6",
    What.RECOMPUTE: "#8fb8ee",
    What.BACKWARD: "#5a4fcf",
    What.WAIT_ALL_GATHER: "#e5482d",
    What.WAIT_REDUCE: "#f08a24",
    What.COPY: "#7d8da1",
    What.RESHARD: "#a8b4c2",
    What.ENGINE: "#b9c3cf",
    What.OPTIMIZER: "#2f9e62",
    What.OUTSIDE: "#dde3ea",
    What.ALL_GATHER: "#14a3a8",
    What.REDUCE_SCATTER: "#d39a12",
}
_CAUSE_COLORS = ("#64748b", "#2f9e62", "#8a6fd1", "#14a3a8", "#d39a12", "#9dc3f0")
_LANES = {What.ALL_GATHER: 1, What.REDUCE_SCATTER: 2}
_MOST_RANKS = 4


def draw(data: TraceData, path: Path) -> None:
    """Write a picture of the last step of up to four ranks, with the memory of the first."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = data.ranks[:_MOST_RANKS]
    has_memory = bool(ranks[0].memory)
    heights = [1.0] * len(ranks) + [1.6] * has_memory
    figure = Figure(figsize=(10, 1.1 + 1.15 * sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)
    step = ranks[0].steps[-1]
    for (axis,), trace in zip(axes, ranks, strict=False):
        _draw_lanes(axis, trace, step)
        axis.set_title("each rank" if data.is_foretold else f"rank {trace.rank}", loc="left")
    if has_memory:
        _draw_memory(axes[-1][0], ranks[0], step)
    axes[-1][0].set_xlabel("ms")
    axes[-1][0].set_xlim(0, 1e3 * step.seconds)
    used = drawn_kinds(ranks, step)
    figure.legend(
        handles=[Patch(color=_COLORS[what], label=str(what)) for what in used],
        loc="outside upper center",
        ncols=5,
        frameon=False,
        fontsize=8,
    )
    figure.savefig(path, dpi=150)


def drawn_kinds(ranks: Sequence[RankTrace], step: Step) -> list[What]:
    """What any of the ranks did in the step, in the order of the legend."""
    found = {segment.what for trace in ranks for segment in segments(trace.records, step)}
    found |= {record.what for trace in ranks for record in trace.records} & COLLECTIVES
    return [what for what in What if what in found]


def _draw_lanes(axis: Any, trace: RankTrace, step: Step) -> None:
    lanes: dict[tuple[int, What], list[tuple[float, float]]] = {}
    for each in segments(trace.records, step):
        lanes.setdefault((0, each.what), []).append((each.started, each.seconds))
    for record in trace.records:
        if record.what in COLLECTIVES and step.started <= record.started < step.ended:
            place = (_LANES[record.what], record.what)
            lanes.setdefault(place, []).append((record.started, record.seconds))
    for (lane, what), spans in lanes.items():
        bars = [(1e3 * (begin - step.started), 1e3 * length) for begin, length in spans]
        axis.broken_barh(bars, (-lane - 0.4, 0.8), color=_COLORS[what], linewidth=0)
    axis.set_yticks([0, -1, -2], ["compute", "all-gather", "reduce-scatter"])
    axis.spines[["top", "right"]].set_visible(False)


def _draw_memory(axis: Any, trace: RankTrace, step: Step) -> None:
    moments = sorted(trace.memory, key=lambda moment: moment.at)
    times = [1e3 * (moment.at - step.started) for moment in moments]
    unit = 2.0**30 if max(m.total for m in moments) > 2**30 else 2.0**20
    levels = [[(getattr(m, cause) or 0) / unit for m in moments] for cause in CAUSES]
    axis.stackplot(times, levels, labels=[*CAUSES.values()], colors=_CAUSE_COLORS, step="post")
    axis.set_ylabel("GiB" if unit == 2.0**30 else "MiB")
    largest = max(m.total for m in moments)
    axis.set_title(f"memory, up to {size_text(largest)}", loc="left")
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8, reverse=True)
    axis.spines[["top", "right"]].set_visible(False)
