"""Draws docs/pictures/memory.svg: memory per rank and parameter, by strategy, without activations.

    python3 docs/_site/draw_memory.py

Float32 and Adam, so 4 bytes each for a parameter and its gradient and 8 for optimizer state; units
of equal size. What is unsharded follows docs/engine.md: two units and one reduce buffer, or, if
units stay unsharded after forward, all of them.
"""

from __future__ import annotations

from canvas import Canvas

UNITS, RANKS, RANKS_PER_HOST = 24, 8, 4
PARAMETER, GRADIENT, OPTIMIZER = 4, 4, 8
LEFT, SCALE, BAR = 200, 30, 30
PARTS = {
    "parameters": "shard",
    "gradients": "warm",
    "optimizer state": "compute",
    "unsharded while computing": "rest",
    "unreduced gradients": "warmlight",
}


def bars() -> dict[str, list[float]]:
    """Return bytes per parameter of the model, part by part."""
    two_units, reduce_buffer = 2 * PARAMETER / UNITS, GRADIENT / UNITS

    def sharded(ranks: int, unsharded: float) -> list[float]:
        states = [PARAMETER / ranks, GRADIENT / ranks, OPTIMIZER / ranks]
        return [*states, unsharded, reduce_buffer]

    return {
        "NO_SHARD": [PARAMETER, GRADIENT, OPTIMIZER, 0, 0],
        "SHARD_GRAD_OP": sharded(RANKS, PARAMETER),
        "HYBRID_SHARD": sharded(RANKS_PER_HOST, two_units),
        "FULL_SHARD": sharded(RANKS, two_units),
    }


def main() -> None:
    """Write the picture."""
    canvas = Canvas(760, 280, "Memory per rank, by strategy")
    title = f"Bytes per parameter on each of {RANKS} ranks (two hosts of {RANKS_PER_HOST})"
    canvas.text(20, 32, title)
    for number, (strategy, parts) in enumerate(bars().items()):
        y, x = 52 + number * (BAR + 12), float(LEFT)
        canvas.text(20, y + 20, strategy)
        for kind, size in zip(PARTS.values(), parts, strict=True):
            canvas.rect(x, y, size * SCALE, BAR, kind)
            x += size * SCALE
        canvas.text(x + 8, y + 20, f"{sum(parts):.1f}", "small")
    x = 20.0
    for name, kind in PARTS.items():
        canvas.rect(x, 236, 14, 14, kind)
        canvas.text(x + 20, 248, name, "small")
        x += 42 + 6.6 * len(name)
    canvas.save("memory.svg")


if __name__ == "__main__":
    main()
