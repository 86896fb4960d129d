"""Custom collectives, and memory for collectives, from the user or a process group's backend.

``fully_shard`` accepts objects with the interface of torch's ``AllGather`` and ``ReduceScatter``.
They are called instead of the group's own collective, and allocate the memory that it reads or
fills.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .collectives import Group


class Memory(Protocol):
    """Allocates memory that a collective fills or reads, for one use."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor: ...


def allocate(memory: Memory, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A flat tensor from ``memory``; raises ValueError if it is not as requested."""
    found = memory.allocate((numel,), dtype=dtype, device=device)
    fits = found.numel() == numel and found.dtype == dtype and found.device.type == device.type
    if not fits or not found.is_contiguous():
        raise ValueError(
            f"{type(memory).__name__}.allocate was asked for a contiguous tensor of {numel} "
            f"elements of {dtype} on {device}, but gave one of shape {tuple(found.shape)} of "
            f"{found.dtype} on {found.device}"
        )
    return found.view(-1)


def gather_by(
    comm: Any,
    group: Group,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    unit: str,
) -> list[Any]:
    """Let ``comm`` fill each output with all ranks' inputs; returns the objects to wait for."""
    group.agree("gather", unit, *outputs)
    started: list[Any] = []
    for output, piece in zip(outputs, inputs, strict=True):
        work = comm(output_tensor=output, input_tensor=piece, group=group.group, async_op=False)
        if work is not None:
            started.append(group.pending(work, output, piece))
    return started


def start_reduce_scatter_by(
    comm: Any, group: Group, output: torch.Tensor, full: torch.Tensor, unit: str, mean: bool
) -> Callable[[], None]:
    """Let ``comm`` reduce; the result is in ``output`` once the returned function was called."""
    group.agree("reduce", unit, full)
    operation = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
    work = comm(
        output_tensor=output, input_tensor=full, group=group.group, op=operation, async_op=False
    )

    def wait() -> None:
        if work is not None:
            group.wait(group.pending(work))

    return wait


class BackendMemory:
    """Memory that a process group's backend allocates, where it can; else ordinary memory.

    Backends such as NCCL then send and receive without copies of their own.
    """

    def __init__(self, group: Group) -> None:
        self._group = group.group

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        backend = self._group._get_backend(device)
        if backend.supports_tensor_alloc(device):
            found: torch.Tensor = backend.allocate_tensor(
                math.prod(size), dtype=dtype, device=device
            )
            return found
        return torch.empty(tuple(size), dtype=dtype, device=device)


class SymmetricMemory:
    """Memory that all ranks of a group have mapped, so that NCCL can use its kernels for it.

    To map it is a collective and takes long; so it is made once for each size and dtype, and stays.
    """

    def __init__(self, group: Group) -> None:
        self._group = group.group
        self._known: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        import torch.distributed._symmetric_memory as symmetric

        key = (math.prod(size), dtype)
        if key not in self._known:
            made = symmetric.empty(key[0], dtype=dtype, device=device)
            symmetric.rendezvous(made, self._group.group_name)
            self._known[key] = made
        return self._known[key]
