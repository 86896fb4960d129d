"""An optimizer's step over what fully_shard keeps, against the same step over plain tensors.

    PYTHONPATH=src python3 benchmarks/optimizer_step.py --json optimizer.json

A GPT on rank 0 of some ranks that a process group plays: a step communicates nothing. The
plain tensors are the local parts of the DTensors, with the same gradients. Contestants take turns,
round by round; a ratio is the median of the ratios of neighbours.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import gpt
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import fullshard

#: At most this often the time of the step over plain tensors.
BAR = 1.15
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "AdamW foreach": (torch.optim.AdamW, {"foreach": True}),
    "SGD foreach": (torch.optim.SGD, {"foreach": True, "momentum": 0.9}),
}


def sharded(api: Any, size: Any, device: torch.device) -> list[Any]:
    model = gpt.build(size, device)
    for module in model.modules():
        if isinstance(module, gpt.Block):
            api.fully_shard(module)
    api.fully_shard(model)
    return list(model.parameters())


def with_gradients(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return parameters


def seconds(optimizer: torch.optim.Optimizer, steps: int, device: torch.device) -> float:
    started = time.perf_counter()
    for _ in range(steps):
        optimizer.step()
    if device.type != "cpu":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / steps


def measure(name: str, given: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    kind, options = OPTIMIZERS[name]
    size = gpt.SIZES[given.model]
    ours = sharded(fullshard, size, device)
    plain = [nn.Parameter(parameter.to_local().detach().clone()) for parameter in ours]
    contestants = {
        "plain": plain,
        "fully_shard": ours,
        "FSDP2": sharded(torch.distributed.fsdp, size, device),
    }
    optimizers = {
        row: kind(with_gradients(parameters), lr=1e-4, **options)
        for row, parameters in contestants.items()
    }
    times: dict[str, list[float]] = {row: [] for row in contestants}
    for optimizer in optimizers.values():
        seconds(optimizer, 2, device)
    for _ in range(given.rounds):
        for row, optimizer in optimizers.items():
            times[row].append(1e3 * seconds(optimizer, given.steps, device))
    return {
        row: {
            "step ms": statistics.median(each),
            "x plain": statistics.median(a / b for a, b in zip(each, times["plain"], strict=True)),
        }
        for row, each in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(gpt.SIZES), default="cpu")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=30, help="turns of each row")
    parser.add_argument("--steps", type=int, default=4, help="steps in a turn")
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=given.ranks)
    results = {name: measure(name, given, device) for name in OPTIMIZERS}
    dist.destroy_process_group()
    for name, rows in results.items():
        print(f"\n{name}, rank 0 of {given.ranks}")
        for row, values in rows.items():
            print(f"  {row:12} {values['step ms']:9.3f} ms  {values['x plain']:6.2f} x plain")
        ratio = rows["fully_shard"]["x plain"]
        print(f"  {'pass' if ratio <= BAR else 'MISS'}  {ratio:.2f} x plain (bar {BAR})")
    if given.json is not None:
        facts = {"torch": torch.__version__, "results": results}
        given.json.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
