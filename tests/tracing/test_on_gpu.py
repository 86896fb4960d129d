"""A trace on a GPU against torch's profiler, over NCCL or gloo.

python -m fullshard.testing tests/tracing/test_on_gpu.py --device cuda --backend nccl
"""

from __future__ import annotations

import itertools

import pytest
import torch

import fullshard
from fullshard.testing import device, ranks
from fullshard.tracing.analysis import seconds_by_kind
from fullshard.tracing.records import COLLECTIVES, What

from .training import stepper, wrapped

on_gpu = pytest.mark.skipif(device().type != "cuda", reason="needs --device cuda")


@on_gpu
@ranks(2)
def test_computing_takes_as_long_as_the_profiler_says() -> None:
    """Kernels of a step, summed by the profiler, and what the trace says that units computed."""
    sharded = wrapped(width=4096, blocks=4)
    step, optimizer = stepper(sharded, width=4096, rows=8192)
    for _ in range(4):
        step()

    with fullshard.trace(sharded, optimizer) as trace:
        for _ in range(3):
            step()
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA]) as profile:
        for _ in range(3):
            step()
        torch.cuda.synchronize()

    kernels = sum(
        event.device_time_total
        for event in profile.key_averages()
        if not any(word in event.key.lower() for word in ("nccl", "memcpy", "memset"))
    )
    by_kind = seconds_by_kind(trace.data.ranks[0])
    computing = (What.FORWARD, What.BACKWARD, What.COPY, What.OPTIMIZER, What.OUTSIDE)
    traced = sum(by_kind.get(what, 0.0) for what in computing)
    assert traced == pytest.approx(1e-6 * kernels / 3, rel=0.05)


@on_gpu
@ranks(2)
def test_collectives_begin_before_they_end_and_one_after_the_other() -> None:
    sharded = wrapped(width=1024, blocks=4)
    step, optimizer = stepper(sharded, width=1024, rows=1024)
    for _ in range(4):
        step()

    with fullshard.trace(sharded, optimizer) as trace:
        step()

    for kind in COLLECTIVES:
        spans = sorted((r.started, r.ended) for r in trace.records if r.what is kind)
        assert spans
        assert all(begin <= end for begin, end in spans)
        assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(spans))


@on_gpu
@ranks(2)
def test_memory_accounts_for_the_allocators_peak() -> None:
    sharded = wrapped(width=2048, blocks=4)
    step, optimizer = stepper(sharded, width=2048, rows=4096)
    for _ in range(4):
        step()

    torch.cuda.reset_peak_memory_stats()
    with fullshard.trace(sharded, optimizer) as trace:
        step()
    peak = torch.cuda.max_memory_allocated()

    found = max(moment.total for moment in trace.data.ranks[0].memory)
    assert found >= 0.95 * peak - 64 * 2**20
