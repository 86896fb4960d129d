"""How much memory a step takes, by what the allocator says.

Layers are large and batches of one row, so that activations, which are not sharded, are small
beside parameters and gradients.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tests.engine.memory import watched_memory
from torch import nn

from fullshard import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy
from fullshard.engine.runtime.unit import State
from fullshard.testing import device, ranks

#: Widths of a chain of linears: the largest two neighbours are 768 x 1024 and 1024 x 640.
WIDTHS = (512, 384, 768, 1024, 640, 256, 512)
SIZES = [a * b * 4 for a, b in itertools.pairwise(WIDTHS)]
TWO_NEIGHBOURS = max(a + b for a, b in itertools.pairwise(SIZES))
LARGEST = max(SIZES)
#: Activations of one row, padding, and what Python needs.
SMALL = 384 * 1024
# Between GPUs gloo receives into device memory of its own before it fills a buffer.
STAGING = 0 if device().type == "cpu" else LARGEST

with_both_modes = pytest.mark.parametrize("use_orig_params", [False, True])


def chain(strategy: str, **options: Any) -> Any:
    """Each linear a unit of its own, below a root without parameters."""
    torch.manual_seed(0)
    pairs = itertools.pairwise(WIDTHS)
    units = [
        FullyShardedDataParallel(
            nn.Linear(a, b, bias=False, device=device()),
            sharding_strategy=ShardingStrategy[strategy],
            **options,
        )
        for a, b in pairs
    ]
    return FullyShardedDataParallel(
        nn.Sequential(*units), sharding_strategy=ShardingStrategy[strategy], **options
    )


def backward(model: Any) -> None:
    model(torch.ones(1, WIDTHS[0], device=device())).sum().backward()


def warmed_up(strategy: str = "FULL_SHARD", **options: Any) -> Any:
    """After the first steps everything that is made once is made."""
    model = chain(strategy, **options)
    for _ in range(2):
        backward(model)
        model.zero_grad(set_to_none=True)
    return model


def shares(size: int) -> int:
    """Bytes of the shards of all units, when ``size`` ranks share them."""
    return sum(-(-nbytes // 4 // size) * 4 for nbytes in SIZES)


def _check_peak(size: int, **options: Any) -> None:
    model = warmed_up(**options)
    peaks, left = [], []

    # Threads of gloo may hold memory for a moment longer: the least of three steps counts.
    for _ in range(3):
        with watched_memory() as memory:
            backward(model)
        peaks.append(memory.peak)
        left.append(memory.left)
        model.zero_grad(set_to_none=True)

    # Parameter shards were there before; gradient shards come, and stay.
    gradients = shares(size)
    # On a GPU a reduce overlaps with the next unit's backward: its buffer is there beside the
    # full gradients.
    overlap = 0 if device().type == "cpu" else LARGEST
    bound = TWO_NEIGHBOURS + LARGEST + gradients + overlap + STAGING + SMALL
    assert LARGEST <= min(peaks) <= bound, peaks
    assert [abs(each - gradients) <= SMALL for each in left] == [True] * 3, left


@with_both_modes
@pytest.mark.parametrize("prefetch", [None, "BACKWARD_PRE", "BACKWARD_POST"])
@ranks(2)
def test_a_step_takes_two_neighbouring_units_and_a_reduce_buffer_beside_shards(
    prefetch: str | None, use_orig_params: bool
) -> None:
    _check_peak(
        2,
        use_orig_params=use_orig_params,
        backward_prefetch=BackwardPrefetch[prefetch] if prefetch else None,
        forward_prefetch=True,
    )


@with_both_modes
@ranks(4)
def test_on_more_ranks_only_shards_become_smaller(use_orig_params: bool) -> None:
    _check_peak(4, use_orig_params=use_orig_params)


@with_both_modes
@ranks(2)
def test_forward_alone_takes_two_neighbouring_units(use_orig_params: bool) -> None:
    model = warmed_up(use_orig_params=use_orig_params, forward_prefetch=True)
    data = torch.ones(1, WIDTHS[0], device=device())

    with watched_memory() as memory, torch.no_grad():
        model(data)

    assert memory.peak <= TWO_NEIGHBOURS + STAGING + SMALL, memory.peak
    assert memory.left <= SMALL, memory.left


@with_both_modes
@ranks(2)
def test_without_prefetch_one_unit_at_a_time_is_whole(use_orig_params: bool) -> None:
    if device().type != "cpu":
        pytest.skip("an accelerator gives memory back one unit late, to overlap")
    model = warmed_up(
        use_orig_params=use_orig_params, forward_prefetch=False, backward_prefetch=None
    )
    data = torch.ones(1, WIDTHS[0], device=device())

    with watched_memory() as memory, torch.no_grad():
        model(data)

    assert memory.peak <= LARGEST + SMALL


@with_both_modes
@ranks(2)
def test_shard_grad_op_keeps_all_parameters_until_their_backward(use_orig_params: bool) -> None:
    model = warmed_up("SHARD_GRAD_OP", use_orig_params=use_orig_params)

    with watched_memory() as memory:
        output = model(torch.ones(1, WIDTHS[0], device=device())).sum()
    assert sum(SIZES) <= memory.left <= sum(SIZES) + SMALL

    with watched_memory() as memory:
        output.backward()
    assert abs(memory.left - (shares(2) - sum(SIZES))) <= SMALL


@with_both_modes
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@ranks(2)
def test_five_steps_leave_no_more_memory_than_one(strategy: str, use_orig_params: bool) -> None:
    model = warmed_up(strategy, use_orig_params=use_orig_params)
    optimizer = torch.optim.Adam(model.parameters())
    backward(model)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

    left = []
    for _ in range(5):
        with watched_memory(peak=False) as memory:
            backward(model)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        left.append(memory.left)

    # Some table of Python's may grow once; a leak would show on every step.
    assert sorted(left)[-2] <= SMALL // 8


@with_both_modes
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@ranks(2)
def test_between_steps_only_shards_are_there(strategy: str, use_orig_params: bool) -> None:
    with watched_memory() as memory:
        model = warmed_up(strategy, use_orig_params=use_orig_params)
        units = [unit._unit for unit in FullyShardedDataParallel.fsdp_modules(model)]

    if device().type == "cpu":
        # On an accelerator the first steps leave the libraries' own workspaces, too.
        # Tables and code are made at the first steps, too; whole parameters would be 8.5 MiB.
        assert shares(2) <= memory.left <= shares(2) + 3 * SMALL
    assert all(unit.state is State.SHARDED and not unit.shows_full for unit in units)
    assert sum(p.untyped_storage().nbytes() for p in model[0].parameters()) == SIZES[0] // 2


@ranks(2)
def test_evaluation_leaves_nothing_behind() -> None:
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        model = warmed_up(strategy, use_orig_params=True)
        data = torch.ones(1, WIDTHS[0], device=device())

        with watched_memory() as memory:
            with torch.no_grad():
                model(data)
            model(data.requires_grad_(False)).detach()
            with torch.no_grad():
                model(data)

        assert memory.left <= SMALL, memory.left


@ranks(2)
def test_summoning_leaves_nothing_behind() -> None:
    for use_orig_params in (False, True):
        model = warmed_up(use_orig_params=use_orig_params)

        with watched_memory() as memory, FullyShardedDataParallel.summon_full_params(model):
            pass

        # The host's own bookkeeping may have become smaller by some bytes in the meantime.
        assert sum(SIZES) - SMALL <= memory.peak <= 2 * sum(SIZES) + SMALL
        assert memory.left <= SMALL, memory.left


@ranks(2)
def test_frozen_parameters_take_no_memory_for_gradients() -> None:
    class Adapted(nn.Module):
        def __init__(self, frozen: bool) -> None:
            super().__init__()
            self.large = nn.Linear(1024, 1024, bias=False)
            self.small = nn.Linear(1024, 4, bias=False)
            self.large.requires_grad_(not frozen)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.small(self.large(x))

    peaks, left = [], []
    for frozen in (True, False):
        model = FullyShardedDataParallel(Adapted(frozen).to(device()), use_orig_params=True)
        data = torch.ones(1, 1024, device=device())
        for _ in range(2):
            model(data).sum().backward()
            model.zero_grad(set_to_none=True)
        with watched_memory() as memory:
            model(data).sum().backward()
        peaks.append(memory.peak)
        left.append(memory.left)

    large, small = 1024 * 1024 * 4, 1024 * 4 * 4
    # Whole parameters, and for those that train: gradients, a reduce buffer, a shard.
    staging = 0 if STAGING == 0 else large
    assert peaks[0] <= large + staging + 4 * small + SMALL, (peaks, large, small)
    assert abs(left[0] - small // 2) <= SMALL // 2
    # What the frozen layer would take: its gradient and its reduce buffer beside each other.
    assert peaks[1] >= 2 * large
    assert abs(left[1] - (large + small) // 2) <= SMALL // 2
