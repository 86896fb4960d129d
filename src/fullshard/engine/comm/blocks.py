"""Gets blocks from torch's allocators: on an accelerator, ones that fit what stays; on a host, ones
that are kept for whoever asks next.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

#: Bytes up to which an accelerator's allocator splits its blocks as asked.
_SPLIT_FREELY = 2**20
#: Waste allowed in a block that stays: 1/64 of what was wanted.
_LITTLE = 64
#: Blocks that are looked at to find a better one.
_OFFERS = 16
#: Bytes of a little less than the largest block that glibc learns from.
_LESSON = 2**25 - 2**13


def lasting_zeros(
    device: torch.device, stats: Callable[[], dict[str, Any]], numel: int, dtype: torch.dtype
) -> torch.Tensor:
    """Memory of an accelerator for what stays, filled with zeros, in a block that fits.

    The allocator takes the smallest freed block that is large enough, and splits nothing below a
    mebibyte off it: a shard of three may keep four. So it is asked for another one while the first
    is held, as long as it has freed ones. ``stats`` are what torch knows of it, as nested dicts.
    """
    wanted = numel * dtype.itemsize
    if wanted <= _SPLIT_FREELY:
        return torch.zeros(numel, dtype=dtype, device=device)
    offers: list[tuple[int, torch.Tensor]] = []
    allocated, reserved = _in_use(stats)
    for _ in range(_OFFERS):
        try:
            offer = torch.empty(numel, dtype=dtype, device=device)
        except torch.OutOfMemoryError:
            if not offers:
                raise
            break
        before, had = allocated, reserved
        allocated, reserved = _in_use(stats)
        excess = allocated - before - wanted
        offers.append((excess, offer))
        if excess <= wanted // _LITTLE or reserved > had:
            break
    return min(offers, key=operator.itemgetter(0))[1].zero_()


def _in_use(stats: Callable[[], dict[str, Any]]) -> tuple[int, int]:
    """Bytes that are allocated, and that are reserved to allocate from."""
    known = stats()
    kinds = ("allocated_bytes", "reserved_bytes")
    allocated, reserved = (known[kind]["all"]["current"] for kind in kinds)
    return allocated, reserved


@functools.cache
def teach_allocator() -> None:
    """Have the host's allocator keep freed blocks for those who ask next.

    glibc asks the system for every large block, and gives it back when it is freed; to map and
    clear the pages anew is a twentieth of a step in which full parameters and gradients come and
    go. It serves blocks from memory that it keeps, twice as much at most, once it has seen one of
    that size freed. Programs that free large tensors have shown it; here it is shown at the start.
    """
    torch.empty(_LESSON, dtype=torch.uint8, device="cpu")
