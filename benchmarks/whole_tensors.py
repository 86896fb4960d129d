"""Muon's step on whole tensors, against AdamW's, and against Muon on gathered full gradients, which
is what people write by hand.

    PYTHONPATH=src python3 benchmarks/whole_tensors.py --json whole_tensors.json
    PYTHONPATH=src python3 benchmarks/whole_tensors.py --cases cpu@2 --networks 0 1

One process plays rank 0 of a case's ranks over a process group whose collectives return at once, or
take the time of a network of some gigabytes per second (groups.py). All rows but the last train one
and the same model, sharded by fully_shard, and take turns, round by round: "none" has no optimizer,
so that "optimizer ms" is a row's step less its. Muon on gathered gradients is there twice: written
for torch's fully_shard with DTensor's own methods, as people do ("Muon by hand"), and on ours with
nothing between Muon and the collective ("Muon gathered"), which shows what is due to Muon alone.
With --wrapper, the model is sharded by the wrapper, whose owners may have no piece of what they
own, and nobody writes Muon by hand. "exposed ms" is how much
longer the optimizer takes over the network than with collectives that return at once. How much rank
0 owns, and the rank that owns most, is printed relative to the mean.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gpt
import groups
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from time_limit import TimeLimit
from torch import nn
from torch.distributed.tensor import distribute_tensor

import fullshard
from fullshard import FullyShardedDataParallel, MixedPrecision
from fullshard.engine.comm.collectives import group_for
from fullshard.wrap import ModuleWrapPolicy

#: Shards a model, which computes in a precision.
Shard = Callable[[Any, torch.dtype], Any]

#: At most this often the whole step of these rows, for Muon on whole tensors.
BY_HAND = "Muon by hand"
BARS = {"AdamW": 1.25, BY_HAND: 0.35}
#: What a step is compared with, too.
SHOWN = [*BARS, "Muon gathered"]
JUDGED = "1.34B@64"


class Both:
    """Two optimizers as one, as people write it."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()


class MuonByHand(torch.optim.Optimizer):
    """Muon whose momentum is sharded, and whose every rank computes every whole update."""

    def __init__(self, parameters: list[Any], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self._step(parameter, group["lr"])

    def _step(self, parameter: Any, lr: float) -> None:
        buffer = self._momentum(parameter, parameter.grad)
        full = parameter.grad.lerp(buffer, 0.95).full_tensor()
        # Every rank has computed it: there is nothing to send.
        update = distribute_tensor(
            orthogonal(full), parameter.device_mesh, parameter.placements, src_data_rank=None
        )
        parameter.mul_(1 - lr * 0.1).add_(update, alpha=-lr)

    def _momentum(self, parameter: Any, gradient: Any) -> Any:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        return state["momentum_buffer"].lerp_(gradient, 0.05)


class MuonGathered(MuonByHand):
    """The same, with local tensors and our collective."""

    def _step(self, parameter: Any, lr: float) -> None:
        local, gradient = parameter._local_tensor, parameter.grad._local_tensor
        buffer = self._momentum(parameter, gradient)
        group = group_for(parameter.device_mesh.get_group(), gradient.device)
        full = gradient.new_empty(parameter.shape)
        group.wait(*group.gather([full], [gradient.lerp(buffer, 0.95)], "by hand"))
        rows = orthogonal(full).chunk(group.size)[group.rank]
        local.mul_(1 - lr * 0.1).add_(rows, alpha=-lr)


def orthogonal(update: torch.Tensor) -> torch.Tensor:
    return torch.optim._muon._zeropower_via_newtonschulz(update, (3.4445, -4.7750, 2.0315), 5, 1e-7)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def muon(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters, lr=1e-4)


def by_hand(kind: type[MuonByHand], model: nn.Module) -> Both:
    """This Muon for the blocks' matrices, AdamW for the rest."""
    named = dict(model.named_parameters())
    matrices = [p for n, p in named.items() if n.startswith("blocks") and p.dim() == 2]
    others = [p for n, p in named.items() if not (n.startswith("blocks") and p.dim() == 2)]
    return Both(kind(matrices, 1e-4), adamw(others))


def optimizers_of(model: nn.Module) -> dict[str, Any]:
    found = {
        "none": Both(),
        "AdamW": adamw(model.parameters()),
        "Muon whole": fullshard.optim.whole(muon, model, adamw),
    }
    if not isinstance(model, FullyShardedDataParallel):
        found["Muon gathered"] = by_hand(MuonGathered, model)
    return found


def sharded(model: Any, compute: torch.dtype, api: Any = fullshard) -> Any:
    policy = api.MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for block in model.blocks:
        api.fully_shard(block, mp_policy=policy)
    return api.fully_shard(model, mp_policy=policy)


def wrapped(model: Any, compute: torch.dtype) -> Any:
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({gpt.Block}),
        mixed_precision=MixedPrecision(param_dtype=compute, reduce_dtype=torch.float32),
        use_orig_params=True,
    )


class Case:
    """A model, its optimizers, and the network, which can be changed."""

    def __init__(self, case: str, device: torch.device, shard: Shard) -> None:
        name, ranks = case.split("@")
        size = gpt.SIZES[name]
        self.device = device
        self.group = groups.Delayed(int(ranks), None, device)
        groups.install(self.group)
        compute = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = shard(gpt.build(size, device), compute)
        self.optimizers = optimizers_of(model)
        self.models: dict[str, Any] = dict.fromkeys(self.optimizers, model)
        if shard is sharded:
            theirs = sharded(gpt.build(size, device), compute, torch.distributed.fsdp)
            self.models[BY_HAND] = theirs
            self.optimizers[BY_HAND] = by_hand(MuonByHand, theirs)
        self.batch = gpt.tokens(size, device)
        self.group.fill = True
        for row in [*self.optimizers] * 2:
            self.step(row)
        self.group.fill = False

    def step(self, row: str) -> None:
        model = self.models[row]
        model(self.batch).backward()
        self.optimizers[row].step()
        for parameter in model.parameters():
            parameter.grad = None

    def milliseconds(self, row: str, steps: int) -> float:
        self.step(row)
        self._synchronize()
        started = time.perf_counter()
        for _ in range(steps):
            self.step(row)
        self._synchronize()
        return 1e3 * (time.perf_counter() - started) / steps

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def measure(
    case: Case, bandwidth: float, rounds: Iterable[int], steps: int
) -> dict[str, list[float]]:
    """Milliseconds per step of each row, by round."""
    case.group.network = groups.Network(bandwidth) if bandwidth else None
    times: dict[str, list[float]] = {row: [] for row in case.optimizers}
    for _ in rounds:
        for row in case.optimizers:
            times[row].append(case.milliseconds(row, steps))
    return times


def summary(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    def median(ratio: Callable[[float, float], float], row: str, other: str) -> float:
        return statistics.median(map(ratio, times[row], times[other]))

    return {
        row: {
            "step ms": statistics.median(times[row]),
            "optimizer ms": median(lambda a, b: a - b, row, "none"),
            **{f"x {o}": median(lambda a, b: a / b, row, o) for o in SHOWN if o in times},
        }
        for row in times
    }


def show(case: str, bandwidth: float, rows: dict[str, dict[str, float]]) -> None:
    network = f"{bandwidth:g} GB/s" if bandwidth else "collectives that return at once"
    print(f"\n{case}, {network}")
    for row, values in rows.items():
        print(f"  {row:14}" + "".join(f"{key:>16} {value:8.3f}" for key, value in values.items()))
    if case == JUDGED:
        for other, limit in BARS.items():
            if other not in rows:
                continue
            found = rows["Muon whole"][f"x {other}"]
            print(f"  {'pass' if found <= limit else 'MISS'}  {found:.2f} x {other} (bar {limit})")


def shares(optimizer: Any, ranks: int) -> tuple[float, float]:
    """What rank 0 owns, and the rank that owns most, relative to the mean."""
    owned = [0] * ranks
    for one in optimizer._rounds:
        for each in one.parameters:
            owned[each.owner] += each.numel
    mean = sum(owned) / ranks
    return owned[0] / mean, max(owned) / mean


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=["1.34B@8", "1.34B@64"])
    parser.add_argument(
        "--networks", nargs="+", type=float, default=[0, 400, 100], help="GB/s; 0: at once"
    )
    parser.add_argument("--wrapper", action="store_true", help="shard by the wrapper")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each row")
    parser.add_argument("--steps", type=int, default=5, help="steps in a turn")
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="begin no round after so many"
    )
    given = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    results: dict[str, Any] = {}
    limit = TimeLimit(given.seconds, len(given.cases) * len(given.networks))
    for name in given.cases:
        case = Case(name, device, wrapped if given.wrapper else sharded)
        first, most = shares(case.optimizers["Muon whole"], case.group.size())
        print(f"\n{name}: rank 0 owns {first:.2f} x the mean, the most loaded rank {most:.2f} x")
        found: dict[float, dict[str, dict[str, float]]] = {}
        for bandwidth in given.networks:
            rounds = limit.rounds(given.rounds)
            rows = summary(measure(case, bandwidth, rounds, given.steps))
            at_once = found.get(0, {})
            for row in at_once:
                exposed = rows[row]["optimizer ms"] - at_once[row]["optimizer ms"]
                rows[row]["exposed ms"] = exposed
            found[bandwidth] = rows
            show(name, bandwidth, rows)
        results[name] = found
        del case
        dist.destroy_process_group()
    if given.json is not None:
        facts = {"torch": torch.__version__, "results": results}
        given.json.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
