"""The tuning ladder: `fullshard train` with one technique per row, its speed and its memory.

    PYTHONPATH=src python3 benchmarks/ladder.py --json ladder.json
    PYTHONPATH=src python3 benchmarks/ladder.py --plan     # predicted, for 8 GPUs

Every row is a run of the command, started as a user would start it. The rows take turns, round by
round, and "x first" is the median of the ratios within rounds, because neighbouring runs see the
same load on the machine. A run's tokens per second are those of its fastest step after the third,
in which the trainer measures memory. With --plan nothing is trained: the rows are those of
`fullshard plan` for a GPT of 6.7 billion parameters.
"""

from __future__ import annotations

import argparse
import json
import operator
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

#: What every row trains, on two ranks of a CPU.
MODEL = "--layers 6 --heads 8 --width 512 --sequence 128 --batch 8"
RUN = "--ranks 2 --device cpu --steps 8 --log-every 1 --save-every 0 --sample 0 --schedule constant"
#: What every row plans, for eight GPUs.
SEQUENCES, LENGTH = 32, 2048
PLANNED = (
    "--model 7b --vocabulary 32000 --ranks 8 --device cuda --machine h100 "
    f"--batch {SEQUENCES} --sequence {LENGTH} --precision bfloat16"
)
ROWS = {
    "replicas": "--strategy no_shard",
    "shard gradients and optimizer state": "--strategy shard_grad_op",
    "shard parameters as well": "--strategy full_shard",
    "one unit for the whole model": "--wrap none",
    "recompute activations": "--checkpoint-activations",
    "four smaller batches per step": "--accumulate 4",
    "both": "--checkpoint-activations --accumulate 4",
    "compute in bfloat16": "--precision bfloat16",
}
PLAN_ROWS = {
    "replicas": "--strategy no_shard",
    "shard gradients and optimizer state": "--strategy shard_grad_op",
    "shard parameters as well": "--strategy full_shard",
    "one unit for the whole model": "--wrap none",
    "recompute activations": "--checkpoint-activations",
    "four smaller batches per step": "--accumulate 4",
    "both": "--checkpoint-activations --accumulate 4",
    "both, and shards on the host": "--checkpoint-activations --accumulate 4 --offload",
}
COMMAND = [sys.executable, "-m", "fullshard.cli.main"]


def train(flags: str, folder: Path) -> tuple[float, float]:
    """Train with ``flags``; return tokens per second of the fastest step, and MiB per rank."""
    options = [*MODEL.split(), *RUN.split(), *flags.split()]
    command = [*COMMAND, "train", "--runs", str(folder), "--name", "row", *options]
    subprocess.run(command, check=True, capture_output=True, text=True)
    lines = [json.loads(line) for line in (folder / "row" / "metrics.jsonl").open()]
    return max(line["tokens_per_second"] for line in lines[3:]), lines[-1]["memory_bytes"] / 2**20


def measure(rounds: int, flags_of: dict[str, str]) -> dict[str, dict[str, float]]:
    """Run every row once per round; the first one is what the others are compared with."""
    speeds: dict[str, list[float]] = {row: [] for row in flags_of}
    memory: dict[str, float] = {}
    for number in range(rounds):
        for row, flags in flags_of.items():
            with tempfile.TemporaryDirectory() as folder:
                speed, held = train(flags, Path(folder))
            speeds[row].append(speed)
            memory[row] = max(held, memory.get(row, 0.0))
            print(f"round {number + 1}: {row}: {speeds[row][-1]:,.0f} tokens/s, {held:.0f} MiB")
    first = next(iter(speeds.values()))
    return {
        row: {
            "tokens/s": round(statistics.median(of)),
            "x first": round(statistics.median(map(operator.truediv, of, first)), 2),
            "MiB": round(memory[row]),
        }
        for row, of in speeds.items()
    }


def plan(flags_of: dict[str, str]) -> dict[str, dict[str, float]]:
    """Ask `fullshard plan` for every row."""
    rows = {}
    for row, flags in flags_of.items():
        command = [*COMMAND, "plan", *PLANNED.split(), *flags.split()]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        total = re.search(r"total\s*\W\s*([\d.,]+) (\wiB)", printed)
        assert total is not None, printed
        step = re.search(r"A step takes about ([\d.]+) (ms|s)\b", printed)
        assert step is not None, printed
        unit = {"MiB": 2**-10, "GiB": 1.0, "TiB": 2**10}[total[2]]
        seconds = float(step[1]) * {"ms": 1e-3, "s": 1.0}[step[2]]
        rows[row] = {
            "GiB": float(total[1].replace(",", "")) * unit,
            "tokens/s": float(f"{SEQUENCES * LENGTH / seconds:.3g}"),
        }
        print(f"{row}: {rows[row]}   fullshard plan {PLANNED} {flags}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plan", action="store_true", help="predict; train nothing")
    parser.add_argument("--rows", nargs="+", choices=[*ROWS, *PLAN_ROWS], metavar="ROW")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = PLAN_ROWS if given.plan else ROWS
    flags_of = {row: rows[row] for row in given.rows or rows}
    results = plan(flags_of) if given.plan else measure(given.rounds, flags_of)
    for row, numbers in results.items():
        print(f"| {row} | " + " | ".join(f"{number:,g}" for number in numbers.values()) + " |")
    if given.json is not None:
        given.json.write_text(json.dumps({"model": MODEL, "rows": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
