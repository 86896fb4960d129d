"""Reduces a group's gradients in an encoding, such as 8 bits.

Each rank encodes the parts of its gradients that other ranks own, and sends them to these ranks,
which decode the parts and add them to their own in float32. So each gradient is rounded once, and
the part of a rank's gradients that it owns itself is not rounded at all.

Note: absent gradients in encoded parts
    The sign of zero, which marks absent gradients (see ``gradients.py``), is lost in blocks that
    several parameters share. So each part contains a byte for every parameter: whether the rank has
    a gradient of it. If no rank has one, negative zeros are written after the sum, where the
    following code finds them as after any other reduce.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from ..comm.collectives import Group
from ..params.handle import FlatParamHandle
from ..params.unused_parameters import used_parameter_bytes


def staging_dtype(
    handle: FlatParamHandle, gradients: Sequence[torch.Tensor | None], group: Group
) -> torch.dtype:
    """The dtype in which gradients wait to be encoded: the reduce dtype, or a narrower one.

    Gradients that autograd computed in bfloat16 stay so until they are encoded, which saves half of
    the memory and of its traffic: they are sent and added up as if they had been cast to float32
    first. Where hosts exchange more than what is encoded, as over gloo, all ranks need the same
    dtype, whatever gradients each has, so it is the reduce dtype there.
    """
    reduce, compute = handle.dtypes.reduce, handle.dtypes.compute
    widened = (compute, reduce) == (torch.bfloat16, torch.float32)
    if not widened or not group.runs_ahead:
        return reduce
    return compute if all(g is None or g.dtype is compute for g in gradients) else reduce


def start_encoded_reduce(
    handle: FlatParamHandle,
    flat: torch.Tensor,
    absent: list[int],
    group: Group,
    unit: str,
    mean: bool,
    keeps_dtype: bool,
) -> tuple[torch.Tensor, Callable[[], None]]:
    """Begin to sum ``flat``; returns the sum, and a function that waits for it.

    The sum is in float32, or in the reduce dtype if ``keeps_dtype``.
    """
    encoding = handle.reduced_in
    assert encoding is not None
    reduce = handle.dtypes.reduce
    wide = torch.promote_types(reduce, torch.float32)
    numel = handle.layout.shard_numel
    total = flat.new_empty(numel, dtype=reduce if keeps_dtype else wide)
    sums = total if total.dtype is wide else flat.new_empty(numel, dtype=wide)
    present = used_parameter_bytes(len(handle.layout.slots), tuple(absent), flat.device)
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
        # On the device: reading ``present`` on the host would wait for it.
        place = handle.room(total, index)
        place.copy_(torch.where(present[index] > 0, place, -0.0))
