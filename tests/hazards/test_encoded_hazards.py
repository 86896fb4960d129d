"""Encoded communication and secondary shards together with unusual things that users do."""

from __future__ import annotations

import copy
import os
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.engine.encoded import (
    APIS,
    INT8,
    Block,
    assert_uneven_batches_train_as_one_process,
    build,
    gradients_of,
    loss_of,
    parameters_of,
    shard,
    step_alone,
)
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fullshard
from fullshard import Communication, FullyShardedDataParallel, ShardingStrategy
from fullshard.engine.comm.hosts import HOST_VARIABLE
from fullshard.testing import device, ranks
from fullshard.wrap import ModuleWrapPolicy

with_both_apis = pytest.mark.parametrize("api", APIS)
ALL = Communication(torch.int8, torch.int8, min_numel=0, secondary_shards=2)


def assert_close_to_mean(model: Any, each: list[dict[str, torch.Tensor]]) -> None:
    """Gradients are, up to what eight bits lose, the mean of those of each rank."""
    found = gradients_of(model)
    assert list(found) == list(each[0])
    for name, gradient in found.items():
        assert gradient is not None
        mean = torch.stack([of_rank[name] for of_rank in each]).mean(0)
        off = (gradient.view_as(mean) - mean).norm()
        assert off < 0.04 * mean.norm(), name


@with_both_apis
@ranks(4)
def test_a_copy_and_an_exception_leave_a_model_that_trains(api: str) -> None:
    each = step_alone(build(), 4)
    model = shard(api, build(), ALL)
    loss_of(model).backward()
    model.zero_grad()

    class Broken(Exception):
        pass

    def fail(*_: Any) -> None:
        raise Broken

    for position in (0, 2):
        blocks = [module for module in model.modules() if isinstance(module, Block)]
        hook = blocks[position].down.register_forward_hook(fail)
        with pytest.raises(Broken):
            loss_of(model)
        hook.remove()
    if api == "wrapper":
        model = copy.deepcopy(model)

    loss_of(model).backward()

    assert_close_to_mean(model, each)


@ranks(2)
def test_a_pickled_model_goes_on_with_its_encodings() -> None:
    each = step_alone(build(), 2)
    model = shard("wrapper", build(), INT8)
    loss_of(model).backward()

    model = pickle.loads(pickle.dumps(model))
    model.zero_grad()
    loss_of(model).backward()

    assert_close_to_mean(model, each)
    handles = [h for w in FullyShardedDataParallel.fsdp_modules(model) for h in w._unit.handles]
    assert any(handle.reduced_in is not None for handle in handles)


@with_both_apis
@ranks(2)
def test_full_parameters_are_summoned_changed_and_kept_exactly(api: str) -> None:
    model = shard(api, build(), INT8)
    loss_of(model).backward()

    with fullshard.summon_full_params(model):
        for parameter in model.parameters():
            parameter.data.fill_(1 / 3)

    for name, parameter in parameters_of(model).items():
        assert torch.equal(parameter, torch.full_like(parameter, 1 / 3)), name


@ranks(2)
def test_hooks_of_the_users_own_reduce_in_place_of_encodings() -> None:
    each = step_alone(build(), 2)
    model = shard("wrapper", build(), INT8)
    shapes: list[torch.dtype] = []

    def hook(state: object, full: torch.Tensor, part: torch.Tensor) -> None:
        shapes.append(full.dtype)
        dist.all_reduce(full)
        part.copy_(full.div_(2).chunk(2)[dist.get_rank()])

    model.register_comm_hook(None, hook)
    loss_of(model).backward()

    assert set(shapes) == {torch.float32}
    assert_close_to_mean(model, each)


@pytest.mark.parametrize("batches", [(3, 1), (0, 2)])
@ranks(2)
def test_ranks_that_run_out_of_data_follow_encoded_steps(batches: tuple[int, int]) -> None:
    model = shard("wrapper", build(), INT8)

    assert_uneven_batches_train_as_one_process(model, batches)


@pytest.mark.parametrize("hosts", ["aaaa", "aabb"])
@ranks(4)
def test_ranks_that_run_out_of_data_keep_second_shards_as_the_others_do(hosts: str) -> None:
    os.environ[HOST_VARIABLE] = hosts[dist.get_rank()]
    try:
        model = shard("wrapper", build(), ALL, process_group=dist.new_group())
        assert_uneven_batches_train_as_one_process(model, (3, 1, 0, 2))
    finally:
        del os.environ[HOST_VARIABLE]


class Wide(nn.Module):
    """Two linears to parallelize, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.up = nn.Linear(12, 32)
        self.down = nn.Linear(32, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


@with_both_apis
@ranks(4)
def test_parts_of_tensor_parallelism_are_encoded(api: str) -> None:
    mesh = dist.device_mesh.init_device_mesh(
        device().type, (2, 2), mesh_dim_names=("data", "tensor")
    )
    losses: dict[Any, list[float]] = {}
    for given in (None, INT8):
        torch.manual_seed(0)
        model: Any = nn.Sequential(Wide(), Wide()).to(device())
        for block in model:
            plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tensor"], plan)
        if api == "wrapper":
            model = FullyShardedDataParallel(
                model,
                auto_wrap_policy=ModuleWrapPolicy({Wide}),
                use_orig_params=True,
                device_mesh=mesh["data"],
                communication=given,
            )
        else:
            for part in (*model, model):
                fullshard.fully_shard(part, mesh=mesh["data"], communication=given)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        generator = torch.Generator().manual_seed(mesh.get_local_rank("data"))
        x = torch.randn(6, 12, generator=generator).to(device())
        losses[given] = []
        for _ in range(10):
            loss = (model(x) - x.flip(1)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[given].append(float(loss))

    first = losses[None][0]
    assert losses[None][-1] < 0.5 * first
    for exact, found in zip(losses[None], losses[INT8], strict=True):
        assert abs(found - exact) < 0.02 * first
    assert losses[None] != losses[INT8]


@ranks(2)
def test_adapters_are_trained_over_frozen_parameters_that_are_encoded() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(16, 16)
            self.base.requires_grad_(False)
            self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.up(self.down(x))

    torch.manual_seed(0)
    model: Any = nn.Sequential(Adapted(), Adapted()).to(device())
    expected = copy.deepcopy(model)
    x = torch.randn(4, 16, device=device())
    expected(x).square().sum().backward()
    model = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Adapted}),
        use_orig_params=True,
        communication=INT8,
    )

    model(x).square().sum().backward()
    found = gradients_of(model)

    for name, parameter in expected.named_parameters():
        gradient = found[name]
        if parameter.grad is None:
            assert gradient is None
        else:
            assert gradient is not None
            off = (gradient.view_as(parameter.grad) - parameter.grad).norm()
            assert off < 0.05 * parameter.grad.norm(), name


@ranks(4)
def test_flat_parameters_and_copies_go_with_second_shards() -> None:
    each = step_alone(build(5), 4)
    policy = ModuleWrapPolicy({Block})
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD):
        groups: Any = None
        if strategy is ShardingStrategy.HYBRID_SHARD:
            copies = [dist.new_group([rank]) for rank in range(4)]
            groups = (dist.group.WORLD, copies[dist.get_rank()])
        model = FullyShardedDataParallel(
            build(5),
            groups,
            strategy,
            auto_wrap_policy=policy,
            communication=Communication(secondary_shards=2),
        )
        loss_of(model).backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        before = dict(build(5).named_parameters())
        for name, parameter in parameters_of(model).items():
            mean = torch.stack([of_rank[name] for of_rank in each]).mean(0)
            expected = before[name].detach() - 0.5 * mean
            torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=1e-4)


@with_both_apis
@ranks(2)
def test_a_unit_that_runs_twice_and_a_graph_that_is_kept(api: str) -> None:
    def twice(model: Any, rank: int | None = None) -> torch.Tensor:
        return loss_of(model, 0, rank) + loss_of(model, 1, rank)

    alone = build()
    each = []
    for rank in range(2):
        alone.zero_grad()
        twice(alone, rank).backward()
        twice(alone, rank).backward()
        each.append({n: p.grad.clone() for n, p in alone.named_parameters() if p.grad is not None})
    model = shard(api, build(), INT8)

    loss = twice(model)
    loss.backward(retain_graph=True)
    loss.backward()

    assert_close_to_mean(model, each)


@with_both_apis
@ranks(4)
def test_evaluation_in_inference_mode_comes_before_and_between_steps(api: str) -> None:
    each = step_alone(build(), 4)
    model = shard(api, build(), ALL)

    with torch.inference_mode():
        first = loss_of(model)
    loss = loss_of(model)
    loss.backward()
    with torch.inference_mode():
        second = loss_of(model)

    assert float(first) == float(second) == float(loss)
    assert_close_to_mean(model, each)
