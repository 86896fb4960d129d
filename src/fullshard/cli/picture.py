"""The loss curve, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["draw_losses"]


def draw_losses(metrics: list[dict[str, Any]], path: Path) -> bool:
    """Draw loss and learning rate over steps; returns whether there is matplotlib to do it with."""
    # Takes a while to import: not where only the command's help is asked for.
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    steps = [line["step"] for line in metrics]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, [line["loss"] for line in metrics], color="tab:blue", label="loss")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=path.parent.name)
    axes.grid(alpha=0.3)
    rates = axes.twinx()
    rates.plot(
        steps, [line["learning_rate"] for line in metrics], color="tab:gray", alpha=0.6, ls="--"
    )
    rates.set_ylabel("learning rate (dashed)")
    rates.set_ylim(bottom=0)
    figure.savefig(path, dpi=120)
    return True
