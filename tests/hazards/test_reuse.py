"""Shared parameters; units that run twice, in forward only, not at all, or without gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.original.training import (
    EITHER_API,
    EITHER_MODES,
    WIDTH,
    Block,
    InPlace,
    Net,
    adam,
    assert_at_rest,
    assert_same_parameters,
    average_gradients,
    blocks_policy,
    build,
    compare,
    inputs,
    loss_of,
    module_of,
    sharded,
    train_step,
)
from torch import nn

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy
from fullshard.testing import ranks

EACH_MODE = pytest.mark.parametrize(("strategy", "use_orig_params"), EITHER_MODES)
EACH_STRATEGY = pytest.mark.parametrize("strategy", EITHER_API)


class Tied(nn.Module):
    """Weights shared between modules, and one that hangs in two places of the same module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight
        self.alias = self.first.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x.abs() * 3).long().clamp(max=10)
        hidden = torch.tanh(self.first(self.embed(tokens))) + self.alias
        hidden = self.second(self.blocks[1](self.blocks[0](hidden)))
        return self.head(hidden)


@EACH_MODE
@pytest.mark.parametrize("wrap_blocks", [True, False])
@ranks(2)
def test_parameters_shared_inside_a_unit_get_the_gradients_of_all_their_uses(
    wrap_blocks: bool, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    model = compare(
        Tied,
        sharding_strategy=strategy,
        auto_wrap_policy=blocks_policy() if wrap_blocks else lambda **_: False,
        use_orig_params=use_orig_params,
    )
    with FSDP.summon_full_params(model):
        module: Any = module_of(model)
        assert module.first.weight is module.second.weight
        assert module.embed.weight is module.head.weight
        first, second = (getattr(block, "module", block) for block in module.blocks)
        assert first.up.weight is second.up.weight


@EACH_STRATEGY
@ranks(3)
def test_shared_parameters_are_counted_once(strategy: ShardingStrategy) -> None:
    bare = build(Tied)
    expected = sum(p.numel() for p in bare.parameters())
    model = sharded(bare, sharding_strategy=strategy, use_orig_params=True)
    if isinstance(strategy, InPlace):
        assert sum(p.numel() for p in model.parameters()) == expected
    else:
        assert sum(model._flat_param._numels) == expected


@EACH_MODE
@ranks(2)
def test_a_unit_used_in_two_places_runs_twice_before_one_backward(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(5, WIDTH)
            self.blocks = nn.ModuleList([Block()])
            self.same = self.blocks[0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.same(self.blocks[0](self.embed(x)))

    reference = build(Twice)
    bare = build(Twice)
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    bare.blocks[0] = bare.same = sharded(bare.same, **options)
    model = sharded(bare, **options)
    optimizers = adam(reference), adam(model)
    for step in range(3):
        for each, optimizer in zip((reference, model), optimizers, strict=True):
            optimizer.zero_grad()
            train_step(each, step)
            if each is reference:
                average_gradients(each)
            optimizer.step()
        assert_same_parameters(reference, model)


@EACH_MODE
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@ranks(2)
def test_forwards_that_no_backward_follows_leave_nothing_behind(
    context: Any, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    def step_of(model: nn.Module, step: int) -> torch.Tensor:
        with context():
            model.eval()
            first = loss_of(model, step)
            if isinstance(model, FSDP):
                assert_at_rest(model)
            model.train()
        train_step(model, step)
        return first.clone()

    compare(step_of=step_of, sharding_strategy=strategy, use_orig_params=use_orig_params)


class FrozenBelow(nn.Module):
    """A frozen norm between two units; behind them a trainable one, whose gradients come first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.below = nn.LayerNorm(WIDTH)
        self.second = Block()
        self.behind = nn.LayerNorm(WIDTH)
        nn.init.normal_(self.below.weight)
        self.below.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.behind(self.second(self.below(self.first(x))))


@EACH_STRATEGY
@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
@ranks(2)
def test_frozen_parameters_stay_until_the_backward_of_each_forward_has_used_them(
    strategy: ShardingStrategy, apart: bool
) -> None:
    def step_of(model: nn.Module, step: int) -> torch.Tensor:
        losses = [model(inputs(step + n, 4, WIDTH)).pow(3).sum() for n in range(3)]
        for loss in losses[:2] if apart else [losses[0] + losses[1]]:
            loss.backward()
        return losses[1]

    compare(FrozenBelow, step_of, sharding_strategy=strategy, auto_wrap_policy=blocks_policy())


@EACH_STRATEGY
@ranks(2)
def test_a_training_forward_whose_output_is_thrown_away_is_harmless(
    strategy: ShardingStrategy,
) -> None:
    def step_of(model: nn.Module, step: int) -> torch.Tensor:
        loss_of(model, step + 50)
        loss_of(model, step + 51)
        return train_step(model, step)

    compare(step_of=step_of, sharding_strategy=strategy)


@EACH_STRATEGY
@ranks(2)
def test_evaluation_right_after_an_optimizer_step_sees_the_new_parameters(
    strategy: ShardingStrategy,
) -> None:
    """Under SHARD_GRAD_OP a forward without backward leaves full parameters: they must go."""
    reference = build(Net)
    model = sharded(
        build(Net),
        sharding_strategy=strategy,
        auto_wrap_policy=blocks_policy(),
        use_orig_params=True,
    )
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (reference, model)]
    loss_of(model, 0)
    for each, sgd in zip((reference, model), optimizers, strict=True):
        train_step(each, 0)
        if each is reference:
            average_gradients(each)
        sgd.step()
    with torch.no_grad():
        torch.testing.assert_close(model(inputs(1)), reference(inputs(1)))


@EACH_STRATEGY
@ranks(2)
def test_a_part_of_the_model_can_run_without_gradients(strategy: ShardingStrategy) -> None:
    class Trunk(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                x = self.blocks[0](self.embed(x))
            x = self.blocks[2](self.blocks[1](x))
            return self.head(x)

    model = compare(Trunk, sharding_strategy=strategy)
    assert all(p.grad is None for n, p in model.named_parameters() if "embed" in n)
    assert all(p.grad is None for n, p in model.named_parameters() if "blocks.0" in n)


@EACH_MODE
@ranks(2)
def test_a_unit_that_is_not_used_in_some_steps_is_not_stepped_in_them(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    class Skips(Net):
        skipped = -1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for index, block in enumerate(self.blocks):
                if index != self.skipped:
                    x = block(x)
            return self.head(x)

    def step_of(model: Any, step: int) -> torch.Tensor:
        module = model.module if isinstance(model, FSDP) else model
        module.skipped = step - 1
        return train_step(model, step)

    compare(Skips, step_of, steps=5, sharding_strategy=strategy, use_orig_params=use_orig_params)


@EACH_MODE
@ranks(2)
def test_a_unit_whose_inputs_need_no_gradient(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    class Integers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[1](self.blocks[0](self.embed((x.abs() * 3).long().clamp(max=10))))

    def policy(module: nn.Module, recurse: bool, **_: Any) -> bool:
        return recurse or isinstance(module, (Block, nn.Embedding))

    compare(
        Integers,
        sharding_strategy=strategy,
        auto_wrap_policy=policy,
        use_orig_params=use_orig_params,
    )


@EACH_STRATEGY
@ranks(2)
def test_a_unit_without_inputs_and_one_without_parameters(strategy: ShardingStrategy) -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Parameter(torch.randn(5))

        def forward(self) -> torch.Tensor:
            return self.value * 2

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.constant = Constant()
            self.activation = nn.Tanh()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.activation(x * self.constant())

    compare(
        Uses,
        sharding_strategy=strategy,
        auto_wrap_policy=lambda module, recurse, **_: True,
    )
