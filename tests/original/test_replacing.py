"""Parameters that the user replaces between steps, by others or by each other."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.original.training import STRATEGIES, assert_same_parameters, build, inputs
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy
from fullshard.testing import ranks
from fullshard.wrap import ModuleWrapPolicy


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_data_is_replaced_after_steps_and_again(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    reference = build(Model)
    model = FSDP(
        build(Model),
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=use_orig_params,
    )
    for step in range(3):
        output = model(inputs(step))
        torch.testing.assert_close(output, reference(inputs(step)))
        output.sum().backward()
        for parameter in (*model.parameters(), *reference.parameters()):
            parameter.data = parameter.data * 1.5
    assert_same_parameters(reference, model)


class Vectors(nn.Module):
    """Four vectors of one size: two ranks hold two whole ones each."""

    def __init__(self) -> None:
        super().__init__()
        for name in "abcd":
            self.register_parameter(name, nn.Parameter(torch.randn(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.a * self.b).sum() + (x * self.c * self.d.square()).sum()


@pytest.mark.parametrize("through_data", [True, False])
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
@ranks(2)
def test_parameters_can_be_exchanged(strategy: ShardingStrategy, through_data: bool) -> None:
    reference = build(Vectors)
    model = FSDP(build(Vectors), sharding_strategy=strategy, use_orig_params=True)
    for module in (reference, model.module):
        for one, other in ("ab", "cd"):
            left, right = getattr(module, one), getattr(module, other)
            if through_data:
                left.data, right.data = right.data, left.data
            else:
                setattr(module, one, right)
                setattr(module, other, left)
    torch.testing.assert_close(model(inputs(0, 4)), reference(inputs(0, 4)))
    assert_same_parameters(reference, model)


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
@ranks(2)
def test_parameters_tied_after_wrapping_train_as_one(strategy: ShardingStrategy) -> None:
    reference = build(Vectors)
    model = FSDP(build(Vectors), sharding_strategy=strategy, use_orig_params=True)
    for module in (reference, model.module):
        module.b, module.d = module.a, module.c
    reference = DDP(reference)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (reference, model)]
    for step in range(3):
        losses = [each(inputs(step, 4)) for each in (reference, model)]
        torch.testing.assert_close(losses[1], losses[0])
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
@ranks(2)
def test_tensors_that_stand_in_for_one_call_are_refused_and_change_nothing(
    strategy: ShardingStrategy,
) -> None:
    reference = build(Model)
    model = FSDP(build(Model), sharding_strategy=strategy, use_orig_params=True)
    names = [name for name, _ in nn.Module.named_parameters(model)]
    others = dict(zip(names, map(torch.randn_like, reference.parameters()), strict=True))
    with pytest.raises(RuntimeError, match=r"0\.weight' was replaced by a plain tensor"):
        torch.func.functional_call(model, others, inputs(0))
    assert_same_parameters(reference, model)


class Tied(nn.Module):
    """An embedding and a head that users like to tie; wrapped in one unit, or in two."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(5, 4, bias=False)
        self.head = nn.Linear(5, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embedding(x) + self.head(2 * x)


def flat_model(strategy: ShardingStrategy, units: int) -> FSDP:
    policy = ModuleWrapPolicy({nn.Linear}) if units > 1 else None
    return FSDP(build(Tied), sharding_strategy=strategy, auto_wrap_policy=policy)


@pytest.mark.parametrize("after_a_step", [False, True])
@pytest.mark.parametrize("units", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_flat_parameters_tied_after_wrapping_are_refused(
    strategy: ShardingStrategy, units: int, after_a_step: bool
) -> None:
    model = flat_model(strategy, units)
    if after_a_step:
        model(inputs(0)).sum().backward()
    head = model.head.module if units > 1 else model.head
    old = head.weight
    head.weight = model.embedding.weight
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"weight' was .* after wrapping.*before wrapping"):
            model(inputs(0))
    head.weight = old
    with torch.no_grad():
        torch.testing.assert_close(model(inputs(0)), build(Tied)(inputs(0)))
    head.weight = model.embedding.weight
    with pytest.raises(RuntimeError, match=r"weight' was .* after wrapping"):
        model.double()


@pytest.mark.parametrize("units", [1, 2])
@ranks(2)
def test_flat_parameters_tied_while_they_are_summoned_are_refused(units: int) -> None:
    model = flat_model(ShardingStrategy.FULL_SHARD, units)
    head = model.head.module if units > 1 else model.head
    with (
        pytest.raises(RuntimeError, match=r"weight' was tied to .*weight' after wrapping"),
        FSDP.summon_full_params(model),
    ):
        head.weight = model.embedding.weight
    torch.testing.assert_close(model(inputs(0)), build(Tied)(inputs(0)))


@ranks(2)
def test_what_is_assigned_to_a_wrapper_in_place_of_a_flat_parameter_is_refused() -> None:
    model = flat_model(ShardingStrategy.FULL_SHARD, units=2)
    with pytest.raises(RuntimeError, match="weight' was replaced after wrapping"):
        model.head.weight = model.embedding.weight
    model.head.temperature = torch.ones(())
    torch.testing.assert_close(model(inputs(0)), build(Tied)(inputs(0)))


@pytest.mark.parametrize("name", ["weight", "bias"])
@ranks(2)
def test_what_replaces_or_removes_a_view_of_a_flat_parameter_is_refused(name: str) -> None:
    model = FSDP(build(Model), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    module = model.module.layers[2].module
    setattr(module, name, nn.Parameter(torch.zeros(3)))
    with pytest.raises(RuntimeError, match=f"{name}' was replaced after wrapping"):
        model(inputs(0))

    model = FSDP(build(Model), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    delattr(model.module.layers[2].module, name)
    with pytest.raises(RuntimeError, match=f"{name}' was removed from its Linear after wrapping"):
        model(inputs(0))


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_copies_of_flat_models_that_name_their_wrapper_are_no_replacements(
    strategy: ShardingStrategy,
) -> None:
    model = FSDP(build(Model), sharding_strategy=strategy)
    model.register_forward_method("extra_repr")
    copied = copy.deepcopy(model)
    torch.testing.assert_close(copied(inputs(0)), model(inputs(0)))
