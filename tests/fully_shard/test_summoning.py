"""``summon_full_params`` of models that fully_shard was applied to."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.fully_shard.side_by_side import OURS, adamw, build, by_block, forward_loss, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fullshard
from fullshard import FullyShardedDataParallel, summon_full_params
from fullshard.testing import device, ranks
from fullshard.wrap import ModuleWrapPolicy

#: The function, and the wrapper's method of the same name.
EITHER = pytest.mark.parametrize(
    "summon", [summon_full_params, FullyShardedDataParallel.summon_full_params]
)


def sharded(**options: Any) -> Any:
    model = build().to(device())
    by_block(**options)(OURS, model)
    return model


def by_columns(parameter: nn.Parameter) -> Shard | None:
    """Cuts what two ranks can share evenly by its columns."""
    return Shard(1) if parameter.dim() == 2 and parameter.shape[1] % 2 == 0 else None


@EITHER
@ranks(2)
def test_full_values_can_be_read_in_every_combination(summon: Any) -> None:
    expected = dict(build().named_parameters())
    model = sharded()
    own = dict(model.named_parameters())
    for to_cpu, only_first, writeback in itertools.product([False, True], repeat=3):
        if only_first and writeback:
            continue
        with summon(model, writeback=writeback, rank0_only=only_first, offload_to_cpu=to_cpu):
            if dist.get_rank() == 0 or not only_first:
                found = dict(model.named_parameters())
                assert list(found) == list(expected)
                for name, parameter in found.items():
                    assert type(parameter) is nn.Parameter
                    assert parameter.device.type == ("cpu" if to_cpu else device().type)
                    assert torch.equal(parameter.detach().cpu(), expected[name].detach())
            else:
                assert all(isinstance(p, DTensor) for p in model.parameters())
        assert all(p is own[name] for name, p in model.named_parameters())
    forward_loss(model, 0).backward()


@pytest.mark.parametrize("placement", [None, by_columns])
@ranks(2)
def test_changes_are_kept_if_they_are_written_back_and_lost_otherwise(placement: Any) -> None:
    model = sharded(shard_placement_fn=placement)
    before = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
    for writeback in (False, True):
        with summon_full_params(model, writeback=writeback), torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape))
        for name, parameter in model.named_parameters():
            full = parameter.full_tensor()
            expected = torch.arange(full.numel()).view(full.shape) if writeback else before[name]
            assert torch.equal(full.cpu(), expected.to(full.dtype).cpu()), name


@ranks(2)
def test_what_is_put_in_a_parameters_place_is_written_back_and_another_shape_refused() -> None:
    model = sharded()
    with summon_full_params(model):
        model.head.weight = nn.Parameter(torch.full_like(model.head.weight, 3.0))
        model.scale.requires_grad_(False)
    assert isinstance(model.head.weight, DTensor)
    assert model.head.weight.full_tensor().unique().tolist() == [3.0]
    assert not model.scale.requires_grad

    with pytest.raises(RuntimeError, match=r"head\.weight"), summon_full_params(model):
        model.head.weight = nn.Parameter(torch.zeros(2, 2, device=device()))
    assert model.head.weight.full_tensor().unique().tolist() == [3.0]


@ranks(2)
def test_only_a_modules_own_unit_is_summoned_without_recursion() -> None:
    model = sharded()
    with summon_full_params(model, recurse=False):
        assert not isinstance(model.head.weight, DTensor)
        assert isinstance(model.blocks[0].up.weight, DTensor)
    with summon_full_params(model.blocks[0]):
        assert isinstance(model.head.weight, DTensor)
        assert not isinstance(model.blocks[0].up.weight, DTensor)


@pytest.mark.parametrize("placement", [None, by_columns])
@ranks(2)
def test_full_gradients_are_shown_and_changes_to_them_kept(placement: Any) -> None:
    model = sharded(shard_placement_fn=placement)
    forward_loss(model, 0).backward()
    model.blocks[1].up.bias.grad = None
    expected = {
        name: None if p.grad is None else p.grad.full_tensor().clone()
        for name, p in model.named_parameters()
    }

    with summon_full_params(model, with_grads=True, writeback=False):
        for name, parameter in model.named_parameters():
            if expected[name] is None:
                assert parameter.grad is None, name
            else:
                assert torch.equal(parameter.grad, expected[name]), name
                parameter.grad.zero_()
    for name, parameter in model.named_parameters():
        if expected[name] is not None:
            assert torch.equal(parameter.grad.full_tensor(), expected[name]), name

    with summon_full_params(model, with_grads=True):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        model.head.weight.grad = None
    for name, parameter in model.named_parameters():
        if name == "head.weight":
            assert parameter.grad is None
        else:
            assert isinstance(parameter.grad, DTensor)
            assert parameter.grad.full_tensor().unique().tolist() == [1.0], name


@ranks(2)
def test_training_goes_on_as_if_nothing_had_been_summoned() -> None:
    expected = train(OURS, by_block())

    def step_with(api: Any, model: Any, step: int) -> torch.Tensor:
        with summon_full_params(model, writeback=step % 2 == 0):
            pass
        loss = forward_loss(model, step)
        loss.backward()
        with summon_full_params(model, with_grads=True):
            pass
        return loss

    found = train(OURS, by_block(), step_with=step_with)
    assert found.losses == expected.losses


@ranks(2)
def test_a_forward_inside_uses_what_is_summoned() -> None:
    model = sharded()
    with torch.no_grad():
        before = forward_loss(model, 0)
        with summon_full_params(model):
            model.head.weight.zero_()
            model.head.bias.zero_()
            inside = forward_loss(model, 0)
        after = forward_loss(model, 0)
    assert torch.equal(inside, after)
    assert not torch.equal(inside, before)


@ranks(2)
def test_tensor_parallel_parameters_are_shown_as_they_were_before_fully_shard() -> None:
    if device().type != "cpu":
        pytest.skip("DTensor's own collectives of GPU tensors over gloo end the process")
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(0)
    linear = nn.Linear(4, 6)
    whole = linear.weight.detach().clone()
    model: Any = parallelize_module(linear, mesh["tp"], ColwiseParallel())
    fullshard.fully_shard(model, mesh=mesh["dp"])

    with summon_full_params(model), torch.no_grad():
        assert model.weight.device_mesh == mesh["tp"]
        assert torch.equal(model.weight.full_tensor(), whole)
        model.weight.mul_(2)
    assert torch.equal(model.weight.full_tensor(), 2 * whole)


@ranks(2)
def test_a_plain_model_with_units_of_both_kinds_is_summoned() -> None:
    torch.manual_seed(0)
    first = nn.Linear(4, 3).to(device())
    second = nn.Linear(3, 5).to(device())
    expected = [p.detach().clone() for p in (*first.parameters(), *second.parameters())]
    model = nn.Sequential(
        FullyShardedDataParallel(first, use_orig_params=True), fullshard.fully_shard(second)
    )
    with summon_full_params(model):
        for found, whole in zip(model.parameters(), expected, strict=True):
            assert torch.equal(found.detach(), whole)


@ranks(2)
def test_what_cannot_be_summoned_is_refused() -> None:
    model = sharded()
    with pytest.raises(NotImplementedError, match="rank0_only"):
        summon_full_params(model, rank0_only=True).__enter__()
    with summon_full_params(model):
        with pytest.raises(AssertionError, match="already unsharding"):
            summon_full_params(model).__enter__()
        with pytest.raises(RuntimeError, match="summon_full_params"):
            model.to(torch.float64)
    with pytest.raises(AssertionError, match="middle of a step"):
        summon_full_params_in_forward(model)
    model.set_requires_gradient_sync(False)
    forward_loss(model, 0).backward()
    with pytest.raises(RuntimeError, match="unreduced gradients"):
        summon_full_params(model, with_grads=True).__enter__()


def summon_full_params_in_forward(model: Any) -> None:
    def enter(module: nn.Module, args: Any) -> None:
        summon_full_params(model).__enter__()

    hook = model.blocks[1].register_forward_pre_hook(enter)
    try:
        forward_loss(model, 0)
    finally:
        hook.remove()


@ranks(2)
def test_the_optimizer_keeps_its_parameters_and_its_state() -> None:
    model = sharded()
    optimizer = adamw(model.parameters())
    for step in range(2):
        forward_loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        with summon_full_params(model), torch.no_grad():
            model.scale.fill_(2.0)
    assert all(parameter in optimizer.state for parameter in model.parameters())
    assert model.scale.full_tensor().tolist() == [2.0]


def test_a_single_rank_has_full_parameters() -> None:
    from fullshard.testing import run_on_ranks

    run_on_ranks(1, check_single)


def check_single() -> None:
    model = sharded()
    with summon_full_params(model, with_grads=True), torch.no_grad():
        assert not isinstance(model.head.weight, DTensor)
        model.head.weight.fill_(1.0)
    assert model.head.weight.full_tensor().unique().tolist() == [1.0]


@ranks(2)
def test_wrapped_models_are_summoned_by_the_function_as_well() -> None:
    bare = build().to(device())
    expected = {name: p.detach().clone() for name, p in bare.named_parameters()}
    policy = ModuleWrapPolicy({type(bare.blocks[0])})  # type: ignore[index]
    model = FullyShardedDataParallel(bare, auto_wrap_policy=policy, use_orig_params=True)
    with summon_full_params(model):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.detach(), expected[name])
