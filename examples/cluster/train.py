"""A training that a scheduler may interrupt: on SIGTERM it saves, leaves, and goes on next time.

    fullshard run --ranks 2 examples/cluster/train.py --folder /shared/run --steps 1000

Works under every launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. The folder has
to be one that all hosts reach.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard import FullyShardedDataParallel, StopRequest
from fullshard.wrap import ModuleWrapPolicy


class Block(nn.Module):
    """One unit of the model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def batch_of(step: int, rank: int, width: int) -> torch.Tensor:
    """Data follows from the step and the rank, so that a resumed run sees what it would have."""
    return torch.randn(4, width, generator=torch.Generator().manual_seed(1000 * step + rank))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--seconds-per-step", type=float, default=0.0)
    options = parser.parse_args()

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    device = torch.device("cuda" if cuda else "cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        nn.Sequential(*(Block(options.width) for _ in range(3))).to(device),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = fullshard.resume(options.folder, model, optimizer)
    done = found.step if found is not None else 0
    if rank == 0:
        print(f"{dist.get_world_size()} ranks, from step {done + 1}", flush=True)

    with StopRequest() as stop:
        for step in range(done + 1, options.steps + 1):
            loss = model(batch_of(step, rank, options.width).to(device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                print(f"step {step} loss {loss.item():.9f}", flush=True)
            time.sleep(options.seconds_per_step)

            stopping = stop.agreed()
            if stopping or step % options.save_every == 0 or step == options.steps:
                fullshard.save(options.folder, model, optimizer, step=step, keep_last=2)
            if stopping:
                if rank == 0 and stop.signal is not None:
                    print(f"saved step {step}, leaving after {stop.signal.name}", flush=True)
                break
    dist.destroy_process_group()
    return stop.exit_status


if __name__ == "__main__":
    sys.exit(main())
