"""Measuring the peak memory of a step with the allocator's own counters.

The allocator of an accelerator records its peak. That of the host does not, so glibc's counters are
read before and after every operation of the step. Without glibc, nothing is measured.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.tracing.allocator import host_bytes_in_use

__all__ = ["Measured", "bytes_of", "watch_step"]


class Measured:
    """The peak of a step in bytes; None if it could not be measured."""

    peak: int | None = None


@contextlib.contextmanager
def watch_step(device: torch.device, resting: Iterable[torch.Tensor]) -> Iterator[Measured]:
    """Measure the peak memory of the step inside the context, plus that of ``resting`` tensors.

    Other memory is in use as well, such as tens of MiB that a GPU's library for matrix products
    keeps after its first call. So the result is the increase during the step, plus the size of the
    ``resting`` tensors that were on the device before. Do not use it for the first step.
    """
    measured = Measured()
    at_rest = bytes_of(tensor for tensor in resting if tensor.device.type == device.type)
    gc.collect()
    if device.type != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield measured
        measured.peak = torch.cuda.max_memory_allocated(device) - before + at_rest
        return
    before = host_bytes_in_use()
    with _Sampling() as sampling:
        yield measured
    if before:
        measured.peak = sampling.peak - before + at_rest


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of the storages behind ``tensors``, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class _Sampling(TorchDispatchMode):
    """Reads the memory in use before and after every operation."""

    peak = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.peak = max(self.peak, host_bytes_in_use())
        result = function(*args, **(kwargs or {}))
        self.peak = max(self.peak, host_bytes_in_use())
        return result
