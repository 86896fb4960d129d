"""Draws docs/pictures/timeline.svg: a step of FULL_SHARD on a GPU, stream by stream.

    python3 docs/_site/draw_timeline.py

The times are made up; the order is the engine's: a unit is all-gathered while the one before it
computes, at most two are unsharded at a time, and gradients are reduced while the next unit's
backward computes.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from canvas import Canvas

UNITS = 4
FORWARD, BACKWARD, GATHER, REDUCE, LOSS, OPTIMIZER = 2.2, 4.0, 1.5, 1.5, 2.0, 2.0
LEFT, SCALE = 130, 17.5
LANES = {"gather": 70, "compute": 115, "reduce": 160}
KINDS = {"gather": "rest", "compute": "compute", "reduce": "warm"}


class Work(NamedTuple):
    """Something that a stream does."""

    lane: str
    words: str
    start: float
    end: float


def schedule() -> tuple[list[Work], list[tuple[float, float]]]:
    """Return what streams do, and from when to when each unit is unsharded."""
    works: list[Work] = []
    unsharded: list[tuple[float, float]] = []
    gathered = computed = reduced = 0.0
    for unit in range(1, UNITS + 1):
        # The limit of two: the unit before the last one has been resharded.
        start = max(gathered, unsharded[-2][1] if len(unsharded) > 1 else 0.0)
        gathered = start + GATHER
        works.append(Work("gather", f"{unit}", start, gathered))
        begin = max(gathered, computed)
        computed = begin + FORWARD
        works.append(Work("compute", f"forward {unit}", begin, computed))
        unsharded.append((start, computed))
    works.append(Work("compute", "loss", computed, computed + LOSS))
    begun, computed = computed, computed + LOSS
    for unit in range(UNITS, 0, -1):
        start = max(gathered, begun)
        gathered = start + GATHER
        works.append(Work("gather", f"{unit}", start, gathered))
        # Backward of a unit begins by prefetching the one before it.
        begun = max(gathered, computed)
        computed = begun + BACKWARD
        works.append(Work("compute", f"backward {unit}", begun, computed))
        unsharded.append((start, computed))
        reduced = max(reduced, computed) + REDUCE
        works.append(Work("reduce", f"{unit}", reduced - REDUCE, reduced))
    works.append(Work("compute", "step", reduced, reduced + OPTIMIZER))
    return works, unsharded


def main() -> None:
    """Write the picture."""
    works, unsharded = schedule()
    end = max(work.end for work in works)
    canvas = Canvas(LEFT + round(end * SCALE) + 20, 300, "A step of FULL_SHARD on a GPU")
    canvas.text(16, 32, "A step of four units: time runs to the right")
    for lane, y in LANES.items():
        name = {"gather": "all-gather", "compute": "compute", "reduce": "reduce-scatter"}[lane]
        canvas.text(16, y + 20, name, "small")
        canvas.line([(LEFT, y + 32), (LEFT + end * SCALE, y + 32)])
    for work in works:
        x, width = LEFT + work.start * SCALE, (work.end - work.start) * SCALE - 2
        y = LANES[work.lane]
        canvas.rect(x, y, width, 30, KINDS[work.lane], 'rx="3"')
        words = work.words if width > 80 or len(work.words) < 5 else work.words[0] + work.words[-1]
        dark = work.lane == "compute"
        style = "" if dark else 'style="fill: #263238"'
        canvas.text(x + width / 2, y + 20, words, "on" if dark else "small", "middle", style)
    _memory(canvas, unsharded, end)
    canvas.save("timeline.svg")


def _memory(canvas: Canvas, unsharded: list[tuple[float, float]], end: float) -> None:
    """Draw how many units are unsharded at each moment."""
    base, height = 270, 24
    canvas.text(16, base - 28, "unsharded", "small")
    canvas.text(16, base - 12, "units", "small")
    moments = sorted({0.0, end, *(at for span in unsharded for at in span)})
    counts = [(at, sum(start <= at < stop for start, stop in unsharded)) for at in moments]
    # Neighbours of the same height are one rectangle.
    levels = [next(group) for _, group in itertools.groupby(counts, key=lambda level: level[1])]
    for (begin, count), (until, _) in itertools.pairwise([*levels, (end, 0)]):
        x, width = LEFT + begin * SCALE, (until - begin) * SCALE
        if count:
            canvas.rect(x, base - count * height, width, count * height, "rest")
    for count in (1, 2):
        canvas.text(LEFT - 12, base - (count - 0.5) * height + 4, f"{count}", "small", "middle")
    canvas.line([(LEFT, base), (LEFT + end * SCALE, base)])


if __name__ == "__main__":
    main()
