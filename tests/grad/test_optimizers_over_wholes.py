"""Optimizers that compute with whole parameters, or with all of them, are told of over shards."""

from __future__ import annotations

import copy
import time
import warnings
from typing import Any

import pytest
import torch
from tests.original.training import Net, blocks_policy, build, train_step
from torch import nn
from torch._dynamo.utils import counters

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy
from fullshard.engine.init import optimizer_warnings as optimizers
from fullshard.testing import ranks, run_on_ranks

FULL_SHARD, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD
with_both_modes = pytest.mark.parametrize("use_orig_params", [False, True])


class LineSearch(torch.optim.LBFGS):
    """A user's own, made of torch's."""


class Lamb(torch.optim.SGD):
    """Stands for another library's optimizer of that name."""


def wrap(strategy: ShardingStrategy, use_orig_params: bool, bare: nn.Module | None = None) -> FSDP:
    return FSDP(
        bare or build(Net),
        auto_wrap_policy=blocks_policy(),
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """One step; returns what was warned of in it."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        return train_step(model, 0)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        optimizer.step(closure)
    return [str(each.message) for each in found if "whole model" in str(each.message)]


@pytest.mark.parametrize("make", [torch.optim.LBFGS, LineSearch, torch.optim.Adafactor, Lamb])
@with_both_modes
@ranks(2)
def test_the_first_step_on_shards_is_warned_of_and_no_other(
    use_orig_params: bool, make: Any
) -> None:
    model = wrap(FULL_SHARD, use_orig_params)
    options = {"max_iter": 1} if issubclass(make, torch.optim.LBFGS) else {}
    optimizer = make(model.parameters(), lr=0.01, **options)

    (message,) = step(model, optimizer)
    assert message.startswith(make.__name__)
    assert "shards, which differ between ranks" in message
    assert "sharding_strategy=NO_SHARD and use_orig_params=True" in message
    assert step(model, optimizer) == []

    another = copy.deepcopy(model)
    assert len(step(another, make(another.parameters(), lr=0.01, **options))) == 1


class AdamW8bit(torch.optim.AdamW):
    """Stands for another library's optimizer of that name."""


@with_both_modes
@ranks(2)
def test_optimizers_that_go_by_blocks_are_told_what_gives_them_whole_tensors(
    use_orig_params: bool,
) -> None:
    model = wrap(FULL_SHARD, use_orig_params)
    (message,) = step(model, AdamW8bit(model.parameters(), lr=0.01))
    assert message.startswith("AdamW8bit computes with blocks of each parameter")
    assert "Give it whole tensors, with fullshard.optim.whole" in message


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
@with_both_modes
@ranks(2)
def test_optimizers_that_go_by_elements_are_not_warned_of(use_orig_params: bool, make: Any) -> None:
    model = wrap(FULL_SHARD, use_orig_params)
    assert step(model, make(model.parameters(), lr=0.01)) == []


@with_both_modes
@pytest.mark.parametrize("size", [1, 2])
def test_where_every_rank_has_everything_nothing_is_wrong(size: int, use_orig_params: bool) -> None:
    run_on_ranks(size, check_whole, use_orig_params)


def check_whole(use_orig_params: bool) -> None:
    model = wrap(NO_SHARD, use_orig_params)
    assert step(model, torch.optim.LBFGS(model.parameters(), max_iter=1)) == []
    found = step(model, torch.optim.Adafactor(model.parameters()))
    if use_orig_params:
        assert found == []
    else:
        assert "flat parameters, which contain several" in found[0]


@ranks(2)
def test_ignored_parameters_are_whole() -> None:
    bare = build(Net)
    model = FSDP(bare, ignored_modules=[bare.head])
    assert step(model, torch.optim.Adafactor(model.head.parameters())) == []
    assert len(step(model, torch.optim.Adafactor(model.parameters()))) == 1


@ranks(2)
def test_muon_is_refused_over_shards_and_the_reason_is_told() -> None:
    bare = build(Net)
    weights = [p for p in bare.parameters() if p.dim() == 2]
    early = torch.optim.Muon(weights)
    model = wrap(FULL_SHARD, True, bare)
    # Its own check is at construction, and shards have one dimension.
    with pytest.raises(ValueError, match="2D"):
        torch.optim.Muon([p for p in model.parameters() if p.numel()])
    train_step(model, 0)
    with (
        pytest.warns(UserWarning, match=r"Muon computes with each parameter as a whole.*or fail"),
        pytest.raises(ValueError, match="2D"),
    ):
        early.step()


@ranks(2)
def test_the_hook_is_registered_once_and_costs_next_to_nothing() -> None:
    for _ in range(2):
        model = wrap(FULL_SHARD, True)
    assert len(optimizers.watching) == 1
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    count = 10_000
    best = min(_seconds(optimizer, count) for _ in range(5)) / count
    # It takes 0.3 µs; the step of four parameters without momentum takes 20 µs.
    assert best < 5e-6


def _seconds(optimizer: torch.optim.Optimizer, count: int) -> float:
    begun = time.perf_counter()
    for _ in range(count):
        optimizers._before_step(optimizer, (), {})
    return time.perf_counter() - begun


@ranks(2)
def test_compiled_steps_are_not_broken_by_the_hook() -> None:
    model = wrap(FULL_SHARD, True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_step(model, 0)
    expected = [p.detach() - 0.1 * p.grad for p in model.parameters() if p.grad is not None]
    broken_before = dict(counters["graph_break"])
    torch.compile(optimizer.step, backend="eager")()
    found = [p.detach() for p in model.parameters() if p.grad is not None]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    broken = counters["graph_break"].keys() - broken_before.keys()
    assert not [reason for reason in broken if "_before_step" in reason]
