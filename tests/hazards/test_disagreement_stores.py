"""Ranks that disagree are told so whatever kind of store they met at."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.hazards.test_disagreement import disagreement, patience
from torch import nn

from fullshard import FullyShardedDataParallel as FSDP
from fullshard.testing import device, ranks
from fullshard.wrap import ModuleWrapPolicy


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, skipped: int | None = None) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index != skipped:
                x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("kind", ["file", "tcp"])
@pytest.mark.parametrize("healthy_steps", [0, 2])
@ranks(2, timeout=40)
def test_a_skipped_unit_is_named(healthy_steps: int, kind: str, tmp_path: Path) -> None:
    rank = dist.get_rank()
    dist.destroy_process_group()
    method = f"file://{tmp_path}/rendezvous" if kind == "file" else "env://"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = FSDP(Layers().to(device()), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    data = torch.ones(2, 4, device=device())
    for _ in range(healthy_steps):
        model(data).backward()
    message = disagreement(lambda: model(data, 1 if rank == 1 else None).backward())
    for part in ("rank 0", "rank 1", "layers.1", "layers.2"):
        assert part in message


@ranks(2, timeout=40)
def test_a_slow_rank_is_waited_for_at_a_file_store_too(tmp_path: Path) -> None:
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=rank, world_size=2
    )
    model = FSDP(Layers().to(device()), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    with patience(0.2):
        for _ in range(2):
            if rank == 1:
                time.sleep(0.7)
            model(torch.ones(2, 4, device=device())).backward()
