"""What a trace costs, and how much of a step it accounts for.

    PYTHONPATH=src python3 benchmarks/trace.py --json trace.json
    PYTHONPATH=src python3 benchmarks/trace.py --case cpu --ranks 2 --page trace.html

Plain and traced steps alternate, on real ranks: over gloo on the CPU, or over NCCL with a GPU for
each rank. "cost" is the median of the ratios of neighbouring rounds. "accounted for" is the part of
a step that is a unit's or the optimizer's; "of the peak" compares the largest memory that the trace
saw with the allocator's own peak.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import gpt
import torch
import torch.distributed as dist
from rows import Setting, Training
from workers import run_ranks

import fullshard
from fullshard.cli.planner.measure import watch_step
from fullshard.tracing.analysis import accounted_for
from fullshard.tracing.report import peak_of


def measure(rank: int, ranks: int, given: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    cuda = given.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=ranks,
    )
    size = gpt.SIZES[given.case]
    dtype = torch.bfloat16 if cuda else torch.float32
    training = Training(
        "fullshard", gpt.build(size, device), gpt.tokens(size, device), Setting(gpt.Block, dtype)
    )
    for _ in range(given.warmup):
        training.step()
    ratios = []
    for turn in range(given.rounds):
        seconds = {}
        for traced in (True, False) if turn % 2 else (False, True):
            seconds[traced] = _round(training, given.steps, device, traced)
        ratios.append(seconds[True] / seconds[False])
    with fullshard.trace(
        training.model, training.optimizer, path=given.page, steps=given.steps
    ) as trace:
        for _ in range(given.steps):
            if given.slow and rank == ranks - 1:
                time.sleep(given.slow)
            training.step()
    own = trace.data.ranks[0]
    state = [t for s in training.optimizer.state.values() for t in s.values()]
    resting = [*training.model.parameters(), *filter(torch.is_tensor, state)]
    with watch_step(device, resting) as measured:
        training.step()
    peak = peak_of(own)
    if rank == 0:
        result = {
            "case": given.case,
            "ranks": ranks,
            "device": given.device,
            "cost": statistics.median(ratios),
            "quartiles": statistics.quantiles(ratios, n=4),
            "accounted for": accounted_for(own),
            "of the peak": peak.total / measured.peak if peak and measured.peak else None,
            "summary": trace.summary(),
        }
        Path(folder, "results.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def _round(training: Training, steps: int, device: torch.device, traced: bool) -> float:
    trace = fullshard.trace(training.model, training.optimizer)
    if traced:
        trace.start()
    dist.barrier()
    started = time.perf_counter()
    for _ in range(steps):
        training.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    trace.stop()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("--case", choices=[*gpt.SIZES], default="1.34B" if cuda else "cpu")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--slow", type=float, help="seconds that the last rank sleeps in a step")
    parser.add_argument("--page", type=Path, help="write the trace's page to this file")
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(measure, given.ranks, given, folder)
        result: dict[str, Any] = json.loads(Path(folder, "results.json").read_text())
    print(result.pop("summary"))
    for name, value in result.items():
        print(f"{name:14} {value}")
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=2) + os.linesep)


if __name__ == "__main__":
    main()
