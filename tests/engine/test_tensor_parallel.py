"""DTensor parameters, sharded: training on two mesh dimensions equals the bare model's."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from tests.engine.models import make
from tests.engine.parity import adam, assert_same, full_parameters, train, train_alone
from tests.engine.tensor_parallel import Block, Tokens, mesh_of, parallelized, plan, sharded
from tests.original.training import MODES, STRATEGIES
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, distribute_module
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import MixedPrecision, ShardingStrategy
from fullshard.testing import device, ranks
from fullshard.wrap import ModuleWrapPolicy


def assert_trains(mesh: DeviceMesh, model: FSDP, case: object, tolerance: float = 1e-9) -> None:
    """Losses and full parameters are those of the bare model on the batches of all ranks."""
    others = [mesh[name] for name in ("copies", "dp") if name in mesh.mesh_dim_names]
    size, rank = 1, 0
    for other in others:
        size, rank = size * other.size(), rank * other.size() + other.get_local_rank()
    expected = train_alone(make(Tokens), adam, world_size=size, rank=rank)
    found = train(model, adam(model.parameters()), rank=rank)
    found.assert_close(expected, case, tolerance)


@pytest.mark.parametrize("kind", ["tensor", "sequence"])
@ranks(4)
def test_a_tensor_parallel_model_trains_as_the_bare_one(kind: str) -> None:
    mesh = mesh_of(2, 2)
    for strategy, use_orig_params in [*MODES, (ShardingStrategy.NO_SHARD, False)]:
        for blocks in (True, False):
            model = sharded(mesh, strategy, kind, blocks, use_orig_params=use_orig_params)
            assert_trains(mesh, model, (strategy, use_orig_params, blocks))


@ranks(8)
def test_a_tensor_parallel_model_trains_with_copies_of_its_shards() -> None:
    mesh = mesh_of(2, 2, 2)
    for strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2):
        assert_trains(mesh, sharded(mesh, strategy), strategy)


@ranks(2)
def test_one_rank_per_part_trains_without_sharding() -> None:
    mesh = mesh_of(1, 2)
    with pytest.warns(UserWarning, match="world size is 1"):
        model = sharded(mesh)
    assert_trains(mesh, model, "one rank per part")


@pytest.mark.parametrize("kind", ["tensor", "sequence"])
@ranks(4)
def test_parts_are_computed_with_in_low_precision(kind: str) -> None:
    mesh = mesh_of(2, 2)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
        precision = MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32)
        model = sharded(mesh, kind=kind, mixed_precision=precision)
        seen = seen_in_forward(model.first.up)
        assert_trains(mesh, model, dtype, tolerance)
        assert {weight.dtype for weight in seen} == {dtype}


def seen_in_forward(module: nn.Module) -> list[torch.Tensor]:
    """The weights that a module has whenever it runs from now on."""
    seen: list[torch.Tensor] = []
    module.register_forward_pre_hook(lambda module, _: seen.append(module.weight))
    return seen


@pytest.mark.parametrize("reentrant", [False, True])
@ranks(4)
def test_blocks_are_recomputed_with_their_parts(reentrant: bool) -> None:
    mesh = mesh_of(2, 2)
    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    for outside in (False, True):
        module = parallelized(mesh)
        for name in ("first", "second"):
            block = getattr(module, name)
            if outside:
                block = FSDP(block, device_mesh=mesh["dp"], use_orig_params=True)
            block = checkpoint_wrapper(block, kind)
            if not outside:
                block = FSDP(block, device_mesh=mesh["dp"], use_orig_params=True)
            setattr(module, name, block)
        model = FSDP(module, device_mesh=mesh["dp"], use_orig_params=True)
        assert_trains(mesh, model, (reentrant, outside))


@ranks(4)
def test_a_part_that_two_modules_share_is_one_parameter() -> None:
    mesh = mesh_of(2, 2)
    rank = mesh["dp"].get_local_rank()
    expected = train_alone(make(Tokens, tied=True), adam, world_size=2, rank=rank)
    for classes in ({Block}, {Block, nn.Embedding, nn.Linear}):
        for use_orig_params in (True, False):
            model = FSDP(
                parallelized(mesh, tied=True),
                device_mesh=mesh["dp"],
                auto_wrap_policy=ModuleWrapPolicy(classes),
                use_orig_params=use_orig_params,
            )
            found = train(model, adam(model.parameters()), rank=rank)
            found.assert_close(expected, (classes, use_orig_params))


@ranks(4)
def test_parts_follow_a_conversion_of_the_whole_model() -> None:
    mesh = mesh_of(2, 2)
    model = sharded(mesh, model=parallelized(mesh, dtype=torch.float32))
    model(*model.module.get_input(0))

    model.double()

    close_to_float = {name: p.float().double() for name, p in full_parameters(make(Tokens)).items()}
    assert_same(full_parameters(model), close_to_float, "converted")
    model(*model.module.get_input(0)).sum().backward()


@ranks(4)
def test_gradients_kept_by_no_sync_are_those_of_the_parts() -> None:
    mesh = mesh_of(2, 2)
    rank = mesh["dp"].get_local_rank()
    for strategy, use_orig_params in MODES:
        bare = make(Tokens)
        model = sharded(mesh, strategy, "sequence", use_orig_params=use_orig_params)
        batches = [bare.get_input(r, step) for r in range(2) for step in range(2)]
        (sum(bare(*batch).square().mean() for batch in batches) / 2).backward()
        with model.no_sync():
            model(*bare.get_input(rank, 0)).square().mean().backward()
        model(*bare.get_input(rank, 1)).square().mean().backward()
        step_both(bare, model)
        assert_same(full_parameters(model), full_parameters(bare), (strategy, use_orig_params))


def step_both(*models: nn.Module) -> None:
    for model in models:
        adam(model.parameters()).step()


@ranks(4)
def test_a_part_is_plain_outside_of_forward_and_a_dtensor_inside() -> None:
    mesh = mesh_of(2, 2)
    for strategy in STRATEGIES:
        model = sharded(mesh, strategy)
        seen = seen_in_forward(model.first.up)

        model(*model.module.get_input(0)).sum().backward()
        with torch.no_grad():
            model(*model.module.get_input(0))

        assert [type(weight) for weight in seen] == [DTensor, DTensor]
        assert [weight.shape for weight in seen] == [(10, 6), (10, 6)]
        assert not any(isinstance(p, DTensor) for p in model.parameters())
        assert not any(isinstance(p.grad, DTensor) for p in model.parameters())
        held = sum(p.numel() for p in model.first.up.parameters())
        assert held == 35 if strategy is ShardingStrategy.NO_SHARD else held < 35


@ranks(4)
def test_a_part_that_a_module_returns_outlives_the_unit() -> None:
    class Returning(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight

    mesh = mesh_of(2, 2)
    module = nn.Sequential(Returning(6, 4, device=device()))
    distribute_module(
        module, mesh["tp"], lambda _, each, mesh: each.register_parameter("bias", None)
    )
    expected = module[0].weight.full_tensor()
    module[0] = FSDP(module[0], device_mesh=mesh["dp"], use_orig_params=True)
    model = FSDP(module, device_mesh=mesh["dp"], use_orig_params=True)
    found = model(torch.ones(1, 6, device=device()))
    assert torch.equal(found.full_tensor(), expected)


@ranks(4)
def test_frozen_parts_get_no_gradients_and_keep_their_values() -> None:
    mesh = mesh_of(2, 2)
    rank = mesh["dp"].get_local_rank()
    bare, module = make(Tokens), parallelized(mesh)
    for each in (bare, module):
        each.first.up.requires_grad_(False)
    model = sharded(mesh, model=module)
    expected = train_alone(bare, adam, world_size=2, rank=rank)
    found = train(model, adam(model.parameters()), rank=rank)
    found.assert_close(expected, "frozen")
    assert model.first.up.weight.grad is None


def on_meta(mesh: DeviceMesh) -> Tokens:
    with torch.device("meta"):
        module = Tokens()
    parallelize_module(module, mesh["tp"], plan("tensor"))
    return module


@ranks(4)
def test_a_model_built_on_the_meta_device_is_initialised_part_by_part() -> None:
    def fill(module: nn.Module) -> None:
        module.to_empty(device=device(), recurse=False)
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 0.25)

    mesh = mesh_of(2, 2)
    expected = {name: torch.full_like(p, 0.25) for name, p in Tokens().named_parameters()}
    for use_orig_params in (True, False):
        model = sharded(
            mesh, model=on_meta(mesh), param_init_fn=fill, use_orig_params=use_orig_params
        )
        assert_same(full_parameters(model), expected, use_orig_params)


@ranks(4)
def test_modules_on_the_meta_device_initialise_their_own_parts() -> None:
    mesh = mesh_of(2, 2)
    module = on_meta(mesh)
    model = FSDP(module.first, device_mesh=mesh["dp"], use_orig_params=True)
    found = full_parameters(model)
    bound = 1 / math.sqrt(6)
    assert torch.equal(found["norm.weight"], torch.ones(6))
    assert (found["up.weight"].abs() <= bound).all()
    assert (found["up.weight"] != 0).all()
    mine = found["up.weight"].to(device())
    everyone = [torch.empty_like(mine) for _ in range(4)]
    dist.all_gather(everyone, mine)
    assert all(torch.equal(other, everyone[0]) for other in everyone)


@ranks(4)
def test_the_first_rank_of_each_part_overwrites_the_others() -> None:
    mesh = mesh_of(2, 2)
    module = parallelized(mesh)
    if mesh["dp"].get_local_rank() == 1:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(7)
    model = sharded(mesh, model=module, sync_module_states=True)
    assert_same(full_parameters(model), full_parameters(make(Tokens)), "synchronized")


@ranks(2)
def test_without_dtensors_a_step_knows_nothing_of_them() -> None:
    model = FSDP(make(Tokens), use_orig_params=True)
    model(*model.module.get_input(0)).sum().backward()
    for handle in model._unit.handles:
        assert not handle.distributions
        assert all(buffer.shown is buffer.views for buffer in handle.full_buffers.values())


# -- what cannot be sharded ----------------------------------------------------------------------


@ranks(4)
def test_sharding_over_the_ranks_of_the_parts_is_refused() -> None:
    mesh = mesh_of(2, 2)
    for options in ({}, {"device_mesh": mesh["tp"]}):
        with pytest.raises(ValueError, match=r"'first\.up\.weight' is a DTensor over ranks"):
            FSDP(nn.ModuleDict({"first": parallelized(mesh).first}), **options)


@ranks(4)
def test_placements_that_a_parameter_cannot_have_are_refused() -> None:
    mesh = mesh_of(2, 2)
    for placement in (Partial(), _StridedShard(0, split_factor=2)):
        module = nn.Linear(4, 4, device=device())
        weight = DTensor.from_local(module.weight.detach(), mesh["tp"], [placement])
        module.weight = nn.Parameter(weight)
        with pytest.raises(ValueError, match=r"'weight' is a DTensor with placements"):
            FSDP(module, device_mesh=mesh["dp"])


@ranks(4)
def test_ranks_that_run_other_units_are_told_so_on_two_dimensions() -> None:
    mesh = mesh_of(2, 2)
    model = sharded(mesh)
    inputs = model.module.get_input(0)
    model(*inputs).sum().backward()
    if mesh["dp"].get_local_rank() == 1:
        model.module.first, model.module.second = model.second, model.first
    with pytest.raises(RuntimeError, match="Ranks disagree"):
        model(*inputs).sum().backward()
