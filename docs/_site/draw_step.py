"""Draws docs/pictures/unshard.svg: how parameters are unsharded and resharded during a step.

    python3 docs/_site/draw_step.py

Two ranks, four units. Each unit is a bar of the memory that a rank uses for its parameters: half of
it is the rank's shard, which stays; the other half is there only while the unit computes. The
picture moves by itself in a browser; drawn on paper, it shows the second unit in its forward.
"""

from __future__ import annotations

from pathlib import Path

UNITS, RANKS, SECONDS = 4, 2, 12.0
WIDTH, HEIGHT = 760, 330
#: Forward from the first unit to the last, then backward; each unit twice.
ORDER = [*range(UNITS), *reversed(range(UNITS))]
OUTPUT = Path(__file__).resolve().parent.parent / "pictures" / "unshard.svg"
STYLE = """
  .text { font: 15px system-ui, sans-serif; fill: #263238 }
  .small { font-size: 13px; fill: #546e7a }
  .shard { fill: #00897b }
  .rest { fill: #80cbc4; opacity: 0 }
  .frame { fill: none; stroke: #90a4ae; stroke-width: 1.5 }
  .phase { opacity: 0 }
  @media (prefers-color-scheme: dark) {
    .text { fill: #eceff1 } .small { fill: #b0bec5 } .frame { stroke: #607d8b }
  }
  @media (prefers-reduced-motion: reduce) { .rest, .phase { animation: none !important } }
"""


def main() -> None:
    """Write the picture."""
    parts = [_rank(rank) for rank in range(RANKS)]
    phases = "".join(_phase(step, unit) for step, unit in enumerate(ORDER))
    OUTPUT.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">\n'
        "<title>A step: each unit is unsharded while it computes, and sharded otherwise</title>\n"
        f"<style>{STYLE}{_keyframes()}</style>\n{''.join(parts)}{phases}</svg>\n"
    )


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


def _rank(rank: int) -> str:
    top = 40 + rank * 120
    drawn = [f'<text class="text" x="20" y="{top + 38}">rank {rank}</text>\n']
    for unit in range(UNITS):
        left, width, height = 110 + unit * 160, 140, 60
        own = left + rank * width / RANKS
        # The other ranks' part, as this rank sees it while the unit computes.
        other = left + (1 - rank) * width / RANKS
        seen = ' style="opacity: 1"' if unit == 1 else ""
        box = f'y="{top}" width="{width / RANKS:g}" height="{height}"'
        drawn.append(f'<rect class="shard" x="{own:g}" {box}/>')
        drawn.append(f'<rect class="rest unit{unit}" x="{other:g}" {box}{seen}/>')
        drawn.append(
            f'<rect class="frame" x="{left}" y="{top}" width="{width}" height="{height}" rx="4"/>'
        )
        if rank == 0:
            middle = left + width / 2
            drawn.append(
                f'<text class="text" x="{middle:g}" y="{top - 12}" text-anchor="middle">'
                f"unit {unit + 1}</text>\n"
            )
    return "".join(drawn)


def _phase(step: int, unit: int) -> str:
    does = (
        f"forward of unit {unit + 1}: all-gather its shards, compute, reshard"
        if step < UNITS
        else f"backward of unit {unit + 1}: all-gather, compute, reduce-scatter gradients, reshard"
    )
    seen = ' style="opacity: 1"' if step == 1 else ""
    kind, y = f"text small phase phase{step}", HEIGHT - 20
    return f'<text class="{kind}" x="110" y="{y}"{seen}>{does}</text>\n'


if __name__ == "__main__":
    main()
