"""Loss curves of a small GPT in full precision and with encoded communication, of several seeds.

    PYTHONPATH=src python3 benchmarks/learning.py --steps 2000 --seeds 0 1 2 --picture learning.png

Each run is ``fullshard train`` on two ranks of the CPU, on Python's standard library as text. Runs
with the same seed begin with the same parameters and see the same data in the same order. "loss" is
the mean of the last tenth of the steps that were written down; "spread" is the largest difference
between two seeds of the row in full precision. Runs that are there already are read, not repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean

from bars import show_table

ROWS = {
    "full precision": [],
    "int8 all-gather": ["--all-gather", "int8"],
    "int8 all-gather and reduce": ["--all-gather", "int8", "--reduce", "int8"],
}
MODEL = ["--layers", "3", "--width", "96", "--heads", "4", "--sequence", "64", "--batch", "16"]
Curve = list[tuple[int, float]]


def run(row: str, seed: int, given: argparse.Namespace) -> Curve:
    """The losses of one run, by step."""
    name = f"{row.replace(' ', '-')}-{seed}"
    metrics = given.runs / name / "metrics.jsonl"
    if not (given.runs / name / "sample.txt").exists():
        words = ["--name", name, "--runs", str(given.runs), "--steps", str(given.steps)]
        words += ["--seed", str(seed), "--save-every", "0", "--device", given.device]
        command = [sys.executable, "-m", "fullshard", "train", *words, *MODEL, *ROWS[row]]
        subprocess.run([*command, *given.more], check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def final(curve: Curve) -> float:
    """The mean loss of the last tenth of a curve."""
    losses = [loss for _, loss in curve]
    return mean(losses[-max(1, len(losses) // 10) :])


def draw(curves: dict[str, list[Curve]], path: Path) -> None:
    """Two pictures: each row's mean over seeds, and what encoding changes for each seed."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    smooth = {row: list(map(smoothed, runs)) for row, runs in curves.items()}
    full = smooth["full precision"]
    steps = [step for step, _ in full[0]]
    for row, runs in smooth.items():
        by_step = [[loss for _, loss in each] for each in zip(*runs, strict=True)]
        (line,) = left.plot(steps, list(map(mean, by_step)), label=row, linewidth=1)
        low, high = list(map(min, by_step)), list(map(max, by_step))
        left.fill_between(steps, low, high, alpha=0.15, color=line.get_color())
        for one, plain in zip(runs, full, strict=True):
            if one is not plain:
                apart = [a - b for (_, a), (_, b) in zip(one, plain, strict=True)]
                right.plot(steps, apart, linewidth=0.8, color=line.get_color())
    by_step = [[loss for _, loss in each] for each in zip(*full, strict=True)]
    apart = [(max(each) - min(each)) / 2 for each in by_step]
    right.fill_between(steps, [-a for a in apart], apart, alpha=0.12, color="grey", label="seeds")
    left.set(xlabel="step", ylabel="loss", title="mean and range of the seeds")
    right.set(xlabel="step", ylabel="difference to full precision", title="for each seed")
    left.legend()
    right.legend(loc="lower left")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def smoothed(curve: Curve) -> Curve:
    """Each loss as the mean of it and the nine before."""
    losses = [loss for _, loss in curve]
    means = [mean(losses[max(0, index - 9) : index + 1]) for index in range(len(losses))]
    return [(step, value) for (step, _), value in zip(curve, means, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs/learning"))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--picture", type=Path, help="draw the curves to this file")
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    parser.add_argument("more", nargs="*", help="more options of fullshard train, after --")
    given = parser.parse_args()
    curves = {row: [run(row, seed, given) for seed in given.seeds] for row in ROWS}
    losses = {row: list(map(final, runs)) for row, runs in curves.items()}
    first = losses["full precision"]
    spread = max(first) - min(first)
    table: dict[str, dict[str, float]] = {}
    for row, found in losses.items():
        by_seed = {f"seed {seed}": loss for seed, loss in zip(given.seeds, found, strict=True)}
        table[row] = {**by_seed, "loss": mean(found), "difference": mean(found) - mean(first)}
    columns = [*(f"seed {seed}" for seed in given.seeds), "loss", "difference"]
    show_table(columns, {r: {c: f"{v:.4f}" for c, v in of.items()} for r, of in table.items()})
    print(f"spread of seeds in full precision: {spread:.4f}")
    for row, values in table.items():
        within = abs(values["difference"]) <= spread
        print(f"{row}: {'within' if within else 'NOT within'} the spread")
    if given.picture is not None:
        draw(curves, given.picture)
    if given.json is not None:
        facts = {"steps": given.steps, "spread": spread, "rows": table}
        given.json.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
