"""Draws docs/pictures/unshard.svg: how parameters are unsharded and resharded during a step.

    python3 docs/_site/draw_step.py

Two ranks, four units. Each unit is a bar of the memory that a rank uses for its parameters: half of
it is the rank's shard, which stays; the other half is there only while the unit computes. The
picture moves by itself in a browser; drawn on paper, it shows the second unit in its forward.
"""

from __future__ import annotations

from canvas import Canvas

UNITS, RANKS, SECONDS = 4, 2, 12.0
WIDTH, HEIGHT = 760, 260
#: Forward from the first unit to the last, then backward; each unit twice.
ORDER = [*range(UNITS), *reversed(range(UNITS))]
STYLE = """
  .rest { opacity: 0 }
  .phase { opacity: 0 }
  @media (prefers-reduced-motion: reduce) { .rest, .phase { animation: none !important } }
"""


def main() -> None:
    """Write the picture."""
    title = "A step: each unit is unsharded while it computes, and sharded otherwise"
    canvas = Canvas(WIDTH, HEIGHT, title, STYLE + _keyframes())
    for rank in range(RANKS):
        _rank(canvas, rank)
    for step, unit in enumerate(ORDER):
        _phase(canvas, step, unit)
    canvas.save("unshard.svg")


def _keyframes() -> str:
    """One animation for each unit, and one for each phase's words."""
    share = 100 / len(ORDER)
    rules = []
    for unit in range(UNITS):
        shown = [step for step, other in enumerate(ORDER) if other == unit]
        stops = "".join(
            f"{share * at:.1f}% {{ opacity: 0 }} {share * (at + 0.15):.1f}%, "
            f"{share * (at + 0.85):.1f}% {{ opacity: 1 }} {share * (at + 1):.1f}% {{ opacity: 0 }} "
            for at in shown
        )
        rules.append(
            f"@keyframes unit{unit} {{ 0% {{ opacity: 0 }} {stops}100% {{ opacity: 0 }} }}"
        )
        rules.append(f".unit{unit} {{ animation: unit{unit} {SECONDS}s linear infinite }}")
    for step in range(len(ORDER)):
        begin, end = share * step, share * (step + 1)
        rules.append(
            f"@keyframes phase{step} {{ 0%, {begin:.1f}% {{ opacity: 0 }} {begin + 0.1:.1f}%, "
            f"{end - 0.1:.1f}% {{ opacity: 1 }} {end:.1f}%, 100% {{ opacity: 0 }} }}"
        )
        rules.append(f".phase{step} {{ animation: phase{step} {SECONDS}s linear infinite }}")
    return "\n  ".join(rules)


def _rank(canvas: Canvas, rank: int) -> None:
    top = 50 + rank * 90
    canvas.text(20, top + 38, f"rank {rank}")
    for unit in range(UNITS):
        left, width, height = 100 + unit * 160, 140, 60
        own = left + rank * width / RANKS
        # The other ranks' part, as this rank sees it while the unit computes.
        other = left + (1 - rank) * width / RANKS
        seen = 'style="opacity: 1"' if unit == 1 else ""
        canvas.rect(own, top, width / RANKS, height, "shard")
        canvas.rect(other, top, width / RANKS, height, f"rest unit{unit}", seen)
        canvas.rect(left, top, width, height, "frame")
        if rank == 0:
            canvas.text(left + width / 2, top - 14, f"unit {unit + 1}", anchor="middle")


def _phase(canvas: Canvas, step: int, unit: int) -> None:
    does = (
        f"forward of unit {unit + 1}: all-gather its shards, compute, reshard"
        if step < UNITS
        else f"backward of unit {unit + 1}: all-gather, compute, reduce-scatter gradients, reshard"
    )
    seen = 'style="opacity: 1"' if step == 1 else ""
    canvas.text(100, HEIGHT - 22, does, f"phase phase{step}", more=seen)


if __name__ == "__main__":
    main()
