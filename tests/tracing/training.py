"""Small sharded models for traces, by either API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fullshard
from fullshard import FullyShardedDataParallel, ShardingStrategy
from fullshard.testing import device


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def model(width: int = 16, blocks: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(width) for _ in range(blocks)], nn.Linear(width, 4)).to(device())


def wrapped(
    width: int = 16, blocks: int = 3, strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
) -> nn.Module:
    policy = fullshard.wrap.ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(
        model(width, blocks),
        auto_wrap_policy=policy,
        sharding_strategy=strategy,
        use_orig_params=True,
        device_id=device(),
    )


def in_place(width: int = 16, blocks: int = 3) -> nn.Module:
    made = model(width, blocks)
    for block in made:
        if isinstance(block, Block):
            fullshard.fully_shard(block)
    return fullshard.fully_shard(made)


APIS: dict[str, Callable[..., nn.Module]] = {"wrapper": wrapped, "fully_shard": in_place}


def stepper(
    sharded: nn.Module, width: int = 16, rows: int = 4
) -> tuple[Callable[[], torch.Tensor], torch.optim.Optimizer]:
    """A function that trains one step, and its optimizer."""
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    inputs: Any = torch.randn(
        rows, width, generator=torch.Generator().manual_seed(torch.distributed.get_rank())
    ).to(device())

    def step() -> torch.Tensor:
        loss = sharded(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, optimizer
