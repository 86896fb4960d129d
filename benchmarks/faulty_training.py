"""A training program in which one rank does something wrong, for ``faults.py`` and tests.

Each rank leaves in a folder when it began, when the fault happened, what ended it, and when. With
``--leave-at-once``, ranks end by ``os._exit`` as soon as an error reaches them, as programs do that
clean nothing up.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy, fully_shard
from fullshard.state.checkpoint.storage import Writer
from fullshard.wrap import ModuleWrapPolicy

FAULTS = ("skip", "exception", "kill", "hang", "stop", "leave", "exit", "quit")
#: Where the fault happens: between two steps, or in which part of one.
PLACES = ("loop", "forward", "backward", "optimizer", "evaluation", "save", "write")
#: How the model is sharded.
MODELS = ("wrapper", "fully_shard", "hybrid")
WIDTH, LAYERS = 64, 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.skipped: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index != self.skipped:
                x = layer(x)
        return x.square().mean()


class Diary:
    """What one rank leaves for who started it."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = folder / f"rank{rank}.json"
        self._content: dict[str, Any] = {"pid": os.getpid(), "steps": 0}

    def note(self, **facts: Any) -> None:
        self._content.update(facts)
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(self._content))
        partial.replace(self._file)


class Leaves(Exception):
    """This rank is to leave the training loop."""


def do_wrong(fault: str, model: nn.Module, seconds: float) -> None:
    """Act out ``fault``."""
    if fault == "skip":
        next(each for each in model.modules() if isinstance(each, Layers)).skipped = 1
    elif fault == "exception":
        raise ValueError("this rank's own data")
    elif fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "hang":
        time.sleep(seconds)
    elif fault == "stop":
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "exit":
        sys.exit(0)
    elif fault == "quit":
        os._exit(1)
    elif fault == "leave":
        raise Leaves


class Fault:
    """What one rank does wrong once, in one step."""

    def __init__(self, given: argparse.Namespace, diary: Diary, model: nn.Module) -> None:
        self._given, self._diary, self._model = given, diary, model
        self._is_ours = dist.get_rank() == given.rank_at_fault % dist.get_world_size()
        self.step = 0

    def at(self, place: str) -> None:
        """Do wrong, if this is where it is to happen."""
        if self._is_ours and (place, self.step) == (self._given.where, self._given.fault_step):
            self._is_ours = False
            self._diary.note(fault_at=time.time())
            do_wrong(self._given.fault, self._model, self._given.seconds)

    def in_the_middle_of(self, layer: nn.Module) -> None:
        """Do wrong where ``layer`` runs, in forward or in backward."""

        def watch(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            self.at("forward" if torch.is_grad_enabled() else "evaluation")
            if inputs[0].requires_grad:
                inputs[0].register_hook(lambda _: self.at("backward"))

        layer.register_forward_pre_hook(watch)

    def while_saving(self, model: nn.Module) -> None:
        """Do wrong before the state is collected, or when a rank's part of it is written."""
        write = Writer.write_data

        def write_data(*given: Any) -> Any:
            self.at("write")
            return write(*given)

        Writer.write_data = write_data  # type: ignore[assignment]
        model.register_state_dict_pre_hook(lambda *_: self.at("save"))


def shard(model: nn.Module, how: str) -> nn.Module:
    if how == "fully_shard":
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer)
        return fully_shard(model)
    if how == "hybrid":
        mesh = dist.init_device_mesh(
            next(model.parameters()).device.type,
            (dist.get_world_size() // 2, 2),
            mesh_dim_names=("copies", "shards"),
        )
        return FSDP(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Layer}),
            device_mesh=mesh,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        )
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Layer}))


def train(given: argparse.Namespace, diary: Diary) -> None:
    torch.manual_seed(0)
    device = "cuda" if given.backend == "nccl" else "cpu"
    layers = Layers().to(device)
    model = shard(layers, given.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    fault = Fault(given, diary, model)
    fault.in_the_middle_of(layers.layers[1])
    optimizer.register_step_pre_hook(lambda *_: fault.at("optimizer"))
    fault.while_saving(model)
    data = torch.ones(2, WIDTH, device=device)
    for number in range(given.steps):
        fault.step = number
        fault.at("loop")
        loss = model(data)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if given.sums_losses:
            dist.all_reduce(loss.detach())
        if given.where == "evaluation":
            with torch.no_grad():
                model(data)
        if given.where in ("save", "write"):
            fullshard.save(given.folder / "saved", model, optimizer, step=number)
        loss.item()
        diary.note(steps=number + 1)


def keep_warnings(diary: Diary) -> None:
    """Note the first warning that others are waited for."""
    show = warnings.showwarning

    def showwarning(message: Any, *details: Any, **options: Any) -> None:
        if "has waited" in str(message):
            diary.note(warned=str(message), warned_at=time.time())
        show(message, *details, **options)

    warnings.showwarning = showwarning


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--fault", choices=FAULTS, required=True)
    parser.add_argument("--rank-at-fault", type=int, default=-1)
    parser.add_argument("--fault-step", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--where", choices=PLACES, default="loop")
    parser.add_argument("--model", choices=MODELS, default="wrapper")
    parser.add_argument("--sums-losses", action="store_true", help="with a collective of its own")
    parser.add_argument("--destroys-group", action="store_true", help="however training ends")
    parser.add_argument("--leave-at-once", action="store_true")
    given = parser.parse_args()
    rank = int(os.environ["RANK"])
    diary = Diary(given.folder, rank)
    torch.set_num_threads(1)
    if given.backend == "nccl":
        # Several ranks may share a GPU: NCCL takes them for different hosts.
        os.environ["NCCL_HOSTID"], os.environ["NCCL_SOCKET_IFNAME"] = f"host{rank}", "lo"
        torch.cuda.set_device(rank % torch.cuda.device_count())
    keep_warnings(diary)
    try:
        dist.init_process_group(given.backend)
        try:
            train(given, diary)
        finally:
            if given.destroys_group:
                dist.destroy_process_group()
    except Leaves:
        pass
    except BaseException as error:
        said = "".join(traceback.format_exception_only(error)).strip()
        diary.note(error=said, ended_at=time.time())
        if given.leave_at_once:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        raise
    diary.note(ended_at=time.time())


if __name__ == "__main__":
    main()
