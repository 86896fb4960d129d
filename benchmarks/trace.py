"""What a trace costs, and how much of a step it accounts for.

    PYTHONPATH=src python3 benchmarks/trace.py --json trace.json
    PYTHONPATH=src python3 benchmarks/trace.py --case cpu --ranks 2 --page trace.html
    PYTHONPATH=src python3 benchmarks/trace.py --simulate 64 --bandwidth 100 --page trace.html

Plain and traced steps alternate, on real ranks: over gloo on the CPU, or over NCCL with a GPU for
each rank. With --simulate, one process plays rank 0 of as many over a network of some gigabytes per
second (groups.py). "cost" is the median of the ratios of neighbouring rounds. "accounted for" is
the part of a step that is a unit's or the optimizer's; "of the peak" compares the largest memory
that the trace saw with the allocator's own peak. "of the profiler's" compares, on a GPU, the time
in which the trace saw something compute with the time in which torch's profiler saw kernels run, or
less than GAP pass between two of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import gpt
import groups
import torch
import torch.distributed as dist
from rows import Setting, Training
from workers import run_ranks

import fullshard
from fullshard.cli.planner.measure import watch_step
from fullshard.tracing.analysis import accounted_for, seconds_by_kind
from fullshard.tracing.output import write
from fullshard.tracing.records import RankTrace, What
from fullshard.tracing.report import peak_of

#: What a trace says of a device that computes.
COMPUTING = (What.FORWARD, What.BACKWARD, What.COPY, What.OPTIMIZER, What.OUTSIDE)
#: Microseconds for which a device that goes from one kernel to the next may do nothing.
GAP = 20.0
#: Kernels that communicate, or play a network, and compute nothing.
MOVING = ("nccl", "memcpy", "memset")


def measure(rank: int, ranks: int, given: argparse.Namespace, folder: str) -> None:
    """What a rank of several real ones does."""
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
    training = _training(given.case, device)
    trace, found = _traced(training, given, device, sleeps=rank == ranks - 1, page=given.page)
    if rank == 0:
        result = {"case": given.case, "ranks": ranks, "device": given.device, **found}
        result["summary"] = trace.summary()
        Path(folder, "results.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def simulate(given: argparse.Namespace) -> dict[str, Any]:
    """Rank 0 of many, over a network that is played."""
    torch.set_num_threads(1)
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device("cpu")
    network = groups.Network(given.bandwidth)
    group = groups.Delayed(given.simulate, network, device)
    groups.install(group)
    # Ranks tell each other their traces, and all of them tell what this one does.
    group.facts_limit = 2**30
    training = _training(given.case, device)
    group.fill = True
    training.step()
    group.fill = False
    trace, found = _traced(training, given, device, sleeps=False, page=None)
    if given.page is not None:
        facts = {"ranks": f"rank 0 of {given.simulate}, network of {given.bandwidth:g} GB/s played"}
        data = dataclasses.replace(
            trace.data,
            ranks=trace.data.ranks[:1],
            summaries=trace.data.summaries[:1],
            facts={**trace.data.facts, **facts},
        )
        write(data, given.page)
    return {
        "case": given.case,
        "ranks": given.simulate,
        "device": given.device,
        **found,
        "summary": trace.summary(),
    }


def _training(case: str, device: torch.device) -> Training:
    size = gpt.SIZES[case]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    setting = Setting(gpt.Block, dtype)
    return Training("fullshard", gpt.build(size, device), gpt.tokens(size, device), setting)


def _traced(
    training: Training, given: argparse.Namespace, device: torch.device, sleeps: bool, page: Any
) -> tuple[fullshard.Trace, dict[str, Any]]:
    """A trace of some steps, and how it compares with clocks, allocator and profiler."""
    for _ in range(given.warmup):
        training.step()
    ratios = []
    for turn in range(given.rounds):
        seconds = {}
        for traced in (True, False) if turn % 2 else (False, True):
            seconds[traced] = _round(training, given.steps, device, traced)
        ratios.append(seconds[True] / seconds[False])
    with fullshard.trace(training.model, training.optimizer, path=page, steps=given.steps) as trace:
        for _ in range(given.steps):
            if given.slow and sleeps:
                time.sleep(given.slow)
            training.step()
    own = trace.data.ranks[0]
    state = [t for s in training.optimizer.state.values() for t in s.values()]
    resting = [*training.model.parameters(), *filter(torch.is_tensor, state)]
    with watch_step(device, resting) as measured:
        training.step()
    peak = peak_of(own)
    return trace, {
        "cost": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios,
        "accounted for": accounted_for(own),
        "of the peak": peak.total / measured.peak if peak and measured.peak else None,
        "of the profiler's": _beside_profiler(training, own, given.steps, device),
    }


def _beside_profiler(
    training: Training, own: RankTrace, steps: int, device: torch.device
) -> float | None:
    """How long the trace says that the device computes, relative to its kernels."""
    if device.type != "cuda":
        return None
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(steps):
            training.step()
        torch.cuda.synchronize()
    kernels = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type is torch.autograd.DeviceType.CUDA
        and not any(word in event.name.lower() for word in MOVING)
    )
    by_kind = seconds_by_kind(own)
    traced = sum(by_kind.get(what, 0.0) for what in COMPUTING)
    return 1e6 * steps * traced / _covered(kernels)


def _covered(kernels: list[tuple[float, float]]) -> float:
    """How long any of them ran; they are in the order of their starts, in microseconds."""
    covered, until = 0.0, -math.inf
    for start, end in kernels:
        if start - until < GAP:
            start = until
        covered += max(0.0, end - start)
        until = max(until, end)
    return covered


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


def _on_real_ranks(given: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(measure, given.ranks, given, folder)
        result: dict[str, Any] = json.loads(Path(folder, "results.json").read_text())
    return result


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
    parser.add_argument("--simulate", type=int, metavar="RANKS", help="play rank 0 of so many")
    parser.add_argument("--bandwidth", type=float, default=100.0, help="GB/s, with --simulate")
    parser.add_argument("--slow", type=float, help="seconds that the last rank sleeps in a step")
    parser.add_argument("--page", type=Path, help="write the trace's page to this file")
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    given = parser.parse_args()
    result = simulate(given) if given.simulate else _on_real_ranks(given)
    print(result.pop("summary"))
    for name, value in result.items():
        print(f"{name:18} {value}")
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=2) + os.linesep)


if __name__ == "__main__":
    main()
