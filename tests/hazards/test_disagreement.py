"""Ranks that run different units: every rank says so within seconds; healthy ones never do.

Each test here has a process group of its own, since a group is unusable after ranks disagreed.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.original.training import (
    EITHER_API,
    IN_PLACE,
    STRATEGIES,
    WIDTH,
    Block,
    assert_same_parameters,
    build,
    inputs,
    sharded,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import RankLostError, RanksDisagreeError, ShardingStrategy
from fullshard.engine.comm import agreements, order_check
from fullshard.testing import device, ranks

SHARDING = pytest.mark.parametrize("strategy", [*STRATEGIES[:2], *IN_PLACE])
SIZES = pytest.mark.parametrize("sizes", ["equal", "different"])
STEPS = pytest.mark.parametrize("healthy_steps", [0, 2])


class Wide(Block):
    """A block whose inner width is given, so that units differ in size."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH, bias=False)


class Ordered(nn.Module):
    def __init__(self, sizes: str = "equal") -> None:
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        inner = [9, 9, 9] if sizes == "equal" else [9, 33, 120]
        self.blocks = nn.ModuleList(Wide(size) for size in inner)

    def forward(self, x: torch.Tensor, order: str) -> torch.Tensor:
        x = self.embed(x)
        for name in order:
            if name == "!":
                raise ValueError("this rank's own data")
            x = self.blocks[int(name)](x)
        return x


def wrapped(sizes: str, strategy: ShardingStrategy, **options: Any) -> Any:
    group = dist.new_group(list(range(dist.get_world_size())))
    return sharded(
        build(lambda: Ordered(sizes)),
        process_group=group,
        sharding_strategy=strategy,
        auto_wrap_policy=lambda module, recurse, **_: recurse or isinstance(module, Block),
        use_orig_params=True,
        **options,
    )


def step(model: nn.Module, order: str = "012", number: int = 0) -> torch.Tensor:
    loss = model(inputs(number), order).square().mean()
    loss.backward()
    return loss.detach()


@contextlib.contextmanager
def patience(seconds: float, tell_after: float = order_check.TELL_AFTER) -> Iterator[None]:
    """Let ranks look around sooner: these tests wait for it."""
    before = order_check.PATIENCE, order_check.TELL_AFTER
    order_check.PATIENCE, order_check.TELL_AFTER = seconds, tell_after
    try:
        yield
    finally:
        order_check.PATIENCE, order_check.TELL_AFTER = before


def disagreement(act: Callable[[], Any], seconds: float = 0.4, limit: float = 10.0) -> str:
    """The message of the error that ``act`` must raise on this rank, in time."""
    started = time.monotonic()
    with patience(seconds), pytest.raises(RanksDisagreeError) as error:
        act()
    assert time.monotonic() - started < limit
    return str(error.value)


def assert_names(message: str, *parts: str) -> None:
    for part in parts:
        assert part in message, message


@SHARDING
@SIZES
@STEPS
@ranks(2, timeout=40)
def test_another_order_of_units(healthy_steps: int, sizes: str, strategy: ShardingStrategy) -> None:
    model = wrapped(sizes, strategy)
    for number in range(healthy_steps):
        step(model, number=number)
    order = "012" if dist.get_rank() == 0 else "021"
    message = disagreement(lambda: step(model, order))
    assert message.startswith("Forward order differs across ranks")
    assert_names(message, "rank 0", "rank 1", "blocks.1", "blocks.2")


@STEPS
@pytest.mark.parametrize("odd", ["02", "0112", "01"])
@ranks(2, timeout=40)
def test_a_unit_skipped_or_run_twice_on_one_rank(odd: str, healthy_steps: int) -> None:
    model = wrapped("different", ShardingStrategy.FULL_SHARD)
    for number in range(healthy_steps):
        step(model, number=number)
    message = disagreement(lambda: step(model, "012" if dist.get_rank() == 0 else odd))
    assert_names(message, "rank 0", "rank 1", "blocks.")


@STEPS
@ranks(3, timeout=40)
def test_all_of_three_ranks_raise_and_all_are_named(healthy_steps: int) -> None:
    model = wrapped("different", ShardingStrategy.FULL_SHARD)
    for number in range(healthy_steps):
        step(model, number=number)
    message = disagreement(lambda: step(model, "12" if dist.get_rank() == 1 else "012"))
    assert_names(message, "rank 1", "blocks.0", "blocks.1")
    assert "ranks 0, 2" in message or "rank 0" in message or "rank 2" in message


@SIZES
@ranks(2, timeout=40)
def test_one_rank_raises_and_goes_on(sizes: str) -> None:
    model = wrapped(sizes, ShardingStrategy.FULL_SHARD)
    step(model)

    def act() -> None:
        if dist.get_rank() == 1:
            with pytest.raises(ValueError, match="own data"):
                step(model, "0!12")
        for number in range(3):
            step(model, number=number)

    message = disagreement(act)
    assert_names(message, "rank 0", "rank 1", "unit")


@pytest.mark.parametrize("strategy", EITHER_API)
@ranks(2, timeout=40)
def test_one_rank_evaluates_while_the_other_trains(strategy: ShardingStrategy) -> None:
    model = wrapped("different", strategy)
    step(model)

    def act() -> None:
        for number in range(3):
            if dist.get_rank() == 1:
                with torch.no_grad():
                    model(inputs(number), "012")
            else:
                step(model, number=number)

    message = disagreement(act)
    assert_names(message, "rank 0", "rank 1", "unit")


@pytest.mark.parametrize("strategy", EITHER_API)
@ranks(2, timeout=40)
def test_one_rank_summons_while_the_other_runs(strategy: ShardingStrategy) -> None:
    model = wrapped("different", strategy)
    step(model)

    def act() -> None:
        if dist.get_rank() == 1:
            with FSDP.summon_full_params(model):
                pass
        for number in range(3):
            step(model, number=number)

    assert_names(disagreement(act), "rank 0", "rank 1", "summon", "forward")


@SIZES
@ranks(2, timeout=40)
def test_different_branches_without_sharding(sizes: str) -> None:
    """NO_SHARD communicates in backward only: that is where it shows."""
    model = wrapped(sizes, ShardingStrategy.NO_SHARD)
    step(model)
    message = disagreement(lambda: step(model, "01" if dist.get_rank() == 0 else "02"))
    assert_names(message, "rank 0", "rank 1", "blocks.1", "blocks.2")


@ranks(2, timeout=40)
def test_a_disagreement_is_told_within_seconds_as_it_is_set_up_by_default() -> None:
    model = wrapped("different", ShardingStrategy.FULL_SHARD)
    step(model)
    order = "012" if dist.get_rank() == 0 else "02"
    disagreement(lambda: step(model, order), seconds=order_check.PATIENCE, limit=10)


@ranks(2, timeout=40)
def test_models_built_differently_are_told_apart() -> None:
    """One rank wraps the blocks, the other does not: their first gathers differ."""
    group = dist.new_group([0, 1])
    wraps = dist.get_rank() == 0
    model = sharded(
        build(Ordered),
        process_group=group,
        auto_wrap_policy=lambda module, recurse, **_: (
            wraps and (recurse or isinstance(module, Block))
        ),
        use_orig_params=True,
    )
    message = disagreement(lambda: step(model))
    assert_names(message, "rank 0", "rank 1", "(root) Ordered", "elements")


@ranks(2, timeout=40)
def test_other_groups_go_on_after_a_disagreement() -> None:
    healthy = wrapped("equal", ShardingStrategy.FULL_SHARD)
    broken = wrapped("equal", ShardingStrategy.FULL_SHARD)
    before = step(healthy)
    disagreement(lambda: step(broken, "012" if dist.get_rank() == 0 else "21"))
    torch.testing.assert_close(step(healthy), before)


@pytest.mark.parametrize("strategy", EITHER_API)
@ranks(2, timeout=60)
def test_a_model_that_changes_its_order_everywhere_matches_ddp(
    strategy: ShardingStrategy,
) -> None:
    reference = DDP(build(lambda: Ordered("different")), find_unused_parameters=True)
    model = wrapped("different", strategy)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (reference, model)]
    generator = torch.Generator().manual_seed(3)
    for number in range(12):
        length = int(torch.randint(1, 4, (), generator=generator))
        order = "".join(map(str, torch.randperm(3, generator=generator)[:length].tolist()))
        losses = []
        for each, optimizer in zip((reference, model), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(step(each, order, number))
            optimizer.step()
        torch.testing.assert_close(*losses)
    assert_same_parameters(reference.module, model)


@ranks(2, timeout=60)
def test_a_slow_rank_is_waited_for() -> None:
    model = wrapped("different", ShardingStrategy.FULL_SHARD)
    first = step(model)
    if dist.get_rank() == 1:
        time.sleep(3)
    step(model)
    with patience(0.2):
        if dist.get_rank() == 0:
            time.sleep(1)
        torch.testing.assert_close(step(model), first)


@pytest.mark.parametrize("known", [False, True])
@ranks(3, timeout=60)
def test_ranks_that_wait_for_long_say_once_for_whom(known: bool) -> None:
    model = wrapped("different", ShardingStrategy.FULL_SHARD)
    if known:  # They wait for a collective; else in the store.
        step(model)

    with patience(0.2, tell_after=1.0), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if dist.get_rank() == 2:
            time.sleep(2.5)
        step(model)

    told = [str(warning.message) for warning in caught if "has waited" in str(warning.message)]
    if dist.get_rank() == 2:
        assert not told
    else:
        (message,) = told
        assert_names(message, f"Rank {dist.get_rank()} has waited", " s for rank 2, and is at the ")
        assert_names(message, "of unit", "Waiting goes on")


@ranks(2, timeout=60)
def test_a_rank_slow_in_the_middle_of_forward_and_backward_is_waited_for() -> None:
    model = wrapped("different", ShardingStrategy.FULL_SHARD)

    def dawdle(*_: Any) -> None:
        if dist.get_rank() == 1:
            time.sleep(0.7)

    model.blocks[1].module.register_forward_hook(dawdle)
    model.blocks[1].module.register_full_backward_hook(dawdle)
    with patience(0.2):
        for _ in range(2):
            step(model)


@pytest.mark.parametrize("strategy", EITHER_API)
@ranks(2, timeout=60)
def test_a_rank_slow_between_two_units_backwards_is_waited_for(strategy: ShardingStrategy) -> None:
    model = wrapped("different", strategy)
    first = step(model)

    def dawdle(_: torch.Tensor) -> None:
        if dist.get_rank() == 1:
            time.sleep(0.7)

    model.blocks[0].register_forward_hook(lambda *given: given[-1].register_hook(dawdle) and None)
    with patience(0.2):
        torch.testing.assert_close(step(model), first)
        torch.testing.assert_close(step(model), first)


@ranks(2, timeout=40)
def test_the_check_can_be_switched_off() -> None:
    os.environ[agreements.SWITCH] = "0"
    model = wrapped("equal", ShardingStrategy.FULL_SHARD)
    assert isinstance(model._unit.shards._agreement, agreements.NoAgreement)
    assert torch.isfinite(step(model)).all()
    assert {p.device for p in model.parameters()} == {device()}


def test_ranks_that_are_gone_are_waited_for_as_long_as_the_group_says() -> None:
    alone = order_check.Agreement(dist.HashStore(), rank=0, world_size=2, timeout=0.5)
    with (
        patience(0.2),
        pytest.raises(RanksDisagreeError, match=r"1 of 2 have. The others .* or gone"),
    ):
        alone.check(("forward", "(root)", 0), begins_pass=True)


@ranks(2)
def test_the_groups_timeout_is_known() -> None:
    group = dist.new_group(timeout=timedelta(seconds=40))
    assert agreements._timeout_of(group) == 40


@pytest.mark.parametrize("act", ["save", "load"])
@ranks(2, timeout=40)
def test_a_checkpoint_that_one_rank_alone_saves_or_loads_is_told(act: str, tmp_path: Path) -> None:
    model = wrapped("equal", ShardingStrategy.FULL_SHARD)
    step(model)
    fullshard.save(tmp_path, model)
    if dist.get_rank() == 0:
        message = disagreement(lambda: getattr(fullshard, act)(tmp_path, model))
    else:
        message = disagreement(lambda: step(model))
    assert_names(message, f"rank 0: {act} a checkpoint of unit", "rank 1: forward of unit")


@ranks(2, timeout=40)
def test_a_rank_that_fails_while_it_collects_a_checkpoint_is_told_to_all(tmp_path: Path) -> None:
    model = wrapped("equal", ShardingStrategy.FULL_SHARD)
    step(model)
    fullshard.save(tmp_path, model)

    def fail(*_: Any) -> None:
        raise ValueError("this rank's own data")

    if dist.get_rank() == 0:
        model.module.blocks[1].register_state_dict_pre_hook(fail)
    message = disagreement(lambda: fullshard.save(tmp_path, model))
    assert_names(message, "rank 0: failing to save a checkpoint (ValueError: this rank's own data)")


@ranks(2, timeout=40)
def test_when_all_ranks_fail_alike_while_they_collect_a_checkpoint_they_can_go_on(
    tmp_path: Path,
) -> None:
    model = wrapped("equal", ShardingStrategy.FULL_SHARD)
    before = step(model)
    hook = model.module.blocks[1].register_state_dict_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(fullshard.CheckpointError, match="ZeroDivisionError"):
        fullshard.save(tmp_path, model)
    hook.remove()
    torch.testing.assert_close(step(model), before)
    fullshard.save(tmp_path, model)


@ranks(2, timeout=40)
def test_a_rank_that_destroys_its_process_group_is_told_to_those_that_go_on() -> None:
    model = wrapped("equal", ShardingStrategy.FULL_SHARD)
    for _ in range(3):
        step(model)
    if dist.get_rank() == 1:
        dist.destroy_process_group(model.process_group)
        time.sleep(3)
        return
    with patience(0.4), pytest.raises(RankLostError, match=r"Rank 1 .* destroy_process_group\(\)"):
        step(model)


@STEPS
@ranks(2, timeout=40)
def test_ranks_of_large_groups_learn_from_the_first_one(healthy_steps: int) -> None:
    """They broadcast; ranks of small groups meet at the store."""
    few, order_check.FEW = order_check.FEW, 0
    try:
        model = wrapped("different", ShardingStrategy.FULL_SHARD)
        for number in range(healthy_steps):
            step(model, number=number)
        message = disagreement(lambda: step(model, "012" if dist.get_rank() == 0 else "02"))
    finally:
        order_check.FEW = few
    assert_names(message, "rank 0", "rank 1", "blocks.")
