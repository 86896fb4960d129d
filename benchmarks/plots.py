"""Pictures of what the other benchmarks measured, from the JSON that they wrote.

    python3 benchmarks/plots.py --step step.json --capture capture.json --cpu cpu.json \\
        --overlap overlap.json --growth growth.json --profile profile.json --folder docs/pictures

Compares nothing itself; needs matplotlib. A file that is not given has no picture. The numbers of
docs/performance.md are in docs/pictures/data, from which its pictures are drawn again:

    python3 benchmarks/plots.py --data docs/pictures/data
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
from matplotlib.patches import Patch

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
#: What is added to a row's name where its step is one CUDA graph.
CAPTURED = " captured"
#: Phases of the profile with less than this part of a step are drawn as one.
SMALL = 0.01


def in_words(case: str) -> str:
    """A model and its ranks: "1.34B@8" is "1.34 B parameters, 8 ranks"."""
    size, _, ranks = case.partition("@")
    count = "1 rank" if ranks == "1" else f"{ranks} ranks"
    if size == "llama":
        return f"Llama of 1.1 B, {count}"
    return f"{size[:-1]} {size[-1]} parameters, {count}"


def three_digits(value: float) -> str:
    """A number with three digits, zeros included, and no more than two behind the point."""
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def bars(axes: Any, values: dict[str, float | None], title: str, label: str) -> None:
    """One bar per row, with its number, and so without an axis; rows without one are left out.
    The legend has names.
    """
    known = {row: value for row, value in values.items() if value is not None}
    drawn = axes.bar(range(len(known)), list(known.values()), color=[COLORS[row] for row in known])
    axes.bar_label(drawn, fmt=three_digits, padding=2)
    axes.set_title(title, fontsize="medium")
    axes.set_ylabel(label)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.margins(y=0.15)
    axes.spines[["top", "right", "left"]].set_visible(False)


def legend_of(figure: Figure, rows: list[str]) -> None:
    """Name the rows once, below all bars."""
    handles = [Patch(color=COLORS[row], label=row) for row in rows]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(rows), frameon=False)


def rows_in(parts: list[dict[str, Any]]) -> list[str]:
    """The rows of all ``parts``, in the order of the colors."""
    return [row for row in COLORS if any(row in part["rows"] for part in parts)]


def draw_step(results: dict[str, Any]) -> Figure:
    """Step time and peak memory of every case."""
    cases = results["cases"]
    # As wide as a page of the documents, so that words stay as large as those around the picture.
    size = (max(1.9 * len(cases), 7), 5)
    figure, grid = pyplot.subplots(2, len(cases), figsize=size, squeeze=False, layout="constrained")
    for number, (case, axes) in enumerate(zip(cases, grid.T, strict=True)):
        rows = case["rows"]
        title = in_words(case["case"]).replace(", ", ",\n")
        time, memory = ("", "") if number else ("ms per step", "peak memory, GiB")
        bars(axes[0], {r: v["step ms"] for r, v in rows.items()}, title, time)
        bars(axes[1], {r: v["allocated GiB"] for r, v in rows.items()}, "", memory)
    legend_of(figure, rows_in(cases))
    return figure


def draw_capture(results: dict[str, Any]) -> Figure:
    """Eager and captured steps side by side, in every case."""
    cases = results["cases"]
    figure, row_of_axes = pyplot.subplots(
        1, len(cases), figsize=(max(2.8 * len(cases), 7), 3.6), squeeze=False, layout="constrained"
    )
    names = [name for name in rows_in(cases) if f"{name}{CAPTURED}" in cases[0]["rows"]]
    for number, (case, axes) in enumerate(zip(cases, row_of_axes[0], strict=True)):
        for captured, (suffix, alpha) in enumerate((("", 0.35), (CAPTURED, 1.0))):
            drawn = axes.bar(
                [place + 0.4 * captured for place in range(len(names))],
                [case["rows"][name + suffix]["step ms"] for name in names],
                width=0.4,
                color=[COLORS[name] for name in names],
                alpha=alpha,
            )
            axes.bar_label(drawn, fmt=three_digits, padding=2, fontsize="xx-small")
        axes.set_title(in_words(case["case"]).replace(", ", ",\n"), fontsize="medium")
        axes.set_ylabel("" if number else "ms per step: eager, captured")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[["top", "right", "left"]].set_visible(False)
    legend_of(figure, names)
    return figure


def draw_cpu(results: dict[str, Any]) -> Figure:
    """Ratios to the bare model, and memory, on real ranks."""
    runs = results["runs"]
    size = (max(4 * len(runs), 8), 5)
    figure, grid = pyplot.subplots(2, len(runs), figsize=size, squeeze=False, layout="constrained")
    for number, (run, axes) in enumerate(zip(runs, grid.T, strict=True)):
        rows, title = run["rows"], f"{run['ranks']} ranks over gloo"
        time, memory = ("", "") if number else ("time of a step, x bare", "peak MiB per rank")
        bars(axes[0], {r: v.get("x bare") for r, v in rows.items()}, title, time)
        bars(axes[1], {r: v["peak MiB"] for r, v in rows.items()}, "", memory)
    legend_of(figure, rows_in(runs))
    return figure


def draw_overlap(results: dict[str, Any]) -> Figure:
    """How much longer than the shortest possible a step takes, at each bandwidth.

    Rows differ in compute and bytes; so that bars compare, the lowest ideal of any counts.
    """
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    points = sorted((float(width), part["rows"]) for width, part in results["bandwidths"].items())
    rows = rows_in([{"rows": rows} for _, rows in points])
    width = 0.8 / len(rows)
    for number, row in enumerate(rows):
        longer = [100 * (each[row]["step ms"] / lowest_ideal(each) - 1) for _, each in points]
        places = [place + (number - (len(rows) - 1) / 2) * width for place in range(len(points))]
        drawn = axes.bar(places, longer, 0.9 * width, color=COLORS[row], label=row)
        axes.bar_label(drawn, fmt="{:.1f}", padding=2, fontsize="small")
    axes.set(xlabel="bandwidth, GB/s", ylabel="longer than the ideal step, %")
    axes.set_title(in_words(results["case"]), fontsize="medium")
    axes.set_xticks(range(len(points)), [f"{bandwidth:g}" for bandwidth, _ in points])
    axes.spines[["top", "right"]].set_visible(False)
    legend_of(figure, rows)
    return figure


def lowest_ideal(rows: dict[str, Any]) -> float:
    """The shortest step of any row whose communication is all hidden, or hides all compute."""
    return float(min(max(r["compute ms"], r["communication ms"]) for r in rows.values()))


#: What the sweeps of benchmarks/growth.py are called on the axis.
SWEEPS = {"units": "units", "parameters": "parameters per unit", "ranks": "ranks"}


def draw_growth(results: dict[str, Any]) -> Figure:
    """Set-up and step time against each size, on logarithmic axes."""
    sweeps = results["sweeps"]
    size = (3.2 * len(sweeps), 4)
    figure, grid = pyplot.subplots(
        1, len(sweeps), figsize=size, squeeze=False, sharey=True, layout="constrained"
    )
    for sweep, axes in zip(sweeps, grid[0], strict=True):
        for row, values in sweep["rows"].items():
            axes.plot(sweep["sizes"], values["step ms"], "o-", c=COLORS[row], label=f"{row}, step")
            if row != "bare":
                label = f"{row}, set-up"
                axes.plot(sweep["sizes"], values["set-up ms"], "s:", c=COLORS[row], label=label)
        axes.set(xscale="log", yscale="log", xlabel=SWEEPS[sweep["sweep"]])
        axes.set_xticks(sweep["sizes"], [f"{size:,}" for size in sweep["sizes"]], minor=False)
        axes.set_xticks([], minor=True)
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.spines[["top", "right"]].set_visible(False)
    grid[0][0].set_ylabel("ms")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return figure


def draw_profile(results: dict[str, Any]) -> Figure:
    """Host time by phase, the largest on top."""
    phases = {
        name: phase["us a unit"] if "us a unit" in phase else 1e3 * phase["ms"] / results["units"]
        for name, phase in results["phases"].items()
    }
    least = SMALL * sum(phases.values())
    shown = {name: value for name, value in phases.items() if value >= least}
    others = sum(value for value in phases.values() if value < least)
    if others:
        shown["all others"] = others
    names = sorted(shown, key=lambda name: shown[name])
    figure, axes = pyplot.subplots(figsize=(7, 0.27 * len(names) + 1.2), layout="constrained")
    drawn = axes.barh(names, [shown[name] for name in names], color=COLORS["fullshard"])
    axes.bar_label(drawn, fmt="{:.3g}", padding=2)
    axes.set(xlabel="µs of host time per unit and step")
    axes.set_title(f"{results['row']}, {in_words(results['case'])}", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)
    return figure


def draw_ladder(results: dict[str, Any]) -> Figure:
    """Speed and memory of each rung of the tuning ladder, from the first row down."""
    names = list(results["rows"])[::-1]
    figure, (speed, memory) = pyplot.subplots(
        1, 2, figsize=(9, 0.35 * len(names) + 1), sharey=True, layout="constrained"
    )
    columns = (("x first", "tokens/s, x the first row"), ("MiB", "MiB per rank"))
    for axes, (column, label) in zip((speed, memory), columns, strict=True):
        values = [results["rows"][name][column] for name in names]
        drawn = axes.barh(names, values, color=COLORS["fullshard"])
        axes.bar_label(drawn, fmt=three_digits, padding=2)
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.12)
    return figure


PICTURES: dict[str, Callable[[dict[str, Any]], Figure]] = {
    "step": draw_step,
    "capture": draw_capture,
    "cpu": draw_cpu,
    "overlap": draw_overlap,
    "growth": draw_growth,
    "profile": draw_profile,
    "ladder": draw_ladder,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in PICTURES:
        parser.add_argument(f"--{name}", type=Path, metavar="JSON")
    parser.add_argument("--folder", type=Path, default=Path("docs/pictures"))
    parser.add_argument("--data", type=Path, help="a folder with all of them, by name")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        source = getattr(given, name) or (given.data and given.data / f"{name}.json")
        if source is not None:
            figure = draw(json.loads(source.read_text()))
            target = given.folder / f"{name}.png"
            figure.savefig(target, dpi=120)
            print(target)


if __name__ == "__main__":
    main()
