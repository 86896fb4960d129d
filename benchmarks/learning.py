"""Loss curves of a small GPT in full precision and with encoded communication, of several seeds.

    PYTHONPATH=src python3 benchmarks/learning.py --steps 2000 --seeds 0 1 2 --picture learning.png
    PYTHONPATH=src python3 benchmarks/learning.py --device cuda --steps 6000 --jobs 9 --json it.json
    PYTHONPATH=src python3 benchmarks/learning.py --read it.json --picture learning.png

Each run is that of ``fullshard train`` on two ranks, with Python's standard library as text. The
ranks are on the CPU, or on GPUs, of which several ranks share one if there are too few. ``--set``
gives more options of ``fullshard train``. Runs with the same seed begin with the same parameters
and see the same data in the same order. "loss" is the mean of the last tenth of the steps that were
written down; "spread" is the largest difference between two seeds of the row in full precision.
Runs that are there already are read, not repeated; one that was cut off goes on from its last
checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

from bars import show_table

sys.path.append(str(Path(__file__).resolve().parent.parent))
from tests.over_nccl import multi_process_service

FULL = "full precision"
ROWS: dict[str, dict[str, Any]] = {
    FULL: {},
    "int8 all-gather": {"all_gather": "int8"},
    "int8 all-gather and reduce": {"all_gather": "int8", "reduce": "int8"},
}
MODEL = {"layers": 3, "width": 96, "heads": 4, "sequence": 64, "batch": 16}
Curve = list[tuple[int, float]]


def run(row: str, seed: int, given: argparse.Namespace) -> Curve:
    """The losses of one run, by step."""
    name = f"{row.replace(' ', '-')}-{seed}"
    folder = given.runs / name
    if not (folder / "sample.txt").exists():
        options = {"steps": given.steps, "save_every": 500, "seed": seed, "device": given.device}
        flags = {**options, **MODEL, **dict(given.set), **ROWS[row]}
        resume = (folder / "config.toml").exists()
        request = {"flags": flags, "name": name, "runs": str(given.runs), "resume": resume}
        ranks = [sys.executable, "-m", "fullshard.cli.launcher.run", "--ranks", str(given.ranks)]
        command = [*ranks, __file__, "--on-rank", json.dumps(request)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise RuntimeError(f"{name} ended with status {done.returncode}:\n{done.stdout}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def train_on_rank(request: dict[str, Any]) -> int:
    """Train as one of the ranks that :func:`run` has started; returns the exit status."""
    import torch

    from fullshard.cli.trainer.train import Request, run_training

    if request["flags"]["device"] == "cuda":
        if int(os.environ["WORLD_SIZE"]) > torch.cuda.device_count():
            # NCCL refuses two ranks on one GPU of a host: each is a host of its own by name.
            os.environ["NCCL_HOSTID"] = f"host{os.environ['RANK']}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    return run_training(Request(**{**request, "runs": Path(request["runs"])}))


def measure(given: argparse.Namespace) -> dict[str, dict[str, Curve]]:
    """The curves of all runs, by row and seed."""
    asked = [(row, seed) for row in ROWS for seed in given.seeds]
    # Ranks that share a GPU compute side by side.
    service = multi_process_service if given.device == "cuda" else contextlib.nullcontext
    with service(), ThreadPoolExecutor(given.jobs) as pool:
        found = list(pool.map(lambda each: run(each[0], each[1], given), asked))
    curves: dict[str, dict[str, Curve]] = {row: {} for row in ROWS}
    for (row, seed), curve in zip(asked, found, strict=True):
        curves[row][str(seed)] = curve
    for row, runs in curves.items():
        if row != FULL and runs == curves[FULL]:
            sys.exit(f"error: {row} has the losses of {FULL}: nothing was encoded")
    return curves


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
    full = smooth[FULL]
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


def setting(text: str) -> tuple[str, Any]:
    """An option of ``fullshard train`` from NAME=VALUE."""
    name, _, value = text.partition("=")
    with contextlib.suppress(ValueError):
        return name.replace("-", "_"), json.loads(value)
    return name.replace("-", "_"), value


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--runs", type=Path, default=Path("runs/learning"))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--set", type=setting, nargs="+", default=[], metavar="NAME=VALUE")
    parser.add_argument("--picture", type=Path, help="draw the curves to this file")
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    parser.add_argument("--read", type=Path, help="take the curves from such a file, and run none")
    parser.add_argument("--on-rank", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.on_rank is not None:
        sys.exit(train_on_rank(given.on_rank))
    curves = measure(given) if given.read is None else json.loads(given.read.read_text())["curves"]
    facts = show(curves)
    if given.json is not None:
        given.json.write_text(json.dumps({**facts, "curves": curves}) + "\n")
    if given.picture is not None:
        if importlib.util.find_spec("matplotlib") is None:
            print("not drawn, as matplotlib is not installed: --read what --json wrote elsewhere")
        else:
            draw({row: list(runs.values()) for row, runs in curves.items()}, given.picture)


def show(curves: dict[str, dict[str, Curve]]) -> dict[str, Any]:
    """Print the losses of each row and seed; returns them."""
    losses = {row: {seed: final(run) for seed, run in of.items()} for row, of in curves.items()}
    first = losses[FULL].values()
    spread = max(first) - min(first)
    table: dict[str, dict[str, float]] = {}
    for row, found in losses.items():
        by_seed = {f"seed {seed}": loss for seed, loss in found.items()}
        loss = mean(found.values())
        table[row] = {**by_seed, "loss": loss, "difference": loss - mean(first)}
    show_table(
        [*table[FULL]], {r: {c: f"{v:.4f}" for c, v in of.items()} for r, of in table.items()}
    )
    print(f"spread of seeds in full precision: {spread:.4f}")
    for row, values in table.items() if len(first) > 1 else ():
        within = abs(values["difference"]) <= spread
        print(f"{row}: {'within' if within else 'NOT within'} the spread")
    steps = next(iter(curves[FULL].values()))[-1][0]
    return {"steps": steps, "spread": spread, "rows": table}


if __name__ == "__main__":
    main()
