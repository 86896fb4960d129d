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

from fullshard import FullyShardedDataParallel as FSDP
from fullshard.wrap import ModuleWrapPolicy

FAULTS = ("skip", "exception", "kill", "hang", "stop", "leave")
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


def do_wrong(fault: str, model: FSDP, seconds: float) -> bool:
    """Act out ``fault``; whether this rank is to leave the training loop."""
    if fault == "skip":
        model.module.skipped = 1  # type: ignore[assignment]
    elif fault == "exception":
        raise ValueError("this rank's own data")
    elif fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "hang":
        time.sleep(seconds)
    elif fault == "stop":
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    return fault == "leave"


def train(given: argparse.Namespace, diary: Diary) -> None:
    torch.manual_seed(0)
    rank = dist.get_rank()
    device = "cpu"
    if given.backend == "nccl":
        device = "cuda"
    model = FSDP(Layers().to(device), auto_wrap_policy=ModuleWrapPolicy({Layer}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    at_fault = given.rank_at_fault % dist.get_world_size()
    for number in range(given.steps):
        if number == given.fault_step and rank == at_fault:
            diary.note(fault_at=time.time())
            if do_wrong(given.fault, model, given.seconds):
                return
        loss = model(torch.ones(2, WIDTH, device=device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
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
        train(given, diary)
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
