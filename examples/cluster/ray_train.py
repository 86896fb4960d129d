"""fullshard under Ray Train: two workers, a checkpoint, and a second run that goes on from it.

    pip install 'fullshard[ray]'
    python examples/cluster/ray_train.py --folder /shared/run

Ray starts the workers and the process group; the model is wrapped as everywhere else. The folder
has to be one that all workers reach.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchConfig, TorchTrainer, get_device
from torch import nn

import fullshard
from fullshard import FullyShardedDataParallel
from fullshard.wrap import ModuleWrapPolicy

WIDTH = 32


class Block(nn.Module):
    """One unit of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def batch_of(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))


def train(config: dict[str, Any]) -> None:
    """What each worker runs. The process group is there already."""
    device = get_device()
    torch.manual_seed(0)
    # Not ray.train.torch.prepare_model: it would wrap the model once more.
    model = FullyShardedDataParallel(
        nn.Sequential(*(Block() for _ in range(3))).to(device),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # Workers that Ray starts again after a failure find what was saved, too.
    found = fullshard.resume(config["folder"], model, optimizer)
    done = found.step if found is not None else 0
    for step in range(done + 1, config["steps"] + 1):
        loss = model(batch_of(step, dist.get_rank()).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        if step % config["save_every"] == 0:
            fullshard.save(config["folder"], model, optimizer, step=step, keep_last=2)
        loss_of_all = mean.item() / dist.get_world_size()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss_of_all:.6f}", flush=True)
        # All workers report: Ray waits for the last one.
        ray.train.report({"step": step, "loss": loss_of_all})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()

    cuda = torch.cuda.is_available()
    folder = options.folder.resolve()
    trainer = TorchTrainer(
        train,
        train_loop_config={
            "folder": str(folder / "checkpoints"),
            "steps": options.steps,
            "save_every": options.save_every,
        },
        torch_config=TorchConfig(backend="nccl" if cuda else "gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=options.workers, use_gpu=cuda),
        run_config=ray.train.RunConfig(
            storage_path=str(folder / "ray"),
            failure_config=ray.train.FailureConfig(max_failures=3),
        ),
    )
    trainer.fit()
    saved = fullshard.latest(folder / "checkpoints")
    print(f"saved: {saved.path if saved is not None else 'nothing'}")


if __name__ == "__main__":
    main()
