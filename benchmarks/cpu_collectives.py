"""A training step on real ranks of the CPU, over gloo: fullshard (FULL_SHARD and SHARD_GRAD_OP)
and its fully_shard against the bare model, DistributedDataParallel and torch's FSDP2.

    PYTHONPATH=src python3 benchmarks/cpu_collectives.py --ranks 2 4 --json cpu.json

A GPT of 8 layers and width 384, batch 2x128 on each rank, fp32, fused AdamW, one thread per rank.
Each row has processes of its own, because what a row asks of the host's allocator, others in its
process would profit or suffer from. Rows take turns, round by round; a ratio is the median of the
ratios of neighbours, which share what else the machine does. "held MiB" is what is left allocated
by set-up and some steps, "peak MiB" the most during a step, both counted by torch's allocator.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import gpt
import torch
import torch.distributed as dist
from bars import at_most, judge, show_table, show_verdicts
from rows import Setting, Training
from workers import Team

ROWS = ["bare", "DDP", "FSDP2", "fullshard", "fullshard SHARD_GRAD_OP", "fullshard fully_shard"]
COLUMNS = ["step ms", "x bare", "x DDP", "x FSDP2", "held MiB", "peak MiB"]
GRAD_OP = "fullshard SHARD_GRAD_OP"
MIB = 2**20


class Memory:
    """Bytes that this process allocates for tensors while the context is open.

    The profiler sees only what this thread does, and gloo's threads free memory, too; but each
    of its events tells what all threads hold together.
    """

    def __enter__(self) -> Memory:
        activities = [torch.profiler.ProfilerActivity.CPU]
        self._profile = torch.profiler.profile(activities=activities, profile_memory=True)
        self._profile.__enter__()
        torch.empty(1)
        return self

    def __exit__(self, *exception: Any) -> None:
        gc.collect()
        torch.empty(1)
        self._profile.__exit__(*exception)
        totals = self._totals()
        self.left, self.peak = totals[-1] - totals[0], max(totals) - totals[0]

    def _totals(self) -> list[int]:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            self._profile.export_chrome_trace(file.name)
            events = json.loads(Path(file.name).read_text())["traceEvents"]
        memory = [event for event in events if event.get("name") == "[memory]"]
        memory.sort(key=lambda event: event["ts"])
        return [event["args"]["Total Allocated"] for event in memory]


class Contestant:
    """One rank of a row, in this process."""

    def __init__(self, rank: int, ranks: int, meeting: str, row: str, model: str) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
        self.row = row
        self.size = gpt.SIZES[model]

    def warm_up(self, steps: int) -> dict[str, Any]:
        """Build the model and train a little; what that takes, and the losses on the way."""
        device = torch.device("cpu")
        with Memory() as building:
            setting = Setting(gpt.Block, torch.float32, dist.group.WORLD)
            batch = gpt.tokens(self.size, device)
            model = gpt.build(self.size, device)
            self.training = Training(self.row, model, batch, setting)
            del model
            losses = [float(self.training.step()) for _ in range(2)]
        with Memory() as stepping:
            losses.append(float(self.training.step()))
        losses += [float(self.training.step()) for _ in range(steps)]
        return {
            "held MiB": (building.left + stepping.left) / MIB,
            "peak MiB": (building.left + stepping.peak) / MIB,
            "losses": losses,
        }

    def turn(self, steps: int) -> dict[str, float]:
        """Milliseconds per step."""
        dist.barrier()
        started = time.perf_counter()
        for _ in range(steps):
            self.training.step()
        return {"step ms": 1e3 * (time.perf_counter() - started) / steps}


def measure(ranks: int, given: argparse.Namespace) -> dict[str, Any]:
    teams = {row: Team(Contestant, ranks, row, given.model) for row in given.rows}
    table: dict[str, dict[str, Any]] = {}
    skipped: dict[str, str] = {}
    for row, team in teams.items():
        answer = team.ask("warm_up", given.warmup)
        if "skipped" in answer:
            skipped[row] = answer["skipped"]
        else:
            table[row] = {**answer, "times": []}
    for _ in range(given.rounds):
        for row in [*table]:
            answer = teams[row].ask("turn", given.steps)
            if "skipped" in answer:
                skipped[row] = answer["skipped"]
                del table[row]
            else:
                table[row]["times"].append(answer["step ms"])
    for team in teams.values():
        team.close()
    return {**summarize(table, ranks, given.model), "skipped": skipped}


def summarize(table: dict[str, dict[str, Any]], ranks: int, model: str) -> dict[str, Any]:
    for values in table.values():
        values["step ms"] = statistics.median(values["times"])
        for other in ("bare", "DDP", "FSDP2"):
            if other in table:
                pairs = zip(values["times"], table[other]["times"], strict=True)
                values[f"x {other}"] = statistics.median(a / b for a, b in pairs)
    parameters = sum(p.numel() for p in gpt.GPT(gpt.SIZES[model]).parameters())
    return {
        "ranks": ranks,
        "model": model,
        "parameters MiB": 4 * parameters / MIB,
        "rows": table,
        "bars": judge_speed(table) + judge_memory(table, ranks, 4 * parameters / MIB),
    }


def judge_speed(table: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Bars on ratios of neighbours, which stand in the table."""
    verdicts = []
    for row, other, limit in (
        ("fullshard", "bare", 1.45),
        ("fullshard", "FSDP2", 0.78),
        ("fullshard fully_shard", "FSDP2", 0.80),
        (GRAD_OP, "DDP", 1.0),
    ):
        if row in table and f"x {other}" in table[row]:
            ratio = table[row][f"x {other}"]
            verdicts.append(
                {
                    "row": row,
                    "column": "step ms",
                    "against": other,
                    "ratio": ratio,
                    "limit": limit,
                    "pass": ratio <= limit,
                }
            )
    return verdicts


def judge_memory(
    table: dict[str, dict[str, Any]], ranks: int, parameters: float
) -> list[dict[str, Any]]:
    """Bars on memory, from what DDP holds and how many copies of the parameters are split.

    Between steps parameters and two states of AdamW are; in a step gradients are as well, while
    SHARD_GRAD_OP has whole parameters then. A hundredth is left for what is not split.
    """
    if "DDP" not in table:
        return []
    split = parameters * (1 - 1 / ranks)
    bars = []
    for row, column, copies in (
        ("fullshard", "held MiB", 3),
        ("fullshard", "peak MiB", 3),
        (GRAD_OP, "held MiB", 3),
        (GRAD_OP, "peak MiB", 2),
    ):
        promised = 1.01 - copies * split / table["DDP"][column]
        bars.append(at_most(promised, "DDP", column=column, row=row))
    return judge(tuple(bars), table)


def show(result: dict[str, Any]) -> None:
    size = gpt.SIZES[result["model"]]
    print(
        f"\nGPT of {size} ({result['parameters MiB']:.0f} MiB of parameters); "
        f"{result['ranks']} ranks over gloo, one thread each"
    )
    if result["rows"]:
        show_table(COLUMNS, result["rows"])
    for row, reason in result["skipped"].items():
        print(f"{row}: not measured: {reason}")
    show_verdicts(result["bars"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--model", choices=list(gpt.SIZES), default="cpu")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--rounds", type=int, default=30, help="turns of each row")
    parser.add_argument("--steps", type=int, default=2, help="steps in a turn")
    parser.add_argument("--warmup", type=int, default=2, help="further steps before the first turn")
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    given = parser.parse_args()
    results = []
    for ranks in given.ranks:
        results.append(measure(ranks, given))
        show(results[-1])
        if given.json is not None:
            facts = {"torch": torch.__version__, "runs": results}
            given.json.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
