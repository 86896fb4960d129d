"""Uneven, empty and zero-element shards; one rank; groups that only know rank and size."""

from __future__ import annotations

import gc
import time
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.original.training import (
    EITHER_API,
    EITHER_MODES,
    IN_PLACE,
    MODES,
    InPlace,
    Net,
    assert_at_rest,
    assert_same_parameters,
    blocks_policy,
    build,
    compare,
    compare_models,
    full_parameters,
    inputs,
    sharded,
    train_step,
)
from torch import nn

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy
from fullshard.state.model.units import units_in
from fullshard.testing import device, ranks

EACH_MODE = pytest.mark.parametrize(("strategy", "use_orig_params"), EITHER_MODES)
WRAPPED_MODE = pytest.mark.parametrize(("strategy", "use_orig_params"), MODES)
EACH_STRATEGY = pytest.mark.parametrize("strategy", EITHER_API)


@EACH_MODE
@ranks(3)
def test_shards_that_do_not_divide_evenly(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    compare(sharding_strategy=strategy, use_orig_params=use_orig_params)


class Tiny(nn.Module):
    """Fewer elements than ranks, in a unit of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.pair = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.pair.sum()


class WithTiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tiny = Tiny()
        self.linear = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.tiny(x))


@WRAPPED_MODE
@ranks(4)
def test_more_ranks_than_elements(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    model = compare(
        WithTiny,
        sharding_strategy=strategy,
        auto_wrap_policy=lambda module, recurse, **_: recurse or isinstance(module, Tiny),
        use_orig_params=use_orig_params,
    )
    if strategy is not ShardingStrategy.NO_SHARD and not use_orig_params:
        assert model.tiny._flat_param.numel() == 1
    assert full_parameters(model)["tiny.scale"].shape == ()


@pytest.mark.parametrize("how", IN_PLACE)
@ranks(4)
def test_more_ranks_than_rows(how: InPlace) -> None:
    """The head has three rows; of seven, in chunks of two, the last rank has one."""
    model = compare(sharding_strategy=how)
    assert model.head.weight.to_local().shape[0] == (0 if dist.get_rank() == 3 else 1)


class ZeroElements(nn.Module):
    """A parameter without elements between two others, and a unit of nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(5, 3))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.last = nn.Parameter(torch.randn(3))
        self.nothing = nn.ParameterList([torch.empty(0)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.first + self.last + self.empty.sum() + self.nothing[0].sum()


class OnlyZero(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(3, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.empty.sum()


@EACH_MODE
@ranks(2)
def test_parameters_without_elements(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    model = compare(ZeroElements, sharding_strategy=strategy, use_orig_params=use_orig_params)
    assert full_parameters(model)["empty"].shape == (0, 4)


@EACH_MODE
@ranks(2)
def test_a_unit_of_nothing_but_zero_elements(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    compare(
        lambda: nn.Sequential(nn.Linear(5, 3), OnlyZero()),
        sharding_strategy=strategy,
        auto_wrap_policy=lambda module, recurse, **_: recurse or isinstance(module, OnlyZero),
        use_orig_params=use_orig_params,
    )


@EACH_STRATEGY
@ranks(2)
def test_a_zero_gradient_is_stepped_and_a_missing_one_is_not(strategy: ShardingStrategy) -> None:
    """Weight decay shows the difference: it moves what is stepped."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Parameter(torch.ones(7))
            self.times_zero = nn.Parameter(torch.ones(7))
            self.negative_zero = nn.Parameter(torch.ones(7))
            self.unused = nn.Parameter(torch.ones(7))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = self.used.sum() + 0.0 * self.times_zero.sum() - 0.0 * self.negative_zero.sum()
            return x.sum() * total

    def step_of(model: nn.Module, step: int) -> torch.Tensor:
        loss = model(inputs(step))
        loss.backward()
        return loss.detach()

    model = compare(
        Parts,
        step_of,
        steps=2,
        sharding_strategy=strategy,
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.5),
    )
    found = full_parameters(model)
    assert torch.equal(found["unused"], torch.ones(7, device=device()))
    for name in ("used", "times_zero", "negative_zero"):
        assert not torch.equal(found[name], torch.ones(7, device=device())), name


@EACH_STRATEGY
@ranks(2)
def test_negative_zeros_from_some_ranks_are_a_gradient(strategy: ShardingStrategy) -> None:
    """The mark for "not used here" must not swallow a true gradient of negative zeros."""

    class Signs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Parameter(torch.ones(3))
            self.sometimes = nn.Parameter(torch.ones(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = self.used.sum()
            if dist.get_rank() == 1:
                total = total + (self.sometimes * torch.full_like(self.sometimes, -0.0)).sum()
            return x.sum() * 0 + total

    def step_of(model: nn.Module, step: int) -> torch.Tensor:
        loss = model(inputs(step))
        loss.backward()
        return loss.detach()

    compare(
        Signs,
        step_of,
        steps=2,
        sharding_strategy=strategy,
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.5),
    )


@EACH_MODE
@ranks(1)
def test_one_rank_trains_like_the_bare_module(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = compare(sharding_strategy=strategy, use_orig_params=use_orig_params)
    if isinstance(strategy, InPlace):
        return
    messages = [str(w.message) for w in caught if "world size is 1" in str(w.message)]
    assert bool(messages) == (strategy is not ShardingStrategy.NO_SHARD)
    assert model.sharding_strategy is ShardingStrategy.NO_SHARD
    assert model.world_size == 1


@ranks(1)
def test_one_rank_accumulates_and_keeps_none() -> None:
    bare = build(Net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = sharded(build(Net), use_orig_params=True)
    for each in (bare, model):
        train_step(each, 0)
        train_step(each, 1)
    with model.no_sync():
        train_step(model, 2)
    train_step(bare, 2)
    train_step(bare, 3)
    train_step(model, 3)
    for expected, found in zip(bare.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


class DummyProcessGroup:
    """All that an object needs to stand for a process group, up to the first collective."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


@WRAPPED_MODE
@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 2), (2, 3), (5, 16), (0, 1)])
def test_an_object_with_rank_and_size_is_enough_to_construct(
    rank: int, size: int, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    bare = Net()
    total = sum(p.numel() for p in bare.parameters())
    model = sharded(
        bare,
        process_group=DummyProcessGroup(rank, size),
        sharding_strategy=strategy,
        auto_wrap_policy=lambda module, recurse, **_: recurse or isinstance(module, nn.Linear),
        use_orig_params=use_orig_params,
    )
    assert (model.rank, model.world_size) == (rank, size)
    mine = sum(p.numel() for p in model.parameters())
    if strategy is ShardingStrategy.NO_SHARD or size == 1:
        assert mine == total
    else:
        assert mine < total
    assert len(FSDP.fsdp_modules(model)) == 9
    assert_at_rest(model)


@EACH_STRATEGY
@ranks(2)
def test_modules_moved_between_places_keep_training(strategy: ShardingStrategy) -> None:
    """The user swaps two units and puts a third one elsewhere; names follow, results do, too."""
    reference = build(Net)
    policy = lambda module, recurse, **_: recurse or type(module).__name__ == "Block"  # noqa: E731
    model = sharded(
        build(Net), sharding_strategy=strategy, auto_wrap_policy=policy, use_orig_params=True
    )
    for each in (reference, model):
        train_step(each, 0)
        each.zero_grad()
        module: Any = each.module if isinstance(each, FSDP) else each
        first, second, third = module.blocks
        module.blocks = nn.ModuleList([third, first, second])
    compare_models(reference, model, steps=2, first_step=1)
    assert_same_parameters(reference, model)


@ranks(2)
def test_a_destroyed_process_group_goes_with_the_last_model_that_used_it() -> None:
    group = dist.new_group()
    model = sharded(nn.Linear(4, 4, device=device()), process_group=group)
    model(torch.ones(2, 4, device=device())).sum().backward()
    # All ranks have had the others' last messages.
    dist.barrier()
    dist.destroy_process_group(group)
    gone = weakref.ref(group)

    del model, group
    gc.collect()

    assert gone() is None


@EACH_MODE
@ranks(2)
def test_a_model_that_was_trained_leaves_nothing_behind_when_it_goes(
    use_orig_params: bool, strategy: ShardingStrategy
) -> None:
    model = sharded(
        build(Net),
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
        auto_wrap_policy=blocks_policy(),
    )
    train_step(model, 0)
    train_step(model, 1)
    with torch.no_grad():
        model(inputs(0))
    units = [*map(weakref.ref, units_in(model))]
    shards = [weakref.ref(unit().handles[0].shard_tensor) for unit in units]

    del model
    gc.collect()

    # Gloo's threads let go of what they sent a moment later.
    for _ in range(100):
        left = [each() for each in (*units, *shards)]
        if left == [None] * 8:
            break
        del left
        time.sleep(0.02)
    assert [each() for each in (*units, *shards)] == [None] * 8
