"""Where the host's time goes in a step of fullshard: time per phase of a unit's life, beside the
time that the bare model's step takes.

    PYTHONPATH=src python3 benchmarks/profile_step.py --case 184M@64 --json profile.json
    PYTHONPATH=src python3 benchmarks/profile_step.py --case cpu@2 --gloo

Clocks around fullshard's functions count, for each, the time not spent in another clocked
function. Over the instant group (groups.py) collectives cost nothing, and what is left on a GPU is
the host's time to give a step out; with --gloo as many real ranks of the CPU run, and waiting
for collectives counts as "gather: wait" and "reduce: collective". Clocked and plain steps
alternate, so that the clocks' own cost can be seen.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpt
import groups
import torch
import torch.distributed as dist
from rows import Setting, Training
from workers import run_ranks

#: Phases in the order of a unit's life, and the functions that make them up.
PHASES: dict[str, tuple[str, ...]] = {
    "wrapper": ("fsdp:FullyShardedDataParallel._run",),
    "cast inputs": ("fsdp:FullyShardedDataParallel._adapt_inputs",),
    "begin pass": (
        "engine.runtime.forward:Schedule._begin_pass",
        "engine.runtime.unit:Unit.begin_pass",
    ),
    "schedule, forward": (
        "engine.runtime.forward:Schedule.begin_forward",
        "engine.runtime.forward:Schedule.end_forward",
    ),
    "hook outputs": ("engine.runtime.outputs:hook_entries",),
    "look for other outputs": (
        "engine.runtime.outputs:entries",
        "engine.runtime.outputs:SideOutputs.watch",
        "engine.runtime.outputs:SideOutputs.made_since",
        "engine.runtime.forward:Schedule._ask_inputs",
    ),
    "write-back check": ("engine.runtime.unit:Unit.write_back",),
    "unshard: streams": ("engine.runtime.unit:Unit.start_unshard",),
    "unshard: allocate, cast": ("engine.runtime.unit:Unit._fill",),
    "unshard: all-gather": (
        "engine.comm.collectives:Group.gather",
        "engine.comm.gloo:GlooGroup.gather",
    ),
    "unshard: wait": ("engine.runtime.unit:Unit._wait",),
    "unshard: finish": ("engine.runtime.unit:Unit.finish_unshard",),
    "agree": ("engine.comm.collectives:Group.agree", "engine.comm.collectives:Group.begin_pass"),
    "show full": ("engine.runtime.unit:Unit.show_full",),
    "show sharded": ("engine.runtime.unit:Unit.show_sharded",),
    "node": (
        "engine.runtime.unit:Unit.show_full_for_forward",
        "engine.runtime.unit:Unit._tracked",
    ),
    "reshard": (
        "engine.runtime.unit:Unit.reshard",
        "engine.runtime.residency:UnshardedUnits.reshard",
    ),
    "schedule, backward": (
        "engine.runtime.backward:Backward.on_output_gradient",
        "engine.runtime.backward:Backward._on_gradients",
        "engine.runtime.backward:Backward._take_gradients",
        "engine.runtime.backward:Backward._prefetch",
        "engine.runtime.backward:Backward._carry_out_reduce",
        "engine.runtime.backward:Backward._close",
    ),
    "stage": ("engine.grads.reduction:Reduction.stage", "engine.grads.gradients:stage"),
    "reduce: streams": (
        "engine.grads.reduction:Reduction.reduce",
        "engine.grads.reduction:Reduction.give_out",
        "engine.grads.reduction:Reduction.take_in",
        "engine.grads.reduction:Reduction.start",
        "engine.grads.reduction:Reduction.finish",
        "engine.grads.reduction:Reduction.free_buffers",
    ),
    "reduce: average": (
        "engine.grads.gradients:start_reduce",
        "engine.grads.gradients:Reducing.finish",
    ),
    "reduce: collective": (
        "engine.comm.collectives:Group.start_reduce_scatter",
        "engine.comm.gloo:GlooGroup.start_reduce_scatter",
        "engine.comm.gloo:GlooGroup._add_up",
        "engine.comm.collectives:Group.start_all_reduce",
        "engine.comm.collectives:Group.all_reduce",
    ),
    "deliver": (
        "engine.grads.gradients:deliver",
        "engine.grads.gradients:UnreducedGradients.deliver",
    ),
    "end of backward": (
        "engine.runtime.backward:Backward._finish",
        "engine.runtime.backward:Backward._finish_reduces",
        "engine.runtime.backward:Backward._end",
        "engine.grads.reduction:Reduction.settle",
        "engine.grads.user_hooks:_run_hooks",
    ),
}
FORWARD, BACKWARD, OPTIMIZER = "model: forward", "model: backward", "optimizer"


@dataclasses.dataclass
class Total:
    seconds: float = 0.0
    calls: int = 0


class Clocks:
    """Time spent in clocked functions, less that in those they call.

    One stack serves all threads: while autograd's thread runs a backward, the one that asked for
    it waits.
    """

    def __init__(self) -> None:
        self.running = False
        self.totals: dict[str, Total] = {}
        self.missing: list[str] = []
        self._inner = [0.0]

    def clocked(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        total = self.totals.setdefault(phase, Total())
        now, inner = time.perf_counter, self._inner

        def run(*args: Any, **kwargs: Any) -> Any:
            if not self.running:
                return function(*args, **kwargs)
            inner.append(0.0)
            started = now()
            try:
                return function(*args, **kwargs)
            finally:
                spent = now() - started
                total.seconds += spent - inner.pop()
                total.calls += 1
                inner[-1] += spent

        return run

    def attach(self) -> None:
        """Put clocks around all phases; before a model is wrapped, which binds some of them."""
        for module in (gpt.GPT, gpt.Block):
            module.forward = self.clocked(FORWARD, module.forward)  # type: ignore[method-assign]
        for phase, targets in PHASES.items():
            for target in targets:
                self._attach(phase, target)

    def _attach(self, phase: str, target: str) -> None:
        path, name = target.split(":")
        try:
            owner: Any = importlib.import_module(f"fullshard.{path}")
            *parents, last = name.split(".")
            for parent in parents:
                owner = getattr(owner, parent)
            setattr(owner, last, self.clocked(phase, getattr(owner, last)))
        except (ImportError, AttributeError):
            # The engine has changed; its time is counted where the function was called from.
            self.missing.append(target)


class Clocked(Training):
    """A training whose own parts are clocked, too."""

    def attach(self, clocks: Clocks) -> None:
        self._backward = clocks.clocked(BACKWARD, torch.Tensor.backward)
        self._update = clocks.clocked(OPTIMIZER, self._optimize)

    def _optimize(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(self.batch)
        self._backward(loss)
        self._update()
        return loss.detach()


def profile(
    case: str, device: torch.device, given: argparse.Namespace, group: groups.Instant | None
) -> dict[str, Any]:
    """Host time per step by phase; the default process group is there already."""
    size = gpt.SIZES[case.split("@")[0]]
    setting = Setting(gpt.Block, getattr(torch, given.compute))
    clocks = Clocks()
    batch = gpt.tokens(size, device)
    bare = Training("bare", gpt.build(size, device), batch, setting)
    clocks.attach()
    training = Clocked(given.row, gpt.build(size, device), batch, setting)
    training.attach(clocks)
    if group is not None:
        group.fill = True
    for _ in range(given.warmup):
        bare.step(), training.step()
    if group is not None:
        group.fill = False
    times: dict[str, list[float]] = {"bare": [], "plain": [], "clocked": []}
    for _ in range(given.steps):
        times["bare"].append(_host_ms(bare, device))
        times["plain"].append(_host_ms(training, device))
        clocks.running = True
        times["clocked"].append(_host_ms(training, device))
        clocks.running = False
    return {
        "case": case,
        "row": given.row,
        "units": size.layers + 1,
        "host ms": {name: statistics.median(values) for name, values in times.items()},
        "mean clocked ms": statistics.mean(times["clocked"]),
        "phases": {
            phase: {
                "ms": 1e3 * total.seconds / given.steps,
                "calls": total.calls / given.steps,
            }
            for phase, total in clocks.totals.items()
        },
        "missing": clocks.missing,
    }


def _host_ms(training: Training, device: torch.device) -> float:
    """Time until the host has given out a step to an idle device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    elif dist.get_world_size() > 1 and dist.get_backend() == "gloo":
        dist.barrier()
    started = time.perf_counter()
    training.step()
    return 1e3 * (time.perf_counter() - started)


def over_gloo(rank: int, ranks: int, given: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks
    )
    result = profile(given.case, torch.device("cpu"), given, None)
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def measure(given: argparse.Namespace) -> dict[str, Any]:
    ranks = int(given.case.split("@")[1])
    if given.gloo:
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(over_gloo, ranks, given, folder)
            result: dict[str, Any] = json.loads(Path(folder, "results.json").read_text())
            return result
    torch.set_num_threads(1)
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device("cpu")
    group = groups.Instant(ranks) if ranks > 1 else None
    if group is None:
        groups.install_alone(device)
    else:
        groups.install(group)
    return profile(given.case, device, given, group)


def show(result: dict[str, Any]) -> None:
    host, whole, units = result["host ms"], result["mean clocked ms"], result["units"]
    print(
        f"{result['row']}, {result['case']}, {units} units; host ms per step: bare model "
        f"{host['bare']:.2f}, fullshard {host['plain']:.2f}, with clocks {host['clocked']:.2f}"
    )
    print(
        f"{'phase':26}{'calls':>8}{'ms a step':>12}{'us a unit':>12}{'us a call':>12}{'share':>8}"
    )
    own = 0.0
    for phase, each in result["phases"].items():
        if not each["calls"]:
            continue
        if phase not in (FORWARD, BACKWARD, OPTIMIZER):
            own += each["ms"]
        print(
            f"{phase:26}{each['calls']:>8.0f}{each['ms']:>12.3f}{1e3 * each['ms'] / units:>12.1f}"
            f"{1e3 * each['ms'] / each['calls']:>12.2f}{each['ms'] / whole:>8.1%}"
        )
    print(f"{'fullshard, in all':26}{'':8}{own:>12.3f}{1e3 * own / units:>12.1f}", end="")
    print(f"{'':12}{own / whole:>8.1%}")
    if result["missing"]:
        print("not in this version of the engine: " + ", ".join(result["missing"]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("--case", default="184M@64" if cuda else "toy@8", metavar="MODEL@RANKS")
    parser.add_argument("--row", choices=["fullshard", "fullshard SHARD_GRAD_OP"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    parser.add_argument("--compute", choices=["bfloat16", "float32"])
    parser.add_argument("--gloo", action="store_true", help="real ranks of the CPU over gloo")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    given = parser.parse_args()
    given.row = given.row or "fullshard"
    given.compute = given.compute or ("float32" if given.gloo else "bfloat16")
    result = measure(given)
    show(result)
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
