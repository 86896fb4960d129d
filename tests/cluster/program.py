"""What ranks run in these tests: a small sharded model, on data that follows from the step.

``program.py FOLDER STRATEGY STEPS [seconds per step] [steps per checkpoint]``. Rank 0 appends the
loss of each step to ``FOLDER/losses``. Goes on from the newest checkpoint in the folder.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard.wrap import ModuleWrapPolicy

WIDTH, ROWS = 16, 8


class Block(nn.Module):
    """One unit."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def build_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 3))


def batch_of(step: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def main(folder: Path, strategy: str, steps: int, seconds: float, save_every: int) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = fullshard.FullyShardedDataParallel(
        build_model(),
        sharding_strategy=fullshard.ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    checkpoints = folder / "checkpoints"
    found = fullshard.resume(checkpoints, model, optimizer)
    done = found.step if found is not None else 0
    for step in range(done + 1, steps + 1):
        rows = batch_of(step).chunk(ranks)[rank]
        loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        if rank == 0:
            with (folder / "losses").open("a") as file:
                file.write(f"{step} {mean.item() / ranks!r}\n")
        if save_every and step % save_every == 0:
            fullshard.save(checkpoints, model, optimizer, step=step, keep_last=2)
        time.sleep(seconds)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        sys.argv[2],
        int(sys.argv[3]),
        float(sys.argv[4]) if len(sys.argv) > 4 else 0.0,
        int(sys.argv[5]) if len(sys.argv) > 5 else 0,
    )
