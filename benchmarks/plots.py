"""Pictures of what the other benchmarks measured, from the JSON that they wrote.

    python3 benchmarks/plots.py --step step.json --cpu cpu.json --overlap overlap.json \\
        --growth growth.json --profile profile.json --folder docs/pictures

Compares nothing itself; needs matplotlib. A file that is not given has no picture.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as pyplot
from matplotlib.figure import Figure

COLORS = {
    "bare": "#9a9a9a",
    "DDP": "#6b6b6b",
    "FSDP1": "#e0a458",
    "FSDP2": "#c8553d",
    "Megatron-FSDP": "#7a6c9d",
    "fullshard": "#2a6f97",
    "fullshard SHARD_GRAD_OP": "#61a5c2",
    "fullshard HYBRID_SHARD": "#a9d6e5",
    "fullshard fully_shard": "#014f86",
}
#: Phases of the profile with less than this part of a step are drawn as one.
SMALL = 0.01


def bars(axes: Any, values: dict[str, float | None], title: str, label: str) -> None:
    """One bar per row, with its number; rows without one are left out."""
    known = {row: value for row, value in values.items() if value is not None}
    drawn = axes.bar(list(known), list(known.values()), color=[COLORS[row] for row in known])
    axes.bar_label(drawn, fmt="{:.3g}", padding=2)
    axes.set_title(title)
    axes.set_ylabel(label)
    axes.tick_params(axis="x", rotation=30)
    axes.margins(y=0.15)


def draw_step(results: dict[str, Any]) -> Figure:
    """Step time and peak memory of every case."""
    cases = results["cases"]
    figure, grid = pyplot.subplots(2, len(cases), figsize=(3.2 * len(cases), 7), squeeze=False)
    for case, axes in zip(cases, grid.T, strict=True):
        rows = case["rows"]
        bars(axes[0], {r: v["step ms"] for r, v in rows.items()}, case["case"], "ms per step")
        bars(axes[1], {r: v["allocated GiB"] for r, v in rows.items()}, "", "GiB at most")
    return figure


def draw_cpu(results: dict[str, Any]) -> Figure:
    """Ratios to the bare model, and memory, on real ranks."""
    runs = results["runs"]
    figure, grid = pyplot.subplots(2, len(runs), figsize=(5 * len(runs), 8), squeeze=False)
    for run, axes in zip(runs, grid.T, strict=True):
        rows, title = run["rows"], f"{run['ranks']} ranks over gloo"
        bars(axes[0], {r: v.get("x bare") for r, v in rows.items()}, title, "step, x bare")
        bars(axes[1], {r: v["peak MiB"] for r, v in rows.items()}, "", "MiB per rank, at most")
    return figure


def draw_overlap(results: dict[str, Any]) -> Figure:
    """Step time against bandwidth, with what is ideal and what is reachable for fullshard."""
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    points = sorted((float(width), part["rows"]) for width, part in results["bandwidths"].items())
    widths = [width for width, _ in points]
    for row in points[0][1]:
        axes.plot(widths, [r[row]["step ms"] for _, r in points], "o-", c=COLORS[row], label=row)
    if "fullshard" in points[0][1]:
        for bound, line in (("reachable", "k:"), ("ideal", "k--")):
            values = [rows["fullshard"][f"{bound} ms"] for _, rows in points]
            axes.plot(widths, values, line, label=f"{bound} for fullshard")
    axes.set(xscale="log", xlabel="bandwidth, GB/s", ylabel="ms per step", title=results["case"])
    axes.set_xticks(widths, [f"{width:g}" for width in widths], minor=False)
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


def draw_growth(results: dict[str, Any]) -> Figure:
    """Set-up and step time against each size, on logarithmic axes."""
    sweeps = results["sweeps"]
    figure, grid = pyplot.subplots(1, len(sweeps), figsize=(4.5 * len(sweeps), 4), squeeze=False)
    for sweep, axes in zip(sweeps, grid[0], strict=True):
        for row, values in sweep["rows"].items():
            axes.plot(sweep["sizes"], values["step ms"], "o-", c=COLORS[row], label=f"{row}, step")
            if row != "bare":
                label = f"{row}, set-up"
                axes.plot(sweep["sizes"], values["set-up ms"], "s:", c=COLORS[row], label=label)
        axes.set(xscale="log", yscale="log", xlabel=sweep["sweep"], ylabel="ms")
        axes.legend(fontsize="small")
    return figure


def draw_profile(results: dict[str, Any]) -> Figure:
    """Host time by phase, the largest on top."""
    phases = {name: phase["ms"] for name, phase in results["phases"].items()}
    least = SMALL * sum(phases.values())
    shown = {name: value for name, value in phases.items() if value >= least}
    shown["all others"] = sum(value for value in phases.values() if value < least)
    names = sorted(shown, key=lambda name: shown[name])
    figure, axes = pyplot.subplots(figsize=(7, 0.3 * len(names) + 1.5))
    drawn = axes.barh(names, [shown[name] for name in names], color=COLORS["fullshard"])
    axes.bar_label(drawn, fmt="{:.2f}", padding=2)
    axes.set(xlabel="ms of host time per step", title=f"{results['row']}, {results['case']}")
    axes.margins(x=0.12)
    return figure


PICTURES: dict[str, Callable[[dict[str, Any]], Figure]] = {
    "step": draw_step,
    "cpu": draw_cpu,
    "overlap": draw_overlap,
    "growth": draw_growth,
    "profile": draw_profile,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in PICTURES:
        parser.add_argument(f"--{name}", type=Path, metavar="JSON")
    parser.add_argument("--folder", type=Path, default=Path("docs/pictures"))
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        source = getattr(given, name)
        if source is not None:
            figure = draw(json.loads(source.read_text()))
            figure.tight_layout()
            target = given.folder / f"{name}.png"
            figure.savefig(target, dpi=120)
            print(target)


if __name__ == "__main__":
    main()
