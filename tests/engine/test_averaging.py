"""Backends that make means themselves are asked to: here a group in front of gloo that does."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.engine.parity import assert_same, full_parameters
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import MixedPrecision, ShardingStrategy
from fullshard.testing import device, ranks
from fullshard.wrap import ModuleWrapPolicy

NAME = "averaging_nccl"


class Averaging(dist.ProcessGroup):
    """Real collectives over gloo, under a name that promises means, which it makes and counts."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.means = 0

    def getBackendName(self) -> str:
        return NAME

    @functools.cached_property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def _reduce(self, tensor: torch.Tensor, options: Any) -> Any:
        work = self.gloo.allreduce([tensor])  # type: ignore[attr-defined]
        work.wait()
        if options.reduceOp == dist.ReduceOp.AVG:
            self.means += 1
            tensor.div_(self.size())
        return work

    def allreduce(self, tensors: Sequence[torch.Tensor], options: Any = None) -> Any:
        return self._reduce(tensors[0], options or dist.AllreduceOptions())

    def reduce_scatter_single(
        self, output: torch.Tensor, full: torch.Tensor, options: Any = None
    ) -> Any:
        total = full.clone()
        work = self._reduce(total, options or dist.ReduceScatterOptions())
        output.copy_(total.view(self.size(), -1)[self.rank()])
        return work

    def all_gather_single(self, output: torch.Tensor, piece: torch.Tensor, *_: Any) -> Any:
        work = self.gloo.allgather([list(output.view(self.size(), -1).unbind())], [piece])  # type: ignore[attr-defined]
        work.wait()
        return work

    _reduce_scatter_base = reduce_scatter_single
    _allgather_base = all_gather_single


def new_group() -> Averaging:
    if NAME.upper() not in vars(dist.Backend):
        dist.Backend.register_backend(NAME, Averaging, devices=["cpu", "cuda"])
    group = dist.new_group(backend=NAME)
    assert isinstance(group, Averaging)
    assert group.group_name  # found now, and remembered for when torch has forgotten the group
    return group


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)
        self.first_ranks = nn.Parameter(torch.randn(5, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.linear(x))
        # A gradient that one rank has and the others have not must still reach them.
        return x + self.first_ranks.sum(0) if dist.get_rank() == 0 else x


STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD]


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@ranks(3)
def test_means_of_the_backend_are_means(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    torch.manual_seed(0)
    bare = nn.Sequential(Block(), Block()).double().to(device())
    group = new_group()
    model = FSDP(
        copy.deepcopy(bare),
        group,
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=use_orig_params,
    )
    reference = DistributedDataParallel(bare, find_unused_parameters=True)
    both = (reference, model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05, eps=1e-4) for m in both]
    for step in range(3):
        inputs = torch.randn(
            4, 7, generator=torch.Generator().manual_seed(9 * step + dist.get_rank())
        )
        losses = []
        for each, optimizer in zip(both, optimizers, strict=True):
            loss = each(inputs.double().to(device())).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-9, atol=1e-9)
    # Two units with parameters, three steps.
    assert group.means == 2 * 3
    assert_same(full_parameters(model), full_parameters(reference), strategy)


@ranks(2)
def test_half_precision_is_divided_on_both_sides_of_the_sum() -> None:
    group = new_group()
    model = FSDP(
        nn.Linear(8, 8).to(device()),
        group,
        mixed_precision=MixedPrecision(reduce_dtype=torch.float16),
        use_orig_params=True,
    )

    model(torch.ones(1, 8, device=device())).sum().backward()

    # Means in half precision would lose what is small before it is summed.
    assert group.means == 0
    for parameter in model.parameters():
        if parameter.numel():
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, torch.ones_like(parameter))
