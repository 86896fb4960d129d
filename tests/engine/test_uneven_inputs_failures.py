"""Exceptions inside of Join: no rank waits for one that has left it."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from tests.engine.test_uneven_inputs import loss_of, own_steps, wrap
from tests.hazards.test_disagreement import assert_names, disagreement, patience, wrapped
from tests.hazards.test_disagreement import step as order_step
from tests.original.training import full_parameters
from torch import nn
from torch.distributed.algorithms.join import Join

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy
from fullshard.testing import ranks

#: Seconds after which the ranks of a test have waited for far too long.
SOON = 20.0


class BadBatch(Exception):
    """What a program's own code raises."""


def before_forward(model: FSDP, step: int) -> torch.Tensor:
    raise BadBatch


def in_forward(model: FSDP, step: int) -> torch.Tensor:
    block = model.module.blocks[1].module

    def fail(*_: object) -> None:
        raise BadBatch

    handle = block.down.register_forward_pre_hook(fail)
    try:
        return loss_of(model, dist.get_rank(), step)
    finally:
        handle.remove()


def in_backward(model: FSDP, step: int) -> torch.Tensor:
    loss = loss_of(model, dist.get_rank(), step)

    def fail(_: torch.Tensor) -> None:
        raise BadBatch

    loss.register_hook(fail)
    return loss


def after_backward(model: FSDP, step: int) -> torch.Tensor:
    loss_of(model, dist.get_rank(), step).backward()
    raise BadBatch


@pytest.mark.parametrize("fail", [before_forward, in_forward, in_backward, after_backward])
@pytest.mark.parametrize("batches", [[2, 6], [6, 6]])
@ranks(2)
def test_others_learn_of_a_rank_that_left_by_an_exception(
    batches: list[int], fail: Callable[[FSDP, int], torch.Tensor]
) -> None:
    model, optimizer = wrap(use_orig_params=True)
    raises = dist.get_rank() == 1

    def train() -> None:
        with Join([model], optimizer=optimizer):
            for step in own_steps(batches):
                if step == 3 and raises:
                    loss = fail(model, step)
                else:
                    loss = loss_of(model, dist.get_rank(), step)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    begun = time.monotonic()
    if raises:
        with pytest.raises(BadBatch):
            train()
        # Busy with something else, for as long as the others wait.
        time.sleep(6)
    else:
        with pytest.raises(RuntimeError, match="Rank 1 has left Join by an exception, and rank 0"):
            train()
    assert time.monotonic() - begun < SOON
    assert model._unit.joining is None
    assert not optimizer._optimizer_step_post_hooks


@ranks(3)
def test_ranks_with_and_without_data_learn_of_the_one_that_left() -> None:
    model, optimizer = wrap(use_orig_params=True)
    raises = dist.get_rank() == 2

    def train() -> None:
        with Join([model], optimizer=optimizer):
            for step in own_steps([1, 6, 6]):
                if step == 3 and raises:
                    raise BadBatch
                loss_of(model, dist.get_rank(), step).backward()
                optimizer.step()
                optimizer.zero_grad()

    if raises:
        with pytest.raises(BadBatch):
            train()
        time.sleep(6)
    else:
        with pytest.raises(RuntimeError, match="Rank 2 has left Join by an exception"):
            train()


@ranks(2)
def test_a_model_that_all_ranks_left_by_an_exception_works_outside_and_in_the_next_join() -> None:
    model, optimizer = wrap(use_orig_params=True)
    batches = [2, 6]

    def train(raises: bool) -> None:
        with Join([model], optimizer=optimizer):
            for step in own_steps(batches):
                loss = loss_of(model, dist.get_rank(), step)
                loss.backward()
                if step == 3 and raises:
                    model.state_dict()
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(RuntimeError, match="while some ranks have run out of data") as caught:
        train(raises=True)
    # While the exception, and with it frames of Join, are still held.
    assert caught.value is not None
    model.state_dict()
    full_parameters(model)
    optimizer.zero_grad()
    train(raises=False)
    loss_of(model, dist.get_rank(), 0).backward()


@ranks(2)
def test_a_join_that_was_refused_or_never_entered_leaves_nothing() -> None:
    model, optimizer = wrap(use_orig_params=True)
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="multiple process groups"):
        Join([model, ddp], optimizer=optimizer)
    assert model._unit.joining is None
    Join([model], optimizer=optimizer)
    assert model._unit.joining is None
    assert not optimizer._optimizer_step_pre_hooks


@ranks(2)
def test_contexts_of_one_model_cannot_be_nested() -> None:
    model, optimizer = wrap(use_orig_params=True)

    def train() -> None:
        with Join([model], optimizer=optimizer):
            loss_of(model, dist.get_rank(), 0).backward()
            with Join([model], optimizer=optimizer):
                loss_of(model, dist.get_rank(), 0).backward()

    with pytest.raises(RuntimeError, match="Contexts of one model cannot be nested"):
        train()
    loss_of(model, dist.get_rank(), 0).backward()


@pytest.mark.parametrize("inner_runs_outer", [True, False])
@ranks(2)
def test_two_models_may_be_joined_at_a_time_while_all_ranks_have_data_for_the_other(
    inner_runs_outer: bool,
) -> None:
    first, first_optimizer = wrap(use_orig_params=True)
    second, second_optimizer = wrap(use_orig_params=True)
    batches = [1, 3]

    def train() -> None:
        with Join([first], optimizer=first_optimizer):
            for step in range(2) if inner_runs_outer else own_steps(batches):
                loss_of(first, dist.get_rank(), step).backward()
                with Join([second], optimizer=second_optimizer):
                    for inner in own_steps(batches):
                        loss_of(second, dist.get_rank(), inner).backward()
                        if inner_runs_outer:
                            loss_of(first, dist.get_rank(), inner).backward()

    with pytest.raises(RuntimeError, match="'pass of another model' of"):
        train()


@ranks(2)
def test_ranks_that_disagree_after_a_slow_rank_in_join_are_told() -> None:
    """Who waited without data there says anew what it does when it waits again."""
    rank = dist.get_rank()
    model = wrapped("different", ShardingStrategy.FULL_SHARD)
    order_step(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with patience(0.2), Join([model], optimizer=optimizer):
        for number in range(1 if rank == 1 else 3):
            time.sleep(number)
            order_step(model, number=number)
            optimizer.step()

    message = disagreement(lambda: order_step(model, "012" if rank == 0 else "02"))
    assert_names(message, "rank 0", "rank 1", "blocks.1", "blocks.2")
