"""Optimizers of whole tensors train a sharded model as one process trains the unsharded one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.marks import in_long_runs
from tests.optim.training import (
    Counting,
    Shampoo,
    WideNet,
    adamw,
    adamw8bit,
    adamw8bit_of_torchao,
    everything,
    is_hidden_matrix,
    muon,
    reference,
    train,
    whole,
    wrapped,
)
from tests.original.training import (
    InPlace,
    Net,
    average_gradients,
    build,
    loss_of,
    train_step,
)

from fullshard import ShardingStrategy
from fullshard.optim import optimizer as optimizer_module
from fullshard.testing import ranks, run_on_ranks

FULL_SHARD = ShardingStrategy.FULL_SHARD
pytestmark = pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
HOW = [FULL_SHARD, InPlace.RESHARD]
STEPS = 200


def sizes_and_how(*always: int) -> Any:
    """Runs on 2, 3 and 4 ranks, of which those on other numbers than these are long ones."""
    return pytest.mark.parametrize(
        ("size", "how"),
        [
            pytest.param(size, how, marks=() if size in always else in_long_runs)
            for size, how in ((2, InPlace.RESHARD), (3, FULL_SHARD), (4, FULL_SHARD))
        ],
    )


@sizes_and_how(2)
def test_two_hundred_steps_of_muon_are_those_of_one_process(size: int, how: Any) -> None:
    run_on_ranks(size, many_steps, how, muon, is_hidden_matrix)


@sizes_and_how(3)
def test_two_hundred_steps_of_shampoo_are_those_of_one_process(size: int, how: Any) -> None:
    run_on_ranks(size, many_steps, how, Shampoo, is_hidden_matrix)


@sizes_and_how(3)
def test_two_hundred_steps_of_8_bit_adamw_are_those_of_one_process(size: int, how: Any) -> None:
    pytest.importorskip("bitsandbytes")
    run_on_ranks(size, many_steps, how, adamw8bit, everything)


def many_steps(how: Any, make: Any, select: Any) -> None:
    model = wrapped(how=how)
    train(
        model,
        whole(make, model, adamw if select is is_hidden_matrix else None, select=select),
        reference(model, make, select=select),
        range(STEPS),
    )


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "how", [ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD, InPlace.KEEP, FULL_SHARD]
)
def test_every_strategy_steps_alike(size: int, how: Any) -> None:
    run_on_ranks(size, few_steps, how)


def few_steps(how: Any) -> None:
    model = wrapped(how=how)
    train(model, whole(muon, model), reference(model, muon), range(5))


@contextlib.contextmanager
def one_parameter_per_round() -> Iterator[None]:
    limit, optimizer_module._ROUND_NUMEL = optimizer_module._ROUND_NUMEL, 1
    try:
        yield
    finally:
        optimizer_module._ROUND_NUMEL = limit


@ranks(2)
def test_a_whole_run_on_two_ranks_is_that_of_one_process_with_the_mean_of_gradients() -> None:
    model, bare = wrapped(), build(Net)
    optimizer = whole(muon, model)
    expected = reference(model, muon, bare=bare)

    for step in range(20):
        optimizer.zero_grad()
        bare.zero_grad()
        loss = train_step(model, step)
        bare_loss = train_step(bare, step)
        average_gradients(bare)
        optimizer.step()
        for each in expected.optimizers:
            each.step()
        # The mean of two is exact in either order.
        assert torch.equal(loss, bare_loss)


@ranks(2)
def test_8_bit_adamw_of_torchao_steps_as_in_one_process() -> None:
    pytest.importorskip("torchao")
    model = wrapped(build(WideNet))
    optimizer = whole(adamw8bit_of_torchao, model)
    bare = build(WideNet)
    train(model, optimizer, reference(model, adamw8bit_of_torchao, bare=bare), range(3))
    kinds = {type(v).__name__ for states in optimizer.state.values() for v in states.values()}
    assert "OptimState8bit" in kinds


@ranks(3)
def test_an_optimizer_that_counts_its_own_steps_counts_each_once() -> None:
    model = wrapped()
    with one_parameter_per_round():
        optimizer = whole(Counting, model)
    assert len(optimizer._rounds) > 1
    train(model, optimizer, reference(model, Counting), range(4))
    assert optimizer.param_groups[0]["count"] == 4


@ranks(4)
def test_many_rounds_train_as_one() -> None:
    for how in HOW:
        model = wrapped(how=how)
        with one_parameter_per_round():
            optimizer = whole(muon, model, select=lambda name, p: p.dim() == 2)
        assert len(optimizer._rounds) == 2
        is_matrix = reference(model, muon, select=lambda name, p: p.dim() == 2)
        train(model, optimizer, is_matrix, range(5))


@ranks(2)
def test_the_step_returns_the_loss_of_a_closure_that_it_calls_once() -> None:
    model = wrapped()
    optimizer = whole(muon, model)
    expected = reference(model, muon)
    calls = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        calls.append(loss.item())
        expected.take_gradients()
        return loss

    assert optimizer.step(closure).item() == calls[0]
    expected.step()
    expected.assert_same()
    assert len(calls) == 1
