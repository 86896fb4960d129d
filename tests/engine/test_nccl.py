"""Ranks over NCCL: alone, and several on one GPU, each of which NCCL takes for a host."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from tests.engine.models import NestedLinears, make
from tests.engine.parity import adam, train, train_alone
from torch import nn

from fullshard import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from fullshard.engine.comm.collectives import Group, group_for
from fullshard.engine.comm.gloo import GlooGroup
from fullshard.testing import backend, device, ranks
from fullshard.wrap import ModuleWrapPolicy

on_a_gpu = pytest.mark.skipif(device().type == "cpu", reason="NCCL is for GPUs")

UNITS = ModuleWrapPolicy({nn.Linear, nn.Sequential})


@on_a_gpu
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@ranks(1)
def test_a_rank_over_nccl_trains_like_the_bare_model(strategy: str) -> None:
    group = dist.new_group([0], backend="nccl")
    expected = train_alone(make(NestedLinears), adam)
    for use_orig_params, offload, mixed in itertools.product([False, True], repeat=3):
        case = f"use_orig_params={use_orig_params} offload={offload} mixed={mixed}"
        model = FullyShardedDataParallel(
            make(NestedLinears),
            group,
            sharding_strategy=ShardingStrategy[strategy],
            auto_wrap_policy=UNITS,
            use_orig_params=use_orig_params,
            cpu_offload=CPUOffload(offload_params=offload),
            # Parameters are in double precision: single is low.
            mixed_precision=MixedPrecision(param_dtype=torch.float32) if mixed else None,
        )
        found = train(model, adam(model.parameters()))
        found.assert_close(expected, case, tolerance=1e-4 if mixed else 1e-9)


@on_a_gpu
@ranks(1)
def test_nccl_takes_what_it_is_asked_for() -> None:
    group = Group(dist.new_group([0], backend="nccl"), "cuda")
    # So that nothing is left out because nobody else is there.
    group.size = 2
    given = torch.arange(4.0, device=device())
    one, other, reduced, summed = (torch.zeros_like(given) for _ in range(4))

    assert group.runs_ahead
    assert group.averages
    group.wait(*group.gather([one], [given], "unit"))
    group.wait(*group.gather([one, other], [given, given], "unit"))
    group.start_reduce_scatter(reduced, given, "unit", mean=True)()
    summed.copy_(given)
    group.all_reduce(summed, "unit")
    group.all_reduce(summed, "unit", mean=True)
    group.all_reduce_max(summed, "unit")
    group.broadcast([summed], "unit")

    for received in (one, other, reduced, summed):
        assert torch.equal(received, given)


over_nccl = pytest.mark.skipif(
    device().type == "cpu" or backend() != "nccl", reason="needs --device cuda --backend nccl"
)


@over_nccl
@ranks(2)
def test_a_group_with_a_backend_for_each_device_uses_that_of_the_tensors() -> None:
    on_gpu = group_for(dist.group.WORLD, device())
    on_host = group_for(dist.group.WORLD, torch.device("cpu"))

    assert isinstance(on_host, GlooGroup)
    assert not isinstance(on_gpu, GlooGroup)
    assert on_gpu.runs_ahead
    assert on_gpu.averages
    model = FullyShardedDataParallel(make(NestedLinears).cpu(), use_orig_params=True)
    assert model._unit.shards is on_host
    assert model.cuda()._unit.shards is on_gpu


@over_nccl
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"])
@ranks(4)
def test_four_ranks_over_nccl_train_like_the_bare_model(strategy: str) -> None:
    hybrid = strategy == "HYBRID_SHARD"
    mesh = dist.device_mesh.init_device_mesh("cuda", (2, 2)) if hybrid else None
    expected = train_alone(make(NestedLinears), adam)
    for use_orig_params, offload in itertools.product([False, True], repeat=2):
        model = FullyShardedDataParallel(
            make(NestedLinears),
            device_mesh=mesh,
            sharding_strategy=ShardingStrategy[strategy],
            auto_wrap_policy=UNITS,
            use_orig_params=use_orig_params,
            cpu_offload=CPUOffload(offload_params=offload),
        )
        found = train(model, adam(model.parameters()))
        case = f"use_orig_params={use_orig_params} offload={offload}"
        found.assert_close(expected, case, tolerance=1e-9)
