"""Units run any number of times, in any order, with any number of backwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.original.training import (
    MODES,
    STRATEGIES,
    WIDTH,
    Block,
    Net,
    adam,
    assert_at_rest,
    assert_same_parameters,
    average_gradients,
    blocks_policy,
    build,
    compare,
    compare_models,
    inputs,
    loss_of,
    train_step,
)
from torch import nn

from fullshard import BackwardPrefetch, ShardingStrategy
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.testing import ranks

EACH_MODE = pytest.mark.parametrize(("strategy", "use_orig_params"), MODES)
EACH_STRATEGY = pytest.mark.parametrize("strategy", STRATEGIES)


@EACH_MODE
@ranks(2)
def test_several_forwards_before_one_backward(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    def step_of(model: nn.Module, step: int) -> torch.Tensor:
        loss = loss_of(model, step) + loss_of(model, step + 50) + 2 * loss_of(model, step + 90)
        loss.backward()
        return loss.detach()

    compare(step_of=step_of, sharding_strategy=strategy, use_orig_params=use_orig_params)


@EACH_MODE
@ranks(2)
def test_a_summon_between_two_forwards(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    def step_of(model: nn.Module, step: int) -> torch.Tensor:
        loss = loss_of(model, step)
        if isinstance(model, FSDP):
            with FSDP.summon_full_params(model):
                assert model.module.head.weight.shape == (3, WIDTH)
        loss = loss + loss_of(model, step + 50)
        loss.backward()
        return loss.detach()

    compare(step_of=step_of, sharding_strategy=strategy, use_orig_params=use_orig_params)


@EACH_MODE
@ranks(2)
def test_an_evaluation_between_forward_and_backward(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    def step_of(model: nn.Module, step: int) -> torch.Tensor:
        loss = loss_of(model, step)
        with torch.no_grad():
            loss_of(model, step + 50)
        with torch.inference_mode():
            loss_of(model, step + 51)
        loss.backward()
        return loss.detach()

    compare(step_of=step_of, sharding_strategy=strategy, use_orig_params=use_orig_params)


@EACH_MODE
@ranks(2)
def test_several_backwards_through_one_forward(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    def step_of(model: nn.Module, step: int) -> torch.Tensor:
        loss = loss_of(model, step)
        loss.backward(retain_graph=True)
        (3 * loss).backward(retain_graph=True)
        loss.backward()
        return loss.detach()

    compare(step_of=step_of, sharding_strategy=strategy, use_orig_params=use_orig_params)


@EACH_STRATEGY
@ranks(2)
def test_backwards_and_forwards_in_turn_through_kept_graphs(strategy: ShardingStrategy) -> None:
    def step_of(model: nn.Module, step: int) -> torch.Tensor:
        first = loss_of(model, step)
        first.backward(retain_graph=True)
        second = loss_of(model, step + 50)
        first.backward(retain_graph=True)
        second.backward(retain_graph=True)
        with torch.no_grad():
            loss_of(model, step + 51)
        (first + second).backward()
        return (first + second).detach()

    compare(step_of=step_of, sharding_strategy=strategy)


@EACH_STRATEGY
@ranks(2)
def test_losses_of_parts_go_backward_one_after_the_other(strategy: ShardingStrategy) -> None:
    def step_of(model: nn.Module, step: int) -> torch.Tensor:
        output = model(inputs(step))
        for column in range(2):
            output[:, column].square().mean().backward(retain_graph=True)
        loss = output[:, 2].square().mean()
        loss.backward()
        return loss.detach()

    compare(step_of=step_of, sharding_strategy=strategy)


class Interleaved(nn.Module):
    """Runs its blocks in an order that is given, any number of times each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor, order: str) -> torch.Tensor:
        x = self.embed(x)
        for name in order:
            x = self.blocks[int(name)](x)
        return x


@pytest.mark.parametrize("forward_prefetch", [False, True])
@pytest.mark.parametrize("prefetch", [None, *BackwardPrefetch])
@EACH_STRATEGY
@ranks(2)
def test_units_run_in_any_order_any_number_of_times(
    strategy: ShardingStrategy, prefetch: BackwardPrefetch | None, forward_prefetch: bool
) -> None:
    orders = ["012", "0101", "2222", "021012", "1", "", "210"]

    def step_of(model: nn.Module, step: int) -> torch.Tensor:
        loss = model(inputs(step), orders[step]).square().mean()
        loss.backward()
        return loss.detach()

    compare(
        Interleaved,
        step_of,
        steps=len(orders),
        sharding_strategy=strategy,
        backward_prefetch=prefetch,
        forward_prefetch=forward_prefetch,
    )


@EACH_STRATEGY
@ranks(2)
def test_a_unit_that_calls_itself(strategy: ShardingStrategy) -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5)
            self.outer: list[Any] = []

        def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
            x = torch.tanh(self.linear(x))
            return (self.outer[0] if self.outer else self)(x, depth - 1) if depth else x

    reference, bare = build(Recursive), build(Recursive)
    model = FSDP(bare, sharding_strategy=strategy, use_orig_params=True)
    bare.outer.append(model)

    def step_of(model: nn.Module, step: int) -> torch.Tensor:
        loss = model(inputs(step), 3).square().mean()
        loss.backward()
        return loss.detach()

    compare_models(reference, model, step_of)


@EACH_MODE
@ranks(2)
def test_many_forwards_without_backward_between_training_steps(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """As a generate() loop does: through the wrapper, and calling a nested unit directly."""
    reference = build(Net)
    model = FSDP(
        build(Net),
        sharding_strategy=strategy,
        auto_wrap_policy=blocks_policy(),
        use_orig_params=use_orig_params,
    )
    optimizers = adam(reference), adam(model)
    for step in range(2):
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                for token in range(3):
                    torch.testing.assert_close(model(inputs(token)), reference(inputs(token)))
                    hidden = inputs(token, 2, WIDTH)
                    expected = reference.blocks[1](hidden)
                    torch.testing.assert_close(model.blocks[1](hidden), expected)
                    assert_at_rest(model)
        for each, optimizer in zip((reference, model), optimizers, strict=True):
            optimizer.zero_grad()
            train_step(each, step)
            if each is reference:
                average_gradients(each)
            optimizer.step()
        assert_same_parameters(reference, model)


@EACH_MODE
@ranks(2)
def test_a_nested_unit_can_be_trained_directly(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    def step_of(model: Any, step: int) -> torch.Tensor:
        loss = model.blocks[step % 3](inputs(step, 4, WIDTH)).square().mean()
        loss.backward()
        return loss.detach() + train_step(model, step)

    compare(step_of=step_of, sharding_strategy=strategy, use_orig_params=use_orig_params)


@EACH_STRATEGY
@ranks(2)
def test_a_nested_unit_can_run_before_its_root_ever_did(strategy: ShardingStrategy) -> None:
    reference = build(Net)
    model = FSDP(
        build(Net),
        sharding_strategy=strategy,
        auto_wrap_policy=blocks_policy(),
        use_orig_params=True,
    )
    hidden = inputs(0, 2, WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(model.blocks[2](hidden), reference.blocks[2](hidden))
    compare_models(reference, model)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


@EACH_STRATEGY
@ranks(2)
def test_a_registered_method_gathers_the_units_parameters(strategy: ShardingStrategy) -> None:
    def step_of(model: Any, step: int) -> torch.Tensor:
        loss = model.encode(inputs(step)).square().mean()
        loss.backward()
        return loss.detach()

    reference = build(Encoder)
    model = FSDP(build(Encoder), sharding_strategy=strategy, use_orig_params=True)
    model.register_forward_method("encode")
    with torch.no_grad():
        torch.testing.assert_close(model.encode(inputs(0)), reference.encode(inputs(0)))
    compare_models(reference, model, step_of)
