"""Training in half precision with a scaled loss, as for torch's wrapper; torch's names only."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = FSDP(
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)),
        mixed_precision=MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32),
        use_orig_params=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler(device="cpu", init_scale=2.0**20, growth_interval=1000)
    inputs = torch.rand(16, 8) + dist.get_rank()
    losses = []
    for _ in range(20):
        loss = (model(inputs).float() - 1).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert scaler.get_scale() < 2.0**20, "the first steps overflow and are skipped"
    assert losses[0] == losses[1], "a skipped step changes nothing"
    assert losses[-1] < losses[0] / 2, losses
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(ShardedGradScaler.__module__)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
