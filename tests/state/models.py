"""A model with everything that state dicts find difficult, and what to compare it by."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from tests.original.training import Block, build, loss_of
from torch import nn

from fullshard import (
    FullStateDictConfig,
    LocalStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.wrap import ModuleWrapPolicy

#: Every type of state dict that can be loaded again by the ranks that saved it.
KINDS: dict[str, tuple[StateDictType, Any]] = {
    "full": (StateDictType.FULL_STATE_DICT, FullStateDictConfig()),
    "full on the host": (StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True)),
    "local": (StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig()),
    "sharded": (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig()),
    "dtensor": (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(_use_dtensor=True)),
}
SHARDED_KINDS = ("sharded", "dtensor")
#: From one unit for everything to one for every linear.
WRAPPINGS: dict[str, Any] = {
    "one unit": None,
    "blocks": ModuleWrapPolicy({Block}),
    "linears": ModuleWrapPolicy({nn.Linear}),
}
STRATEGIES = tuple(ShardingStrategy)

#: Whether time does not matter (``make test-long``).
LONG = bool(os.environ.get("FULLSHARD_LONG"))


def settings(*sizes: int) -> list[tuple[int, ShardingStrategy]]:
    """Numbers of ranks and strategies: each with each in a long run.

    Otherwise all strategies on as few ranks as share something, and on the other numbers of ranks
    those that shard differently there.
    """
    if LONG:
        return list(itertools.product(sizes, STRATEGIES))
    fewest = min(size for size in sizes if size > 1)
    return [
        (size, strategy)
        for size, strategy in itertools.product(sizes, STRATEGIES)
        if size == fewest
        or strategy is ShardingStrategy.FULL_SHARD
        or (size == 4 and strategy is ShardingStrategy.HYBRID_SHARD)
    ]


class Odd(nn.Module):
    """Shared, frozen, empty, scalar and channels-last parameters, buffers, a parameter first."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.embed = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.block = Block()
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.tied = nn.Linear(5, 7, bias=False)
        self.tied.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("table", torch.randn(4))
        self.register_buffer("scratch", torch.randn(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(self.norm(self.embed(x))) * self.gain + self.tied.weight.sum()
        return x + self.conv.weight.sum() + self.table.sum() + self.frozen.sum()


def hybrid_groups() -> tuple[Any, Any]:
    """(shards, copies) that split the ranks in two halves, or in one where they are odd."""
    size = dist.get_world_size()
    half = size // 2 if size % 2 == 0 else size
    shards = copies = None
    for first in range(0, size, half):
        members = list(range(first, first + half))
        group = dist.new_group(members)
        shards = group if dist.get_rank() in members else shards
    for first in range(half):
        members = list(range(first, size, half))
        group = dist.new_group(members)
        copies = group if dist.get_rank() in members else copies
    return shards, copies


def wrapped(bare: nn.Module, strategy: ShardingStrategy, wrapping: str, **options: Any) -> FSDP:
    """A sharded copy of ``bare``."""
    is_hybrid = "HYBRID" in strategy.name
    if is_hybrid and "process_group" not in options and "device_mesh" not in options:
        options["process_group"] = hybrid_groups()
    return FSDP(
        copy.deepcopy(bare),
        sharding_strategy=strategy,
        auto_wrap_policy=WRAPPINGS[wrapping],
        **options,
    )


@contextlib.contextmanager
def kind(model: nn.Module, name: str) -> Iterator[None]:
    with FSDP.state_dict_type(model, *KINDS[name]):
        yield


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint would hold: independent of the model it came from."""
    return copy.deepcopy(state)


def wipe(model: nn.Module) -> None:
    """Overwrite everything that a state dict has."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(3)


def other(make: Any) -> nn.Module:
    """The same model with other values."""
    model = build(make)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    return model


def assert_same_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Names, their order, dtypes, shapes and every bit."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        assert torch.equal(found[name], value.to(found[name].device)), name


def next_loss(model: nn.Module) -> float:
    with torch.no_grad():
        return loss_of(model, 5).item()
