"""Reduces a group's gradients in another form than they are computed in, such as 8 bits.

Every rank sends every other one the part of its gradients that the other one keeps, encoded; that
one decodes the parts and adds them to its own in float32. So what a gradient loses it loses once,
and what a rank keeps of its own gradients loses nothing.

Note: absent gradients in encoded parts
    The sign of zero, which tells absent gradients (see ``gradients.py``), is lost in blocks that
    another parameter shares. So each part brings a byte for every parameter: whether the rank has
    a gradient of it. Where no rank has, the negative zeros are written after the sum; all that
    follows finds them as it does after any other reduce.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ..comm.collectives import Group
from ..params.handle import FlatParamHandle
from ..params.unused_parameters import presence_bytes


def start_encoded_reduce(
    handle: FlatParamHandle,
    flat: torch.Tensor,
    absent: list[int],
    group: Group,
    unit: str,
    mean: bool,
    keeps_dtype: bool,
) -> tuple[torch.Tensor, Callable[[], None]]:
    """Begin to sum ``flat``; returns the sum, and what waits for it.

    The sum is in float32, or in the dtype of ``flat`` if ``keeps_dtype``.
    """
    encoding = handle.reduced_in
    assert encoding is not None
    wide = torch.promote_types(flat.dtype, torch.float32)
    numel = handle.layout.shard_numel
    total = flat.new_empty(numel, dtype=flat.dtype if keeps_dtype else wide)
    sums = total if total.dtype is wide else flat.new_empty(numel, dtype=wide)
    present = presence_bytes(len(handle.layout.slots), tuple(absent), flat.device)
    await_sum = group.start_encoded_reduce(sums, flat, present, encoding, unit)
    divisor = group.size if mean else 1
    return total, functools.partial(_finish, handle, total, sums, absent, divisor, await_sum)


def _finish(
    handle: FlatParamHandle,
    total: torch.Tensor,
    sums: torch.Tensor,
    absent: list[int],
    divisor: int,
    await_sum: Callable[[], torch.Tensor],
) -> None:
    present = await_sum()
    if divisor != 1:
        sums.div_(divisor)
    if sums is not total:
        total.copy_(sums)
    for index in absent:
        # Without asking the device, which may be far behind the host.
        place = handle.room(total, index)
        place.copy_(torch.where(present[index] > 0, place, -0.0))
