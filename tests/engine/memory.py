"""Watches how much memory is in use: independent of who allocates, and of what for.

On a GPU torch's allocator counts. On the host glibc does, for all threads (gloo's own let go of
tensors, too); it is asked before and after every operation of torch. Collectives are complete when
they start: what they fill is there as early as it can be, and gloo's own scratch is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.engine.traffic import immediate_collectives
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.testing import device


@dataclass
class Memory:
    """Bytes beyond those that were in use at the beginning."""

    peak: int = 0
    left: int = 0


@contextlib.contextmanager
def watched_memory(peak: bool = True) -> Iterator[Memory]:
    """Watch the device that tests compute on; without its peak, what is left is found sooner."""
    with _watched_host(peak) if device().type == "cpu" else _watched_gpu() as memory:
        yield memory


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


@functools.cache
def _mallinfo() -> Any:
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        pytest.skip("memory on the host is counted by glibc's mallinfo2")
    mallinfo.restype = _Mallinfo
    return mallinfo


def _bytes_in_use() -> int:
    found = _mallinfo()()
    return int(found.uordblks + found.hblkhd)


#: How many collectives torch remembers in a process.
_REMEMBERED = 2000


@functools.cache
def _fill_record() -> None:
    """Have torch's record of recent collectives be as large as it gets.

    It takes twice the memory whenever it is full, half a MiB more at its 1,025th entry.
    """
    alone = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
    for _ in range(_REMEMBERED):
        alone.allreduce([torch.zeros(1)]).wait()  # type: ignore[attr-defined]


#: Bytes by which a peak must grow for a second look.
_NOTICED = 64 * 1024


class _Sampling(TorchDispatchMode):
    """Looks at the memory in use before and after every operation."""

    peak = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        is_collective = function.namespace == "c10d"
        self._look()
        result = function(*args, **(kwargs or {}))
        if not is_collective:
            self._look()
        return result

    def _look(self) -> None:
        found = _bytes_in_use()
        if found > self.peak + _NOTICED:
            # Gloo's threads let go of what they worked on a moment later; the rest stays.
            time.sleep(0.005)
            found = min(found, _bytes_in_use())
        self.peak = max(self.peak, found)


@contextlib.contextmanager
def _watched_host(peak: bool) -> Iterator[Memory]:
    memory = Memory()
    _fill_record()
    _settle()
    before = _bytes_in_use()
    sampling = _Sampling()
    with immediate_collectives(), sampling if peak else contextlib.nullcontext():
        yield memory
    _settle()
    memory.peak = sampling.peak - before
    memory.left = _bytes_in_use() - before


def _settle() -> None:
    gc.collect()
    # Gloo's threads may still hold what they worked on.
    time.sleep(0.01)


@contextlib.contextmanager
def _watched_gpu() -> Iterator[Memory]:
    memory = Memory()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield memory
    torch.cuda.synchronize()
    memory.peak = torch.cuda.max_memory_allocated() - before
    memory.left = torch.cuda.memory_allocated() - before
