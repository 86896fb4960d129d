"""How fullshard's set-up and step grow with the number of units, the parameters in a unit and the
number of ranks, beside the bare model and torch's FSDP1 and FSDP2.

    PYTHONPATH=src python3 benchmarks/growth.py --json growth.json

A chain of small units, of which each adds its parameters to its input, so that a step's time is
the host's; one process plays a rank over collectives that cost nothing (groups.py). Each row has a
process of its own; rows take turns, point by point and round by round, except that what took a row
very long is not repeated. Columns, the fastest of all rounds, because whatever else a machine does
only adds to it: "set-up ms", the wrapping of a model that is there; "first ms", the first step,
which learns the order, less "collector ms", the most that Python's garbage collector took in it
(one full collection takes as long as the program is large, and comes when it likes); "step ms",
those that follow. A sweep is linear or better if its last points grow by no more than the size
does.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import time
from pathlib import Path
from typing import Any

import groups
import torch
import torch.distributed as dist
from bars import show_verdicts
from rows import Setting, Training
from torch import nn
from workers import Worker

ROWS = ["bare", "FSDP1", "FSDP2", "fullshard"]
COLUMNS = ["set-up ms", "first ms", "step ms", "collector ms"]
WIDTH = 64
#: What the last two points of a sweep may grow by, more than their sizes, before it counts.
NOISE = 1.25
#: Milliseconds at a point after which a row is not measured there again.
_LONG = 5_000


@dataclasses.dataclass(frozen=True)
class Point:
    units: int = 20
    parameters: int = 4
    ranks: int = 8


SWEEPS = {
    "units": [10, 30, 100, 300, 1000],
    "parameters": [1, 4, 16, 64, 256],
    "ranks": [8, 64, 512, 4096],
}


class Link(nn.Module):
    """A unit of ``parameters`` vectors."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        vectors = (nn.Parameter(torch.randn(WIDTH) / parameters) for _ in range(parameters))
        self.vectors = nn.ParameterList(vectors)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for vector in self.vectors:
            x = x + vector
        return x


class Chain(nn.Module):
    def __init__(self, point: Point) -> None:
        super().__init__()
        self.links = nn.Sequential(*(Link(point.parameters) for _ in range(point.units)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.links(x).square().mean()


class Collector:
    """The milliseconds that Python's garbage collector has taken."""

    def __init__(self) -> None:
        self.taken = 0.0
        self._started = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _: dict[str, int]) -> None:
        now = 1e3 * time.perf_counter()
        if phase == "start":
            self._started = now
        else:
            self.taken += now - self._started


class Contestant:
    """One row in this process; every point has a model and a group of its own."""

    def __init__(self, row: str, device: str, steps: int) -> None:
        self.row, self.steps = row, steps
        self.device = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
        self.collector = Collector()
        # What is imported and loaded at the first use is not the first point's.
        self.measure(Point(units=2))

    def measure(self, point: Point) -> dict[str, float]:
        group = groups.Instant(point.ranks)
        groups.install(group)
        try:
            return self._measure(point)
        finally:
            dist.destroy_process_group()
            gc.collect()

    def _measure(self, point: Point) -> dict[str, float]:
        torch.manual_seed(0)
        with self.device:
            model, batch = Chain(point), torch.randn(8, WIDTH)
        setting = Setting(Link, torch.float32)
        started = self._now()
        training = Training(self.row, model, batch, setting)
        wrapped, collected = self._now(), self.collector.taken
        training.step()
        stepped, collected = self._now(), self.collector.taken - collected
        training.step()
        times = []
        for _ in range(self.steps):
            before = self._now()
            training.step()
            times.append(self._now() - before)
        return {
            "set-up ms": wrapped - started,
            "first ms": stepped - wrapped - collected,
            "step ms": min(times),
            "collector ms": collected,
        }

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return 1e3 * time.perf_counter()


#: What a row measured at each size, one entry a round.
Found = dict[int, list[dict[str, float]]]


def sweep(name: str, sizes: list[int], workers: dict[str, Worker], rounds: int) -> dict[str, Any]:
    """Measure all rows at all points of one sweep."""
    found: dict[str, Found] = {row: {size: [] for size in sizes} for row in workers}
    skipped: dict[str, str] = {}
    for _ in range(rounds):
        for size in sizes:
            for row, worker in workers.items():
                if row in skipped or _took_long(found[row][size]):
                    continue
                answer = worker.ask("measure", Point(**{name: size}))
                if "skipped" in answer:
                    skipped[row] = answer["skipped"]
                else:
                    found[row][size].append(answer)
    table = {row: _best(found[row]) for row in workers if row not in skipped}
    return {
        "sweep": name,
        "sizes": sizes,
        "rounds": rounds,
        "rows": table,
        "skipped": skipped,
        "bars": judge(sizes, table.get("fullshard", {})),
    }


def _took_long(measured: list[dict[str, float]]) -> bool:
    return bool(measured) and sum(measured[-1].values()) > _LONG


def _best(found: Found) -> dict[str, list[float]]:
    """What is shown of each column, at each size."""
    choose = {column: max if column == "collector ms" else min for column in COLUMNS}
    return {
        column: [choose[column](point[column] for point in rounds) for rounds in found.values()]
        for column in COLUMNS
    }


def judge(sizes: list[int], values: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Whether the last two points grow linearly or less."""
    if len(sizes) < 2:
        return []
    verdicts = []
    for column in ("set-up ms", "first ms", "step ms"):
        smaller, larger = values[column][-2:]
        ratio = (larger / smaller) / (sizes[-1] / sizes[-2])
        verdicts.append(
            {
                "row": "fullshard",
                "column": column,
                "against": "linear",
                "ratio": ratio,
                "limit": NOISE,
                "pass": ratio <= NOISE,
            }
        )
    return verdicts


def show(result: dict[str, Any]) -> None:
    fixed = dataclasses.asdict(Point())
    fixed.pop(result["sweep"])
    print(f"\n{result['sweep']} ({', '.join(f'{value} {name}' for name, value in fixed.items())})")
    print(f"{'':24}" + "".join(f"{size:>10,}" for size in result["sizes"]))
    for row, values in result["rows"].items():
        for column in COLUMNS:
            cells = "".join(f"{value:>10.2f}" for value in values[column])
            print(f"{row + ', ' + column:24}{cells}")
    for row, reason in result["skipped"].items():
        print(f"{row}: not measured: {reason}")
    show_verdicts(result["bars"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    for name, sizes in SWEEPS.items():
        parser.add_argument(f"--{name}", type=int, nargs="*", default=sizes)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    given = parser.parse_args()
    workers = {row: Worker(Contestant, row, given.device, given.steps) for row in given.rows}
    results = []
    for name in SWEEPS:
        sizes = getattr(given, name)
        if sizes:
            results.append(sweep(name, sizes, workers, given.rounds))
            show(results[-1])
    for worker in workers.values():
        worker.close()
    if given.json is not None:
        given.json.write_text(json.dumps({"sweeps": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
