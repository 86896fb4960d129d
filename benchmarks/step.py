"""A training step on one device where collectives cost nothing: the bare model against torch's
FSDP1 and FSDP2, Megatron-FSDP (where it is installed) and fullshard.

    PYTHONPATH=src python3 benchmarks/step.py --json step.json
    PYTHONPATH=src python3 benchmarks/step.py --cases 1.34B@8 184M@64 --rows bare FSDP2 fullshard

    PYTHONPATH=src python3 benchmarks/step.py --capture
    PYTHONPATH=src python3 benchmarks/step.py --before ../earlier/src

With --capture, each row is measured twice, eagerly and as one CUDA graph (see docs/capture.md): by
torch.cuda.graph, or for ours by what fullshard.capture does.
With --before, the fullshard in that folder takes its turns beside this one.

A case is a model and a number of ranks, of which this process plays one over a process group
whose collectives return at once (groups.py); with one rank the group is a real one (NCCL, gloo).
bf16 compute, fp32 shards and reduction, fused AdamW. Each row lives in a process of its own,
because some leave memory behind; the processes of a case take turns, round by round, and give
cached memory back after their turn. Columns, medians over rounds: "step ms", time per step of
several in a row; "host ms", time until the host has given out a step to an idle device; peak
memory during the rounds; collectives per step. Times are compared within each round, and the
median of those ratios is what is judged; a host that others use too needs many short rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import gpt
import groups
import llama
import torch
from bars import (
    Bar,
    Row,
    at_most,
    faster_by,
    judge,
    median_by_round,
    quotient,
    show_table,
    show_verdicts,
)
from rows import CapturedTraining, FullshardCapturedTraining, Setting, Training
from time_limit import TimeLimit
from torch import nn
from workers import Worker

AnyTraining = Training | CapturedTraining | FullshardCapturedTraining

PEERS = ("FSDP1", "FSDP2")
ROWS = ["bare", "FSDP1", "FSDP2", "Megatron-FSDP", "fullshard", "fullshard fully_shard"]
#: What is compared with --capture, and how the rows of captured steps are called.
ROWS_TO_CAPTURE = ["bare", "FSDP2", "fullshard", "fullshard fully_shard"]
CAPTURED = " captured"
#: So many rows begin side by side: a device has memory for that, and no time is taken yet.
AT_A_TIME = 5
#: The row of another version of fullshard, and how much slower than that noise may make a row look.
BEFORE = "fullshard before"
NOT_SLOWER = 1.02
COLUMNS = ["step ms", "host ms", "allocated GiB", "reserved GiB", "collectives"]
MEMORY = (
    at_most(1.0, *PEERS, column="allocated GiB"),
    at_most(1.0, *PEERS, column="reserved GiB"),
)
#: The row of the second API, whose peer is torch's, and how much of its time it may take by case.
FULLY_SHARD = "fullshard fully_shard"
OF_FSDP2 = {"1.34B@8": 0.60, "1.34B@64": 0.60, "184M@64": 0.50}
BARS: dict[str, tuple[Bar, ...]] = {
    "1.34B@8": (at_most(0.95, "bare"), faster_by(1.6, *PEERS), *MEMORY),
    "1.34B@64": (at_most(0.95, "bare"), faster_by(1.6, *PEERS), *MEMORY),
    "184M@64": (at_most(1.6, "bare"), faster_by(2.2, *PEERS), *MEMORY),
    "3.5B@64": (at_most(0.97, *PEERS), *MEMORY),
    "1.34B@1": (at_most(1.15, "bare"), *MEMORY),
    "toy@8": (at_most(0.95, "bare"), *MEMORY),
    "toy@1": (at_most(1.15, "bare"), *MEMORY),
}
#: With --capture, each for both of our rows.
CAPTURED_LIMITS: dict[str, dict[str, float]] = {
    "184M@64": {"bare": 1.20, "FSDP2": 0.95},
    "1.34B@8": {"bare": 0.95, "FSDP2": 1.0},
    "llama@8": {"bare": 1.0},
}
#: What a captured step may reserve of an eager one's peak.
CAPTURED_MEMORY = 1.10
GIB = 2**30


def fully_shard_bars(case: str) -> tuple[Bar, ...]:
    """Of the second API: close to the wrapper, faster than torch's, with no more memory."""
    if case not in OF_FSDP2:
        return ()
    return (
        *([at_most(1.08, "fullshard", row=FULLY_SHARD)] if case.startswith("1.34B") else []),
        at_most(OF_FSDP2[case], "FSDP2", row=FULLY_SHARD),
        at_most(1.0, "FSDP2", column="allocated GiB", row=FULLY_SHARD),
        at_most(1.0, "FSDP2", column="reserved GiB", row=FULLY_SHARD),
    )


def captured_bars(case: str) -> tuple[Bar, ...]:
    """Of captured steps beside captured steps, and of eager ones whose host is the limit."""
    bars: list[Bar] = []
    for row in ("fullshard", FULLY_SHARD):
        for other, limit in CAPTURED_LIMITS.get(case, {}).items():
            bars.append(Bar("step ms", limit, (other + CAPTURED,), row + CAPTURED))
        bars.append(Bar("reserved GiB", CAPTURED_MEMORY, (row,), row + CAPTURED))
    if case == "184M@64":
        bars.append(at_most(1.30, "bare"))
    return tuple(bars)


@dataclasses.dataclass(frozen=True)
class Task:
    """What a worker measures."""

    row: str
    case: str
    device: str
    compute: str
    steps: int
    warmup: int
    #: Whether rows are captured beside their eager ones; then all count steps on the device.
    capture: bool

    @property
    def is_captured(self) -> bool:
        return self.row.endswith(CAPTURED)

    @property
    def kind(self) -> str:
        """How rows.py calls the row."""
        return self.row.removesuffix(CAPTURED).removesuffix(" before")

    @property
    def size(self) -> gpt.Size:
        return gpt.SIZES[self.case.split("@")[0]]

    @property
    def ranks(self) -> int:
        return int(self.case.split("@")[1])


class Contestant:
    """One row in this process."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.device = torch.device(task.device, 0) if task.device == "cuda" else torch.device("cpu")
        self.group = groups.Instant(task.ranks) if task.ranks > 1 else None
        if self.group is None:
            groups.install_alone(self.device)
        else:
            groups.install(self.group)
        model, unit, batch = _subject(task.case.split("@")[0], self.device)
        self.parameters = sum(p.numel() for p in model.parameters())
        started = time.perf_counter()
        setting = Setting(unit, getattr(torch, task.compute))
        training = Training(task.kind, model, batch, setting, counts_on_device=task.capture)
        self.training: AnyTraining = training
        if task.is_captured:
            ours = task.kind.startswith("fullshard")
            self.training = (FullshardCapturedTraining if ours else CapturedTraining)(training)
        self._synchronize()
        self.setup = time.perf_counter() - started
        del model

    def warm_up(self) -> dict[str, Any]:
        if self.group is not None:
            self.group.fill = True
        losses = [float(self.training.step()) for _ in range(self.task.warmup)]
        counted = self._collectives()
        if not isinstance(self.training, Training):
            # Once with what fills buffers, which are the graph's own, and then without.
            self.training.capture()
        if self.group is not None:
            self.group.fill = False
        if not isinstance(self.training, Training):
            self.training.capture()
        self.rest()
        return {
            "parameters": self.parameters,
            "set-up s": self.setup,
            "losses": losses,
            "collectives": counted,
        }

    def round(self) -> dict[str, float | None]:
        """Measure one turn; the first step, which gets the memory back and fills it, is not timed.

        A graph kept its memory and what is in it.
        """
        if self.group is not None:
            self.group.fill = isinstance(self.training, Training)
        self.training.step()
        if self.group is not None:
            self.group.fill = False
        self._synchronize()
        started = time.perf_counter()
        self.training.step()
        host = time.perf_counter() - started
        self._synchronize()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        for _ in range(self.task.steps):
            self.training.step()
        self._synchronize()
        step = (time.perf_counter() - started) / self.task.steps
        return {"step ms": 1e3 * step, "host ms": 1e3 * host, **self._memory()}

    def _collectives(self) -> float:
        """Collectives in one step: counted by our group, or seen by the profiler in a real one."""
        if self.group is not None:
            before = self.group.calls
            self.training.step()
            return self.group.calls - before
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            self.training.step()
        return sum(e.count for e in profile.key_averages() if e.key.startswith("c10d::"))

    def _memory(self) -> dict[str, float | None]:
        if self.device.type != "cuda":
            return {"allocated GiB": None, "reserved GiB": None}
        peaks: dict[str, float | None] = {
            "allocated GiB": torch.cuda.max_memory_allocated() / GIB,
            "reserved GiB": torch.cuda.max_memory_reserved() / GIB,
        }
        self.rest()
        return peaks

    def rest(self) -> None:
        """Leave the device's memory to the other rows."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _subject(name: str, device: torch.device) -> tuple[nn.Module, type[nn.Module], torch.Tensor]:
    """A model that returns its loss, the class of its units, and a batch."""
    if name == "llama":
        return llama.build(device), llama.unit(), llama.tokens(device)
    size = gpt.SIZES[name]
    return gpt.build(size, device), gpt.Block, gpt.tokens(size, device)


def measure(case: str, given: argparse.Namespace, limit: TimeLimit) -> dict[str, Any]:
    """All rows of one case, in turns."""
    names = given.rows
    if given.capture:
        names = [name for row in names for name in (row, row + CAPTURED)]
    facts = (case, given.device, given.compute, given.steps, given.warmup, given.capture)
    rows = {name: Worker(Contestant, Task(name, *facts)) for name in names}
    if given.before is not None:
        rows[BEFORE] = Worker(Contestant, Task(BEFORE, *facts), source=given.before)
    table: dict[str, dict[str, Any]] = {}
    skipped: dict[str, str] = {}
    for first in range(0, len(rows), AT_A_TIME):
        side_by_side = [*rows][first : first + AT_A_TIME]
        for name in side_by_side:
            rows[name].tell("warm_up")
        for name in side_by_side:
            answer = rows[name].answer()
            if "skipped" in answer:
                skipped[name] = answer["skipped"]
                rows[name].close()
            else:
                table[name] = {**answer, "rounds": []}
    for _ in limit.rounds(given.rounds):
        for name in [*table]:
            answer = rows[name].ask("round")
            if "skipped" in answer:
                skipped[name] = answer["skipped"]
                del table[name]
            else:
                table[name]["rounds"].append(answer)
    for name in table:
        rows[name].close()
    for values in table.values():
        values.update(_summary(values["rounds"]))
    return {
        "case": case,
        "rows": table,
        "skipped": skipped,
        "bars": _judge(case, table, given.capture),
    }


def _summary(rounds: list[dict[str, float | None]]) -> dict[str, float | None]:
    """Medians of times, peaks of memory."""
    summary: dict[str, float | None] = {}
    for column in rounds[0]:
        values = [value for each in rounds if (value := each[column]) is not None]
        combine = max if column.endswith("GiB") else statistics.median
        summary[column] = combine(values) if values else None
    return summary


def _compare(row: Row, other: Row, column: str) -> float:
    compare = quotient if column.endswith("GiB") else median_by_round
    return compare(row, other, column)


def _judge(
    case: str, table: dict[str, dict[str, Any]], captures: bool = False
) -> list[dict[str, Any]]:
    bars = captured_bars(case) if captures else BARS.get(case, MEMORY)
    bars = (*bars, *fully_shard_bars(case), at_most(NOT_SLOWER, BEFORE))
    verdicts = judge(bars, table, _compare)
    if case.endswith("@1") and "fullshard" in table:
        count = table["fullshard"]["collectives"]
        verdicts.append(
            {
                "row": "fullshard",
                "column": "collectives",
                "against": "(count)",
                "ratio": float(count),
                "limit": 0.0,
                "pass": count == 0,
            }
        )
    return verdicts


def show(result: dict[str, Any]) -> None:
    name, ranks = result["case"].split("@")
    parameters = max((row["parameters"] for row in result["rows"].values()), default=0)
    size = llama.SIZE if name == "llama" else gpt.SIZES[name]
    print(f"\n{name} ({size}; {parameters / 1e6:,.1f} M parameters), {ranks} ranks")
    if result["rows"]:
        show_table(COLUMNS, result["rows"])
    for row, reason in result["skipped"].items():
        print(f"{row}: not measured: {reason}")
    show_verdicts(result["bars"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    cases = ["1.34B@8", "1.34B@64", "184M@64", "3.5B@64", "1.34B@1"] if cuda else ["toy@8", "toy@1"]
    parser.add_argument("--cases", nargs="+", metavar="MODEL@RANKS", help=f"default: {cases}")
    parser.add_argument("--rows", nargs="+", choices=ROWS)
    parser.add_argument("--capture", action="store_true", help="also measure captured steps")
    parser.add_argument(
        "--before", type=Path, metavar="SRC", help="also measure the fullshard in this folder"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    parser.add_argument("--compute", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each row")
    parser.add_argument("--steps", type=int, default=4, help="timed steps in a turn")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the first turn")
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="begin no round after so many"
    )
    given = parser.parse_args()
    given.cases = given.cases or ([*CAPTURED_LIMITS] if given.capture else cases)
    given.rows = given.rows or (ROWS_TO_CAPTURE if given.capture else ROWS)
    device = torch.cuda.get_device_name() if given.device == "cuda" else "CPU, one thread"
    print(f"{device}, torch {torch.__version__}; {given.rounds} rounds of {given.steps} steps")
    results = []
    limit = TimeLimit(given.seconds, len(given.cases))
    for case in given.cases:
        results.append(measure(case, given, limit))
        show(results[-1])
        if given.json is not None:
            facts = {"device": device, "torch": torch.__version__, "cases": results}
            given.json.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
