"""Optimizers that step as soon as gradients are complete, and gradients that are sparse."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from tests.original.training import (
    Net,
    assert_same_parameters,
    average_gradients,
    blocks_policy,
    build,
    train_step,
)
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy
from fullshard.testing import device, ranks

with_both_modes = pytest.mark.parametrize("use_orig_params", [False, True])
STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("before_wrapping", "use_orig_params"), [(False, False), (False, True), (True, True)]
)
@ranks(2)
def test_torchs_optimizers_in_backward_train(
    before_wrapping: bool, use_orig_params: bool, strategy: ShardingStrategy
) -> None:
    bare = build(Net)
    model = copy.deepcopy(bare)
    arguments = {"lr": 0.1, "momentum": 0.9}
    if before_wrapping:
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), arguments)
    model = FSDP(
        model,
        auto_wrap_policy=blocks_policy(),
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
    )
    if not before_wrapping:
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), arguments)
    optimizer = torch.optim.SGD(bare.parameters(), **arguments)

    for step in range(3):
        optimizer.zero_grad()
        train_step(bare, step)
        average_gradients(bare)
        optimizer.step()
        train_step(model, step)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert_same_parameters(bare, model)


@ranks(2)
def test_optimizers_of_parameters_that_are_flattened_away_are_refused() -> None:
    bare = build(Net)
    _apply_optimizer_in_backward(torch.optim.SGD, bare.head.parameters(), {"lr": 0.1})

    with pytest.raises(RuntimeError, match=r"'head.weight' .*use_orig_params=True"):
        FSDP(bare)


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_the_refusal_has_torch_s_words_and_both_ways_out_of_it_work(
    strategy: ShardingStrategy,
) -> None:
    options = {"auto_wrap_policy": blocks_policy(), "sharding_strategy": strategy}
    bare = build(Net)
    early, late = copy.deepcopy(bare), copy.deepcopy(bare)
    _apply_optimizer_in_backward(torch.optim.SGD, early.blocks[1].parameters(), {"lr": 0.1})

    words = "FSDP optimizer in backward only supported with use_orig_params=True!"
    with pytest.raises(RuntimeError, match=rf"of Block was given .*{words} Or .* after wrapping"):
        FSDP(early, **options)

    late = FSDP(late, **options)
    flat = late.blocks[1].parameters()
    _apply_optimizer_in_backward(torch.optim.SGD, flat, {"lr": 0.1})
    train_step(late, 0)
    train_step(bare, 0)
    average_gradients(bare)
    torch.optim.SGD(bare.blocks[1].parameters(), lr=0.1).step()
    assert_same_parameters(bare, late)


@ranks(2)
def test_an_optimizer_of_an_ignored_parameter_stays_its_own() -> None:
    bare = build(Net)
    _apply_optimizer_in_backward(torch.optim.SGD, bare.head.parameters(), {"lr": 0.1})
    before = bare.head.weight.detach().clone()
    model = FSDP(bare, ignored_modules=[bare.head])

    train_step(model, 0)

    assert model.head.weight.grad is None
    assert not torch.equal(model.head.weight, before)


@ranks(2)
def test_a_step_waits_for_the_backward_that_synchronises() -> None:
    bare = build(Net)
    model = FSDP(copy.deepcopy(bare), auto_wrap_policy=blocks_policy(), use_orig_params=True)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)

    with model.no_sync():
        train_step(model, 0)
    assert_same_parameters(bare, model)
    train_step(model, 1)
    train_step(bare, 0)
    train_step(bare, 1)
    average_gradients(bare)
    optimizer.step()

    assert_same_parameters(bare, model)


class Lookup(nn.Module):
    """An embedding whose gradient is sparse, and a linear whose gradient is not."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 3, sparse=True)
        self.linear = nn.Linear(3, 2)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.linear(self.table(index))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("accumulate", [False, True])
@with_both_modes
@ranks(2)
def test_sparse_gradients_of_embeddings_are_reduced(
    use_orig_params: bool, accumulate: bool, strategy: ShardingStrategy
) -> None:
    dense = build(Lookup)
    dense.table.sparse = False
    options = {"use_orig_params": use_orig_params, "sharding_strategy": strategy}
    model = FSDP(build(Lookup), **options)
    index = torch.tensor([1, 1, 4 + dist.get_rank()], device=device())

    if accumulate:
        dense(index + 1).square().sum().backward()
        with model.no_sync():
            model(index + 1).square().sum().backward()
    dense(index).square().sum().backward()
    model(index).square().sum().backward()
    average_gradients(dense)
    for each in (dense, model):
        torch.optim.SGD(each.parameters(), lr=0.5).step()

    assert_same_parameters(dense, model)
