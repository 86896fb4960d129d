"""Memory on a GPU, also while the host is far ahead of it: what ``limit_all_gathers`` is for.

Gloo makes the host wait, so that it never runs ahead; the ranks here are imagined ones, whose
collectives return at once, as NCCL's do. What they would send plays no part in how much memory is
asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fullshard import FullyShardedDataParallel
from fullshard.engine.comm.streams import streams_for
from fullshard.testing import device

WIDTH, UNITS = 512, 16
UNIT = WIDTH * WIDTH * 4
SMALL = 256 * 1024
#: Five fit into sixteen MiB, and leave a little less than one.
SHARD = 3 * 2**20 + 2048

on_a_gpu = pytest.mark.skipif(device().type == "cpu", reason="a CPU's host is never ahead of it")


class Done:
    def wait(self) -> bool:
        return True


class ImaginedRanks:
    """A process group of eight, of which the others answer at once and send nothing."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 8

    def _allgather_base(self, output: torch.Tensor, piece: torch.Tensor) -> Done:
        return Done()

    _reduce_scatter_base = all_gather_single = reduce_scatter_single = _allgather_base


def chain(**options: Any) -> Any:
    group: Any = ImaginedRanks()
    linears = [nn.Linear(WIDTH, WIDTH, bias=False, device=device()) for _ in range(UNITS)]
    units = [FullyShardedDataParallel(linear, group, **options) for linear in linears]
    return FullyShardedDataParallel(nn.Sequential(*units), group, **options)


def peak_while_the_gpu_sleeps(train: bool, **options: Any) -> int:
    model = chain(**options)
    data = torch.ones(1, WIDTH, device=device())
    for _ in range(3):
        model(data).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    awake = torch.cuda.Event()

    torch.cuda._sleep(2_000_000_000)
    awake.record()
    with torch.set_grad_enabled(train):
        output = model(data)
    if train:
        output.sum().backward()

    assert not awake.query(), "the host was to be done before the GPU begins"
    # Active: what is freed while a stream may still use it counts, since nobody else can have it.
    peak: int = torch.cuda.memory_stats()["active_bytes.all.peak"] - before
    torch.cuda.synchronize()
    return peak


@on_a_gpu
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("forward_prefetch", [False, True])
def test_a_forward_far_ahead_of_the_gpu_takes_two_units(
    forward_prefetch: bool, use_orig_params: bool
) -> None:
    peak = peak_while_the_gpu_sleeps(
        False, forward_prefetch=forward_prefetch, use_orig_params=use_orig_params
    )

    assert peak <= 2 * UNIT + SMALL, peak


@on_a_gpu
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_step_far_ahead_of_the_gpu_takes_two_units_and_their_gradients(
    use_orig_params: bool,
) -> None:
    peak = peak_while_the_gpu_sleeps(True, use_orig_params=use_orig_params)

    # Two full buffers, the gradients of one unit, two reduce buffers.
    assert peak <= 5 * UNIT + SMALL, peak


@on_a_gpu
def test_without_the_limit_every_unit_gets_memory_of_its_own() -> None:
    peak = peak_while_the_gpu_sleeps(False, limit_all_gathers=False, forward_prefetch=True)

    assert peak >= (UNITS - 2) * UNIT, peak


def memory_at_units(model: Any, data: torch.Tensor) -> list[int]:
    """Bytes in use as a backward leaves each unit but the first."""
    in_use: list[int] = []

    def watch(_: Any, inputs: tuple[torch.Tensor]) -> None:
        # When the gradient of a unit's input is there, its own gradients are being reduced.
        inputs[0].register_hook(lambda _: in_use.append(torch.cuda.memory_allocated()))

    for unit in model.module[1:]:
        unit.module.register_forward_pre_hook(watch)
    model(data).sum().backward()
    return in_use


@on_a_gpu
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_the_first_units_gradients_take_no_memory_while_the_second_computes(
    use_orig_params: bool,
) -> None:
    model = chain(use_orig_params=use_orig_params)
    data = torch.ones(1, WIDTH, device=device())
    model(data).sum().backward()
    model.zero_grad()

    in_use = memory_at_units(model, data)

    # From the second on the buffer that they are reduced from is in use; shards of them stay.
    first, second, *others = in_use
    assert len(others) == UNITS - 3
    assert second >= first + UNIT, in_use
    assert max(others) < second + UNITS * UNIT // 8, in_use


@on_a_gpu
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_what_is_added_to_gradients_is_not_kept_until_the_end(use_orig_params: bool) -> None:
    model = chain(use_orig_params=use_orig_params)
    data = torch.ones(1, WIDTH, device=device())
    model(data).sum().backward()

    _, second, *others = memory_at_units(model, data)

    # As many shards of gradients as units would be UNITS * UNIT // 8.
    assert max(others) <= second + UNIT // 8 + SMALL, (second, others)


def taken_by_twelve(make: Callable[[int, torch.dtype], torch.Tensor]) -> int:
    """Bytes for shards of a little more than three MiB, beside a freed block of sixteen."""
    torch.cuda.empty_cache()
    freed = torch.empty(16 * 2**20, dtype=torch.uint8, device=device())
    del freed
    before = torch.cuda.memory_allocated()
    shards = [make(SHARD // 4, torch.float32) for _ in range(12)]
    assert not any(shard.any() for shard in shards)
    return torch.cuda.memory_allocated() - before


@on_a_gpu
def test_shards_take_blocks_that_fit() -> None:
    taken = taken_by_twelve(streams_for(device()).lasting_zeros)
    otherwise = taken_by_twelve(
        lambda numel, dtype: torch.zeros(numel, dtype=dtype, device=device())
    )

    assert taken == 12 * SHARD, (taken, otherwise)
    assert otherwise > taken, "what the allocator offers first fits as well: nothing was tested"
