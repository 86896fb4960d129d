"""Draws docs/pictures/layout.svg: which elements of a linear each of two ranks holds.

    python3 docs/_site/draw_layout.py

Above as the wrapper cuts them, from one flat buffer; below as fully_shard does, by rows.
"""

from __future__ import annotations

from canvas import Canvas

ROWS, COLUMNS, RANKS = 7, 5, 2
#: With original parameters every parameter begins at a multiple of 16 bytes: four float32 elements.
ALIGNMENT = 4
CELL = 15
COLORS = ("shard", "warm")


def main() -> None:
    """Write the picture."""
    canvas = Canvas(760, 385, "How the parameters of a linear are divided over two ranks")
    _flat(canvas, left=50, top=70)
    _rows(canvas, left=50, top=215)
    canvas.save("layout.svg")


def _flat(canvas: Canvas, left: float, top: float) -> None:
    weight, bias = ROWS * COLUMNS, ROWS
    gap = -weight % ALIGNMENT
    used = weight + gap + bias
    shard = -(-used // RANKS)
    canvas.text(left, top - 36, "FullyShardedDataParallel: one flat buffer, cut anywhere")
    for element in range(shard * RANKS):
        padding = weight <= element < weight + gap or element >= used
        kind = "gray" if padding else COLORS[element // shard]
        canvas.rect(left + element * CELL, top, CELL - 2, 34, kind)
    canvas.line([(left + shard * CELL - 1, top - 8), (left + shard * CELL - 1, top + 42)], "cut")
    canvas.text(left, top - 10, "weight, 35 elements", "small")
    canvas.text(left + (weight + gap) * CELL, top - 10, "bias, 7", "small")
    for rank in range(RANKS):
        middle = left + (rank + 0.5) * shard * CELL
        words = f"rank {rank}: {shard} elements"
        canvas.text(middle, top + 58, words, anchor="middle")
    canvas.text(
        left, top + 84, "gray: padding, which aligns parameters and makes shards equal", "small"
    )


def _rows(canvas: Canvas, left: float, top: float) -> None:
    held = -(-ROWS // RANKS)
    canvas.text(left, top - 14, "fully_shard: rows of each parameter (DTensors, Shard(0))")
    for row in range(ROWS):
        kind = COLORS[row // held]
        y = top + row * (CELL + 3) + 8
        for column in range(COLUMNS):
            canvas.rect(left + column * (CELL * 3 + 2), y, CELL * 3, CELL, kind)
        canvas.rect(left + 330, y, CELL * 3, CELL, kind)
        if row % held == 0:
            last = min(row + held, ROWS) - 1
            canvas.text(left + 420, y + 30, f"rank {row // held}: rows {row} to {last} of each")
    cut = top + held * (CELL + 3) + 6
    canvas.line([(left - 8, cut), (left + 390, cut)], "cut")
    canvas.text(left, top + 150, "weight, 7 x 5", "small")
    canvas.text(left + 330, top + 150, "bias, 7", "small")


if __name__ == "__main__":
    main()
