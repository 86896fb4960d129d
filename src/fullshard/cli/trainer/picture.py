"""The loss curve, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["draw_losses"]


def draw_losses(metrics: list[dict[str, Any]], path: Path) -> str:
    """Draw loss and learning rate over steps; returns why not, or "" if the picture is drawn.

    Nothing that matplotlib raises is worth the end of a training.
    """
    if not metrics:
        return "there are no metrics"
    try:
        _draw(metrics, path)
    except ModuleNotFoundError as missing:
        return f"{missing.name} is not installed"
    except Exception as problem:
        first_line = str(problem).strip().partition("\n")[0]
        return f"matplotlib failed with {type(problem).__name__}: {first_line}"
    return ""


def _draw(metrics: list[dict[str, Any]], path: Path) -> None:
    # Takes a while to import: not where only the command's help is asked for.
    from matplotlib.figure import Figure

    steps = [line["step"] for line in metrics]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, [line["loss"] for line in metrics], color="tab:blue", label="loss")
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    # A run's name may have dollar signs in it, which would begin a formula.
    axes.set_title(path.parent.name, parse_math=False)
    axes.grid(alpha=0.3)
    rates = axes.twinx()
    rates.plot(
        steps, [line["learning_rate"] for line in metrics], color="tab:gray", alpha=0.6, ls="--"
    )
    rates.set_ylabel("learning rate (dashed)")
    rates.set_ylim(bottom=0)
    figure.savefig(path, dpi=120)
