"""``summon_full_params`` in all its combinations."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy
from fullshard.testing import device, ranks
from fullshard.wrap import ModuleWrapPolicy

BOTH = pytest.mark.parametrize("use_orig_params", [False, True])
EACH = pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])


def bare() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).to(device())


def wrapped(model: nn.Module, strategy: str, use_orig_params: bool) -> FSDP:
    return FSDP(
        copy.deepcopy(model),
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=use_orig_params,
    )


@BOTH
@EACH
@ranks(2)
def test_full_values_can_be_read_in_every_combination(strategy: str, use_orig_params: bool) -> None:
    reference = bare()
    model = wrapped(reference, strategy, use_orig_params)
    for to_cpu, only_first, writeback in itertools.product([False, True], repeat=3):
        if only_first and writeback:
            continue
        with FSDP.summon_full_params(
            model, writeback=writeback, rank0_only=only_first, offload_to_cpu=to_cpu
        ):
            if dist.get_rank() == 0 or not only_first:
                for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                    assert torch.equal(ours.detach().cpu(), theirs.detach().cpu())
                    assert ours.device.type == ("cpu" if to_cpu else device().type)
    model(torch.ones(2, 5, device=device())).sum().backward()


@BOTH
@EACH
@ranks(2)
def test_changes_made_on_the_host_are_kept(strategy: str, use_orig_params: bool) -> None:
    model = wrapped(bare(), strategy, use_orig_params)

    with FSDP.summon_full_params(model, offload_to_cpu=True), torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.fill_(float(index))

    with FSDP.summon_full_params(model):
        for index, parameter in enumerate(model.parameters()):
            assert parameter.unique().tolist() == [float(index)]
