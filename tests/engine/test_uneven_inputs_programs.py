"""What programs do with gradients and optimizers inside of Join, against one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from tests.engine.test_uneven_inputs import (
    FULL,
    GRAD_OP,
    NO,
    Reference,
    assert_same,
    batch,
    loss_of,
    own_steps,
    wrap,
)
from tests.original.training import Block, Net
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.utils.checkpoint import checkpoint

from fullshard import ShardingStrategy
from fullshard.testing import ranks

STRATEGIES = [FULL, GRAD_OP, NO]
Modify = Callable[[nn.Module, torch.optim.Optimizer], None]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_gradients_that_are_thrown_away_without_a_step_are_so_on_all_ranks(
    strategy: ShardingStrategy, set_to_none: bool
) -> None:
    batches = [2, 7]
    model, optimizer = wrap(sharding_strategy=strategy, use_orig_params=True)
    reference = Reference(Net, batches)
    with Join([model], optimizer=optimizer):
        for step in own_steps(batches):
            loss_of(model, dist.get_rank(), step).backward()
            if step % 3 != 1:
                optimizer.step()
            optimizer.zero_grad(set_to_none)
    for step in range(max(batches)):
        reference.backward(step, divide_by=2)
        if step % 3 != 1:
            reference.optimizer.step()
        reference.optimizer.zero_grad(set_to_none)
    assert_same(model, reference)


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_gradients_that_are_never_cleared_add_up_on_all_ranks(strategy: ShardingStrategy) -> None:
    batches = [2, 5]
    model, optimizer = wrap(sharding_strategy=strategy, use_orig_params=True)
    reference = Reference(Net, batches)
    with Join([model], optimizer=optimizer):
        for step in own_steps(batches):
            loss_of(model, dist.get_rank(), step).backward()
            optimizer.step()
    for step in range(max(batches)):
        reference.backward(step, divide_by=2)
        reference.optimizer.step()
    assert_same(model, reference)


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_a_step_with_a_closure_is_taken_after_its_backward(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    batches = [2, 5]
    model, optimizer = wrap(sharding_strategy=strategy, use_orig_params=use_orig_params)
    reference = Reference(Net, batches)
    with Join([model], optimizer=optimizer):
        for step in own_steps(batches):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, dist.get_rank(), step)
                loss.backward()
                return loss

            optimizer.step(closure)
    for step in range(max(batches)):
        reference.backward(step, divide_by=2)
        reference.step()
    assert_same(model, reference)


@ranks(2)
def test_several_optimizers_step_and_clear_as_they_like() -> None:
    batches = [2, 8]
    model, _ = wrap(use_orig_params=True)
    reference = Reference(Net, batches)

    def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        heads = [p for name, p in model.named_parameters() if "head" in name]
        others = [p for name, p in model.named_parameters() if "head" not in name]
        return [torch.optim.SGD(heads, 0.1, momentum=0.9), torch.optim.Adam(others, 1e-2)]

    def step_of(optimizers: list[torch.optim.Optimizer], step: int) -> None:
        optimizers[0].step()
        optimizers[0].zero_grad()
        if step % 2:
            optimizers[1].step()
            optimizers[1].zero_grad(set_to_none=False)

    own, expected = optimizers(model), optimizers(reference.model)
    with Join([model], optimizer=own):
        for step in own_steps(batches):
            loss_of(model, dist.get_rank(), step).backward()
            step_of(own, step)
    for step in range(max(batches)):
        reference.backward(step, divide_by=2)
        step_of(expected, step)
    assert_same(model, reference)


def clip(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def scale(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= 2


def zero(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("modify", [clip, scale, zero])
@pytest.mark.parametrize("strategy", [FULL, NO])
@ranks(3)
def test_gradients_that_were_changed_unseen_by_ranks_without_data_are_refused_on_all(
    strategy: ShardingStrategy, modify: Modify
) -> None:
    batches = [3, 1, 2]
    model, optimizer = wrap(sharding_strategy=strategy, use_orig_params=True)
    done = []

    def train() -> None:
        with Join([model], optimizer=optimizer):
            for step in own_steps(batches):
                loss_of(model, dist.get_rank(), step).backward()
                modify(model, optimizer)
                optimizer.step()
                optimizer.zero_grad()
                done.append(step)

    with pytest.raises(RuntimeError, match=r"Gradients were changed between backward and the"):
        train()
    assert done == [0]


class Recomputed(Net):
    """Recomputes blocks in backward."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class RecomputedReentrant(Recomputed):
    reentrant = True


class RecomputingBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class RecomputedInside(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RecomputingBlock() for _ in range(3))


class Frozen(Net):
    """Trains its head and one linear of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.head.requires_grad_(True)
        self.blocks[1].up.requires_grad_(True)


class Adapted(Net):
    """Frozen, with small matrices beside its first linear."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.down = nn.Linear(5, 2, bias=False)
        self.up = nn.Linear(2, 7, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        embedded = self.embed(x) + self.up(self.down(x))
        for block in self.blocks:
            embedded = block(embedded)
        return self.head(embedded)


@pytest.mark.parametrize(
    "make", [Recomputed, RecomputedReentrant, RecomputedInside, Frozen, Adapted]
)
@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_checkpointed_and_frozen_models_train_as_one_process(
    strategy: ShardingStrategy, make: Callable[[], nn.Module]
) -> None:
    batches = [5, 2]
    model, optimizer = wrap(make, sharding_strategy=strategy, use_orig_params=True)
    reference = Reference(make, batches)
    for _ in range(2):
        with Join([model], optimizer=optimizer):
            for step in own_steps(batches):
                loss_of(model, dist.get_rank(), step).backward()
                optimizer.step()
                optimizer.zero_grad()
        for step in range(max(batches)):
            reference.backward(step, divide_by=2)
            reference.step()
    assert_same(model, reference)


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_evaluations_and_second_forwards_between_training_steps_are_followed(
    strategy: ShardingStrategy,
) -> None:
    batches = [2, 5]
    model, optimizer = wrap(sharding_strategy=strategy, use_orig_params=True)
    reference = Reference(Net, batches)
    with Join([model], optimizer=optimizer):
        for step in own_steps(batches):
            optimizer.zero_grad()
            rank = dist.get_rank()
            (loss_of(model, rank, step) + loss_of(model, rank, step + 50)).backward()
            optimizer.step()
            with torch.no_grad():
                model.eval()
                model(batch(rank, step))
                model.train()
    for step in range(max(batches)):
        losses = [
            loss_of(reference.model, rank, s)
            for rank in reference.active(step)
            for s in (step, step + 50)
        ]
        (sum(losses, torch.zeros(())) / 2).backward()
        reference.step()
    assert_same(model, reference)


@ranks(2)
def test_ranks_may_all_have_no_data_at_all() -> None:
    model, optimizer = wrap(use_orig_params=True)
    for _ in range(2):
        with Join([model], optimizer=optimizer):
            pass
    assert model._unit.joining is None
    loss_of(model, dist.get_rank(), 0).backward()
