"""Ranks with more batches than others: torch's Join, against one process with all the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.original.training import Net, blocks_policy, build, full_parameters
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.device_mesh import init_device_mesh

from fullshard import CPUOffload, MixedPrecision, ShardingStrategy
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.testing import device, ranks

FULL, GRAD_OP, NO = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
)


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 5, generator=generator).to(device())


class Reference:
    """The bare model on every rank, with the batches of all of them."""

    def __init__(self, make: Callable[[], nn.Module], batches: list[int]) -> None:
        self.model = build(make)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self._batches = batches

    def active(self, step: int) -> list[int]:
        return [rank for rank, number in enumerate(self._batches) if step < number]

    def backward(self, step: int, divide_by: int) -> dict[int, torch.Tensor]:
        """Add up the gradients of all ranks that have data; returns their losses."""
        losses = {rank: loss_of(self.model, rank, step) for rank in self.active(step)}
        (sum(losses.values(), torch.zeros(())) / divide_by).backward()
        return {rank: loss.detach() for rank, loss in losses.items()}

    def step(self, set_to_none: bool = True) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(batch(rank, step)).square().mean()


def own_steps(batches: list[int]) -> Iterator[int]:
    yield from range(batches[dist.get_rank()])


def wrap(make: Callable[[], nn.Module] = Net, **options: Any) -> tuple[FSDP, torch.optim.Adam]:
    model = FSDP(build(make), auto_wrap_policy=blocks_policy(), **options)
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def assert_same(model: FSDP, reference: Reference, **tolerances: float) -> None:
    found = full_parameters(model)
    for name, expected in reference.model.named_parameters():
        torch.testing.assert_close(found[name], expected.detach(), **tolerances)


def train(
    model: FSDP,
    optimizer: torch.optim.Optimizer,
    batches: list[int],
    set_to_none: bool = True,
    **arguments: Any,
) -> list[torch.Tensor]:
    losses = []
    with Join([model], optimizer=optimizer, **arguments):
        for step in own_steps(batches):
            loss = loss_of(model, dist.get_rank(), step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none)
            losses.append(loss.detach())
    return losses


def assert_trains_as_one_process(
    batches: list[int], make: Callable[[], nn.Module] = Net, **options: Any
) -> None:
    model, optimizer = wrap(make, **options)
    reference = Reference(make, batches)
    losses = train(model, optimizer, batches)
    for step in range(max(batches)):
        expected = reference.backward(step, divide_by=len(batches))
        reference.step()
        if dist.get_rank() in expected:
            torch.testing.assert_close(losses[step], expected[dist.get_rank()])
    assert_same(model, reference)


@pytest.mark.parametrize("batches", [[2, 5], [3, 1], [0, 3], [4, 4]])
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", [FULL, GRAD_OP, NO])
@ranks(2)
def test_two_ranks_train_as_one_process(
    strategy: ShardingStrategy, use_orig_params: bool, batches: list[int]
) -> None:
    assert_trains_as_one_process(
        batches, sharding_strategy=strategy, use_orig_params=use_orig_params
    )


@pytest.mark.parametrize("batches", [[1, 4, 2], [5, 0, 3]])
@pytest.mark.parametrize("strategy", [FULL, GRAD_OP, NO])
@ranks(3)
def test_three_ranks_that_leave_one_after_the_other_train_as_one_process(
    strategy: ShardingStrategy, batches: list[int]
) -> None:
    assert_trains_as_one_process(batches, sharding_strategy=strategy, use_orig_params=True)


@pytest.mark.parametrize(
    "strategy", [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2]
)
@ranks(4)
def test_hybrid_strategies_train_as_one_process(strategy: ShardingStrategy) -> None:
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("copies", "shards"))
    assert_trains_as_one_process(
        [1, 4, 2, 3], sharding_strategy=strategy, device_mesh=mesh, use_orig_params=True
    )


@pytest.mark.parametrize("strategy", [FULL, NO])
@ranks(3)
def test_gradients_are_divided_by_the_ranks_that_have_data_when_asked(
    strategy: ShardingStrategy,
) -> None:
    batches = [1, 4, 2]
    model, optimizer = wrap(sharding_strategy=strategy, use_orig_params=True)
    reference = Reference(Net, batches)
    train(model, optimizer, batches, divide_by_initial_world_size=False)
    for step in range(max(batches)):
        reference.backward(step, divide_by=len(reference.active(step)))
        reference.step()
    assert_same(model, reference)


@pytest.mark.parametrize("inside_no_sync", [True, False])
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", [FULL, GRAD_OP, NO])
@ranks(2)
def test_gradients_accumulate_also_those_of_a_rank_that_leaves_in_between(
    strategy: ShardingStrategy, use_orig_params: bool, inside_no_sync: bool
) -> None:
    batches, every = [3, 7], 2
    model, optimizer = wrap(sharding_strategy=strategy, use_orig_params=use_orig_params)
    reference = Reference(Net, batches)
    with Join([model], optimizer=optimizer):
        for step in own_steps(batches):
            accumulates = (step + 1) % every and step + 1 < max(batches)
            if accumulates and inside_no_sync:
                with model.no_sync():
                    loss_of(model, dist.get_rank(), step).backward()
            else:
                loss_of(model, dist.get_rank(), step).backward()
            if not accumulates:
                optimizer.step()
                optimizer.zero_grad()
    for step in range(max(batches)):
        reference.backward(step, divide_by=2)
        if not ((step + 1) % every and step + 1 < max(batches)):
            reference.step()
    assert_same(model, reference)


@pytest.mark.parametrize("use_orig_params", [True, False])
@ranks(2)
def test_ranks_without_data_clip_and_follow_learning_rates_also_into_the_next_epoch(
    use_orig_params: bool,
) -> None:
    batches = [2, 5]
    model, optimizer = wrap(use_orig_params=use_orig_params)
    reference = Reference(Net, batches)
    schedulers = [
        torch.optim.lr_scheduler.StepLR(each, step_size=2, gamma=0.5)
        for each in (optimizer, reference.optimizer)
    ]
    for _ in range(2):
        with Join([model], optimizer=optimizer, lr_scheduler=schedulers[0]):
            for step in own_steps(batches):
                optimizer.zero_grad()
                loss_of(model, dist.get_rank(), step).backward()
                norm = model.clip_grad_norm_(0.05 + step)
                assert norm > 0
                optimizer.step()
                schedulers[0].step()
        for step in range(max(batches)):
            reference.backward(step, divide_by=2)
            nn.utils.clip_grad_norm_(reference.model.parameters(), 0.05 + step)
            reference.step()
            schedulers[1].step()
        assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()
        assert schedulers[0].last_epoch == schedulers[1].last_epoch
    assert_same(model, reference)


@pytest.mark.parametrize(
    "options",
    [
        {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)},
        {"mixed_precision": MixedPrecision(torch.bfloat16)},
        {"cpu_offload": CPUOffload(offload_params=True)},
        {"backward_prefetch": None},
        {"forward_prefetch": True},
    ],
)
@ranks(2)
def test_a_rank_without_data_counts_as_one_whose_losses_are_zero(options: dict[str, Any]) -> None:
    batches = [2, 5]
    model, optimizer = wrap(use_orig_params=True, **options)
    train(model, optimizer, batches)
    even, optimizer = wrap(use_orig_params=True, **options)
    for step in range(max(batches)):
        weight = float(step < batches[dist.get_rank()])
        (weight * loss_of(even, dist.get_rank(), step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = full_parameters(even)
    for name, parameter in full_parameters(model).items():
        torch.testing.assert_close(parameter, expected[name])


class Changing(Net):
    """Runs a block twice, leaves one out in some steps, and has parameters that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))
        self.rare = nn.Parameter(torch.ones(3))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.embed(x)
        for index in (0, 1, 0) if self.calls % 3 else (0, 2):
            x = self.blocks[index](x)
        return self.head(x)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("strategy", [FULL, GRAD_OP, NO])
@ranks(2)
def test_models_that_run_other_units_in_every_step_are_followed(
    strategy: ShardingStrategy, set_to_none: bool
) -> None:
    batches = [2, 8]
    model, optimizer = wrap(Changing, sharding_strategy=strategy, use_orig_params=True)
    reference = Reference(Changing, batches)
    train(model, optimizer, batches, set_to_none)
    for step in range(max(batches)):
        calls = reference.model.calls
        losses = []
        for rank in reference.active(step):
            reference.model.calls = calls
            losses.append(loss_of(reference.model, rank, step))
        (sum(losses, torch.zeros(())) / 2).backward()
        reference.step(set_to_none)
    assert_same(model, reference)


@ranks(2)
def test_communication_hooks_are_called_on_ranks_without_data() -> None:
    def average(state: None, gradient: torch.Tensor, shard: torch.Tensor) -> None:
        dist.all_reduce(gradient)
        shard.copy_(gradient.chunk(2)[dist.get_rank()] / 2)

    batches = [1, 4]
    model, optimizer = wrap(use_orig_params=True)
    model.register_comm_hook(None, average)
    reference = Reference(Net, batches)
    train(model, optimizer, batches)
    for step in range(max(batches)):
        reference.backward(step, divide_by=2)
        reference.step()
    assert_same(model, reference)


@pytest.mark.parametrize("strategy", [FULL, GRAD_OP, NO])
@ranks(3)
def test_a_model_evaluates_uneven_numbers_of_batches(strategy: ShardingStrategy) -> None:
    model, _ = wrap(sharding_strategy=strategy, use_orig_params=True)
    bare, batches = build(Net), [3, 0, 1]
    with Join([model], optimizer=None), torch.no_grad():
        for step in own_steps(batches):
            x = batch(dist.get_rank(), step)
            torch.testing.assert_close(model(x), bare(x))
    assert isinstance(model, Joinable)
    assert all(unit.joining is None for unit in model._schedule.units)
