"""A rank that is killed while a checkpoint is saved costs nothing but that checkpoint."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.original.training import Net, build
from tests.state.models import wrapped

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy
from fullshard.testing import RanksFailed, device, run_on_ranks

KILLS = 50 if os.environ.get("FULLSHARD_LONG") else 10
#: What a process does to files, in Python's audit events.
FILE_EVENTS = ("open", "os.", "shutil.")


def make() -> tuple[FSDP, torch.optim.Optimizer]:
    model = wrapped(build(Net), ShardingStrategy.FULL_SHARD, "blocks", use_orig_params=True)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def fill(model: FSDP, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Let every number in the model and in its optimizer tell the step."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
            optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, step)


def check_whole(folder: Path) -> int:
    """Load what there is; everything in it must be of one step, which is returned."""
    model, optimizer = make()
    found = fullshard.load(folder, model, optimizer)
    assert found.extra == {"step": found.step}
    for parameter in (p for p in model.parameters() if p.numel()):
        assert (parameter == found.step).all()
        momentum = optimizer.state[parameter]["momentum_buffer"]
        assert momentum.shape == parameter.shape
        assert (momentum == found.step).all()
    return found.step


def die_at_file_event(number: int) -> None:
    """Die right before this process touches a file for the ``number``-th time from now."""
    seen = [0]

    def watch(event: str, args: Any) -> None:
        if event.startswith(FILE_EVENTS):
            seen[0] += 1
            if seen[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def die_after(seconds: float) -> None:
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


def save_until_killed(folder: Path, victim: int, at_event: int, after: float) -> None:
    """Check what an earlier run left, then save until one of the ranks dies of it."""
    step = check_whole(folder)
    model, optimizer = make()
    dist.barrier()
    if dist.get_rank() == victim:
        if at_event:
            die_at_file_event(at_event)
        else:
            die_after(after)
    while True:
        step += 1
        fill(model, optimizer, step)
        handle = fullshard.save(
            folder,
            model,
            optimizer,
            step=step,
            extra={"step": step},
            keep_last=2,
            asynchronous=step % 2 == 0,
        )
        if dist.get_rank() == 0:
            assert handle.wait().exists()
            # A name, not a content: the rank may be killed between opening and writing.
            (folder.parent / f"reached-{step}").touch()


@pytest.mark.skipif(device().type != "cpu", reason="files are the same whatever computes")
def test_whenever_a_rank_is_killed_the_last_checkpoint_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"

    def start() -> None:
        model, optimizer = make()
        fill(model, optimizer, 1)
        fullshard.save(folder, model, optimizer, step=1, extra={"step": 1})

    run_on_ranks(2, start)
    (tmp_path / "reached-1").touch()
    choose = random.Random(0)
    there = 1
    for kill in range(KILLS):
        victim = choose.randrange(2)
        # The first rank touches some forty files per save, others a few.
        at_event = choose.randrange(1, 90 if victim == 0 else 12) if kill % 2 else 0
        after = choose.uniform(0, 0.3)
        with pytest.raises(RanksFailed, match=f"rank {victim}.*SIGKILL"):
            run_on_ranks(2, save_until_killed, folder, victim, at_event, after, grace=0.1)
        reached = max(int(path.name.split("-")[1]) for path in tmp_path.glob("reached-*"))
        found = fullshard.latest(folder)
        assert found is not None
        # Never back behind what was there or what a save has returned for; one may be ahead.
        there = max(there, reached)
        assert there <= found.step <= there + 1
        there = found.step
    assert run_on_ranks(2, check_whole, folder)[0] >= reached
    assert reached > 10
