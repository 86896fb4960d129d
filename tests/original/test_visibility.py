"""What the user finds under a parameter's name: full tensors inside, a rank's own piece outside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.original.training import (
    STRATEGIES,
    Net,
    average_gradients,
    blocks_policy,
    build,
    compare,
    inputs,
)
from torch import nn

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy
from fullshard.api import NO_RESHARD_AFTER_FORWARD_STRATEGIES
from fullshard.engine.params.locations import clean_tensor_name
from fullshard.testing import device, ranks
from fullshard.wrap import always_wrap_policy


class TwoLinears(nn.Module):
    """The worked example: 25 elements in one unit, 35 + (1) + 7 in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.lin1 = nn.Linear(5, 5, bias=False)
        self.lin2 = nn.Linear(5, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin2(torch.relu(self.lin1(x)))


SHAPES = {"lin1.weight": (5, 5), "lin2.weight": (7, 5), "lin2.bias": (7,)}


def own_pieces(full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The example's cut on two ranks, written down by hand."""
    flat = {name: tensor.detach().flatten() for name, tensor in full.items()}
    if dist.get_rank() == 0:
        return {
            "lin1.weight": flat["lin1.weight"][:13],
            "lin2.weight": flat["lin2.weight"][:22],
            "lin2.bias": flat["lin2.bias"][:0],
        }
    return {
        "lin1.weight": flat["lin1.weight"][13:],
        "lin2.weight": flat["lin2.weight"][22:],
        "lin2.bias": flat["lin2.bias"],
    }


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def wrapped(**options: Any) -> tuple[nn.Module, FSDP]:
    bare = build(TwoLinears)
    model = FSDP(
        build(TwoLinears), auto_wrap_policy=always_wrap_policy, use_orig_params=True, **options
    )
    return bare, model


def assert_own_pieces(bare: nn.Module, model: FSDP) -> None:
    expected = own_pieces(dict(bare.named_parameters()))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach(), expected[name]), name


@pytest.mark.parametrize("policy", [None, always_wrap_policy])
@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_names_are_the_original_ones_before_within_and_after_a_step(
    strategy: ShardingStrategy, policy: Any
) -> None:
    model = FSDP(
        build(TwoLinears),
        sharding_strategy=strategy,
        auto_wrap_policy=policy,
        use_orig_params=True,
    )
    seen: list[list[str]] = [[n for n, _ in model.named_parameters()]]
    model.module.register_forward_pre_hook(
        lambda module, _: seen.append([clean_tensor_name(n) for n, _ in module.named_parameters()])
    )
    loss = model(inputs(0)).sum()
    seen.append([clean_tensor_name(n) for n, _ in nn.Module.named_parameters(model)])
    loss.backward()
    seen.append([n for n, _ in model.named_parameters()])
    with FSDP.summon_full_params(model):
        seen.append([n for n, _ in model.named_parameters()])
    assert seen == [list(SHAPES)] * 5


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_a_module_finds_its_full_parameters_during_forward(strategy: ShardingStrategy) -> None:
    bare = build(TwoLinears)
    model = FSDP(build(TwoLinears), sharding_strategy=strategy, use_orig_params=True)
    seen: dict[str, torch.Tensor] = {}
    model.module.register_forward_pre_hook(
        lambda module, _: seen.update({n: p.detach().clone() for n, p in module.named_parameters()})
    )
    model(inputs(0))
    assert list(seen) == list(SHAPES)
    for name, parameter in bare.named_parameters():
        assert torch.equal(seen[name], parameter.detach())


@pytest.mark.parametrize("strategy", [*STRATEGIES[:2]])
@ranks(2)
def test_a_rank_sees_its_own_piece_of_parameters_and_gradients_outside(
    strategy: ShardingStrategy,
) -> None:
    bare, model = wrapped(sharding_strategy=strategy)
    assert_own_pieces(bare, model)
    for each in (bare, model):
        each(inputs(0)).square().sum().backward()
    average_gradients(bare)
    assert_own_pieces(bare, model)
    expected = own_pieces({name: p.grad for name, p in bare.named_parameters()})  # type: ignore[misc]
    for name, parameter in model.named_parameters():
        if parameter.numel() == 0:
            assert parameter.grad is None or parameter.grad.numel() == 0
        else:
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, expected[name])


@ranks(2)
def test_without_sharding_the_shapes_are_always_the_original_ones() -> None:
    bare, model = wrapped(sharding_strategy=ShardingStrategy.NO_SHARD)
    assert shapes(model) == SHAPES
    loss = model(inputs(0)).square().sum()
    assert shapes(model) == SHAPES
    loss.backward()
    assert shapes(model) == SHAPES
    bare(inputs(0)).square().sum().backward()
    average_gradients(bare)
    for expected, found in zip(bare.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_parameters_can_be_read_between_forward_and_backward(strategy: ShardingStrategy) -> None:
    bare, model = wrapped(sharding_strategy=strategy)
    loss = model(inputs(0)).square().sum()
    if strategy in NO_RESHARD_AFTER_FORWARD_STRATEGIES or strategy is ShardingStrategy.NO_SHARD:
        assert shapes(model) == SHAPES
        for expected, found in zip(bare.parameters(), model.parameters(), strict=True):
            assert torch.equal(found.detach(), expected.detach())
    else:
        assert_own_pieces(bare, model)
    assert [p.requires_grad for p in model.parameters()] == [True] * 3
    loss.backward()
    if strategy is not ShardingStrategy.NO_SHARD:
        assert_own_pieces(bare, model)


@ranks(2)
def test_the_flat_parameter_describes_the_originals() -> None:
    _, model = wrapped()
    flat = model.lin2._flat_param
    assert flat._fqns == ("weight", "bias")
    assert flat._shapes == ((7, 5), (7,))
    assert flat._numels == (35, 7)
    assert len(flat._params) == 2
    assert flat._params[0] is model.lin2.weight
    assert flat._params[1] is model.lin2.bias
    assert flat.numel() == 22
    assert model._flat_param is None


@ranks(2)
def test_a_nested_path_is_the_name_of_a_parameter_of_the_units_own() -> None:
    model = FSDP(build(Net), auto_wrap_policy=blocks_policy(), use_orig_params=True)
    assert model._flat_param._fqns == ("embed.weight", "embed.bias", "head.weight", "head.bias")
    assert model.blocks[1]._flat_param._fqns == ("scale", "up.weight", "up.bias", "down.weight")


@ranks(2)
def test_without_original_parameters_the_flat_parameter_stands_for_them() -> None:
    model = FSDP(build(TwoLinears), auto_wrap_policy=always_wrap_policy)
    assert [tuple(p.shape) for p in model.parameters()] == [(13,), (21,)]
    assert model.lin1._flat_param._params is None


@ranks(2)
def test_parameter_objects_stay_the_same_through_wrapping_and_training() -> None:
    bare = build(TwoLinears)
    before = list(bare.parameters())
    model = FSDP(bare, auto_wrap_policy=always_wrap_policy, use_orig_params=True)
    model(inputs(0)).sum().backward()
    with FSDP.summon_full_params(model):
        pass
    after = list(model.parameters())
    assert all(old is new for old, new in zip(before, after, strict=True))
    assert all(type(p) is nn.Parameter for p in after)


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_mixed_requires_grad_in_one_unit_is_kept_per_parameter(strategy: ShardingStrategy) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 3))
        model[0].bias.requires_grad = False
        model[2].bias.requires_grad = False
        return model

    model = compare(make, sharding_strategy=strategy, auto_wrap_policy=lambda **_: False)
    expected = {"0.weight": True, "0.bias": False, "2.weight": True, "2.bias": False}
    assert {n: p.requires_grad for n, p in model.named_parameters()} == expected
    assert model[0].bias.grad is None
    with FSDP.summon_full_params(model):
        assert {n: p.requires_grad for n, p in model.named_parameters()} == expected


@ranks(3)
def test_the_pieces_of_three_ranks_make_up_the_whole() -> None:
    bare, model = wrapped()
    for name, parameter in model.named_parameters():
        sizes = [None] * 3
        dist.all_gather_object(sizes, parameter.detach().cpu())
        whole = torch.cat(sizes)
        expected = dict(bare.named_parameters())[name]
        assert torch.equal(whole.view(expected.shape), expected.detach().cpu())
        assert parameter.device == device()
