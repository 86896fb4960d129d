"""What the agreement of ranks on the order of operations costs in a healthy run.

    python benchmarks/order_check.py [--steps 30] [--json results.json]

Ranks of the CPU, over gloo, train two equal models in turn, a step of the one and a step of the
other: one with the check, one without (FULLSHARD_ORDER_CHECK=0). Each has a process group of its
own, since a group is set up with or without the check when it is first used.
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

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import torch.nn.functional as F
from torch import nn

from fullshard import FullyShardedDataParallel as FSDP
from fullshard.engine.comm.agreements import SWITCH
from fullshard.engine.comm.announcement import announcements_of
from fullshard.engine.comm.order_check import Agreement, Operation
from fullshard.wrap import ModuleWrapPolicy

LAYERS, WIDTH, HEADS, TOKENS, BATCH, LENGTH = 8, 384, 6, 512, 2, 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, width // HEADS)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


class Training:
    """One model with its optimizer and process group, and the times of its steps."""

    def __init__(self, checked: bool) -> None:
        os.environ[SWITCH] = "1" if checked else "0"
        torch.manual_seed(0)
        group = dist.new_group(list(range(dist.get_world_size())))
        self.model = FSDP(
            GPT(),
            process_group=group,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.tokens = torch.randint(TOKENS, (BATCH, LENGTH))
        self.times: list[float] = []

    def step(self) -> None:
        dist.barrier()
        started = time.perf_counter()
        self.model(self.tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.times.append(1e3 * (time.perf_counter() - started))


def settling_time(count: int = 200_000) -> float:
    """Microseconds that it takes to agree on one operation that is known already."""
    agreement = Agreement(dist.HashStore(), 0, 1)
    order = agreement.order
    operation = Operation("gather", "blocks.0", 1000)
    cycle = [Operation("forward", "root"), *[operation] * 25]
    for _ in range(3):
        for each in cycle:
            agreement.check(each, begins_pass=each.verb == "forward")
    started = time.perf_counter()
    for number in range(count):
        each = cycle[number % len(cycle)]
        # As Group.agree does.
        expected = order.position.following
        if expected.operation == each:
            order.position = expected
        else:
            agreement.check(each, begins_pass=each.verb == "forward")
    return 1e6 * (time.perf_counter() - started) / count


def announcing_time(group: Any, count: int = 300) -> float:
    """Microseconds that it takes the first rank to announce one operation that is new."""
    announcements = announcements_of(group)
    assert announcements is not None
    for number in range(20):
        announcements.of_first(number, lambda work: work.wait())
    dist.barrier()
    started = time.perf_counter()
    for number in range(count):
        announcements.of_first(number, lambda work: work.wait())
    return 1e6 * (time.perf_counter() - started) / count


def operations_per_step(training: Training) -> int:
    agreement: Any = training.model._unit.shards._agreement
    return int(agreement.order.count) // len(training.times)


def measure(rank: int, ranks: int, steps: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks
    )
    trainings = {"with": Training(checked=True), "without": Training(checked=False)}
    for number in range(steps + 3):
        # In turn, and each the first one every other time.
        order = list(trainings.values())
        for training in order if number % 2 else reversed(order):
            training.step()
    announcing = announcing_time(dist.group.WORLD)
    if rank == 0:
        results: dict[str, Any] = {
            name: summary(training.times[3:]) for name, training in trainings.items()
        }
        pairs = zip(trainings["with"].times[3:], trainings["without"].times[3:], strict=True)
        # Neighbours share what else the machine does; so their ratio is steadier than the medians'.
        results["ratio"] = statistics.median(one / other for one, other in pairs)
        results["operations"] = operations_per_step(trainings["with"])
        results["announce_us"] = announcing
        results["settle_us"] = settling_time()
        results["ranks"], results["steps"] = ranks, steps
        Path(folder, "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def summary(times: list[float]) -> dict[str, float]:
    first, median, third = statistics.quantiles(times, n=4)
    return {"first quartile": first, "median": median, "third quartile": third}


def show(results: dict[str, Any]) -> None:
    print(
        f"GPT of {LAYERS} layers, width {WIDTH}, batch {BATCH} x {LENGTH}; "
        f"{results['ranks']} ranks over gloo, {results['steps']} steps each, in turn"
    )
    print(f"{'ms per step':16}{'first quartile':>16}{'median':>10}{'third quartile':>16}")
    for name in ("with", "without"):
        low, median, high = results[name].values()
        print(f"{name + ' check':16}{low:>16.1f}{median:>10.1f}{high:>16.1f}")
    print(f"ratio of neighbouring steps, median: {results['ratio']:.3f}")
    each, count = results["settle_us"], results["operations"]
    print(f"{count} operations per step, {each:.2f} µs to agree on each: {count * each:.0f} µs")
    print(f"{results['announce_us']:.0f} µs to announce an operation that is new")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(measure, args=(given.ranks, given.steps, folder), nprocs=given.ranks)
        results = json.loads(Path(folder, "results.json").read_text())
    show(results)
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
