"""Turns a group's full gradients into the reduced gradients that the optimizer sees.

Note: absent gradients
    A parameter that no rank used gets no gradient, and the optimizer must not step it; one that
    some rank used gets a gradient on every rank. A rank fills the slot of a parameter that it did
    not use with negative zeros; a rank that used it adds 0.0 to at least one element of every
    rank's piece, which turns -0.0 into +0.0. So the sum of a piece is all negative zeros only if no
    rank used the parameter, and only ranks that did not use it have to look.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..comm.collectives import Group
from ..comm.custom import allocate, start_reduce_scatter_by
from ..comm.messages import as_real
from ..comm.streams import streams_for
from ..params.buffers import ReduceBuffer
from ..params.handle import FlatParamHandle
from ..params.replacements import check_shape
from ..params.row_buffers import RowReduceBuffer
from ..params.row_handle import RowHandle
from .encoded_reduce import start_encoded_reduce

Gradients = Sequence[torch.Tensor | None]

_IS_THERE = functools.partial(operator.is_not, None)


class ReduceInput(NamedTuple):
    """A group's full gradients in one buffer, ready to be reduced."""

    handle: FlatParamHandle
    flat: torch.Tensor
    absent: list[int]
    #: The buffer that owns the memory of ``flat``, if the group is sharded.
    buffer: ReduceBuffer | None

    def release(self) -> None:
        if self.buffer is not None:
            self.buffer.release()


class UnreducedGradients(NamedTuple):
    """A group's full gradients, which no other rank shares."""

    handle: FlatParamHandle
    gradients: Gradients

    def deliver(self) -> None:
        """Put them on the parameters that the optimizer holds."""
        handle = self.handle
        dtype = handle.dtypes.reduce if handle.keep_low_precision_grads else handle.dtypes.shard
        pairs = zip(handle.params, self.gradients, strict=True)
        given = [(parameter, g) for parameter, g in pairs if g is not None]
        # Copies: autograd may also give the same tensor, or an expanded one, to others.
        if len(given) == len(handle.params):
            # In one block: cutting it takes the host less time than allocating each.
            numel = handle.layout.padded_numel
            flat = torch.empty(numel, dtype=dtype, device=handle.device)
            copies = [copy for _, copy in handle.cut(flat)]
        else:
            copies = [torch.empty_like(p, dtype=dtype, device=g.device) for p, g in given]
        copy_to_places(copies, [gradient for _, gradient in given])
        found = [(parameter, copy) for (parameter, _), copy in zip(given, copies, strict=True)]
        if handle.offload:
            streams = streams_for(handle.device)
            found = [(parameter, streams.copy_to_host(gradient)) for parameter, gradient in found]
        _put_or_add(handle, found)

    def release(self) -> None:
        """Do nothing: no buffer is held."""


class Average(NamedTuple):
    """Turns gradients into their mean over all ranks.

    Either the backend does (``in_collective``), or gradients are divided before and after the sum.
    """

    shards: Group
    copies: Group | None
    before: float
    after: float
    in_collective: bool

    @classmethod
    def over(
        cls,
        shards: Group,
        copies: Group | None,
        dtype: torch.dtype,
        sums_only: bool = False,
        *,
        divisor: float | None = None,
        custom: bool = False,
    ) -> Average:
        """The mean over all ranks, or their sum divided by ``divisor``.

        ``custom``: the user's own reduce-scatter is used, which can compute means.
        """
        ranks = shards.size * (copies.size if copies else 1)
        before = 1.0
        if dtype is torch.float16:
            # Divide by about the square root of the number of ranks before the sum, and by the rest
            # after it, so that float16 neither overflows nor underflows.
            while ranks % (before * 2) == 0 and before * before < ranks:
                before *= 2
        divisor = ranks if divisor is None else divisor
        can_average = [custom or shards.averages or shards.size == 1]
        if copies is not None:
            can_average.append(copies.averages or copies.size == 1)
        in_collective = not sums_only and before == 1.0 and divisor == ranks and all(can_average)
        after = 1.0 if in_collective else divisor / before
        return cls(shards, copies, before, after, in_collective)


def stage(
    handle: FlatParamHandle,
    gradients: Gradients,
    dtype: torch.dtype,
    fills_unused: bool = False,
    shows_gaps: bool = False,
) -> ReduceInput:
    """Copy a group's gradients into its reduce buffer, and cast them to ``dtype`` on the way.

    ``fills_unused``: parameters without a gradient get one of zeros, on every rank. ``shows_gaps``:
    a user's hook reads what lies between gradients, which therefore are zeros.
    """
    buffer: ReduceBuffer | None = None
    if handle.is_sharded:
        buffer = handle.reduce_buffers.get(dtype) or handle.reduce_buffer(dtype)
        buffer.allocate()
        flat, places = buffer.alias, buffer.places
        # Hooks on flat parameters read the gaps, too, and so does encoding in blocks.
        reads_gaps = shows_gaps or not handle.use_orig_params or handle.reduced_in is not None
        if reads_gaps and buffer.gaps:
            torch._foreach_zero_(buffer.gaps)
    else:
        flat = torch.empty(handle.layout.padded_numel, dtype=dtype, device=handle.device)
        places = [flat.as_strided(s.shape, s.stride, s.offset) for s in handle.layout.slots]
        if shows_gaps or not handle.use_orig_params:
            for start, end in handle.layout.gaps():
                flat[start:end].zero_()
    present: list[torch.Tensor] = [*filter(_IS_THERE, gradients)]  # type: ignore[list-item]
    pattern: tuple[bool, ...] | None = None
    absent: list[int] = []
    if len(present) < len(gradients):
        pattern = tuple(gradient is not None for gradient in gradients)
        absent = [index for index, is_there in enumerate(pattern) if not is_there]
        for index in absent:
            as_real(places[index]).fill_(0.0 if fills_unused else -0.0)
        places = [p for p, g in zip(places, gradients, strict=True) if g is not None]
        trainable = handle.trainable
        absent = [] if fills_unused else [index for index in absent if trainable[index]]
    if isinstance(buffer, RowReduceBuffer):
        _copy_rows(buffer, gradients)
    else:
        copy_to_places(places, present)
    if handle.use_orig_params and present and handle.reduced_in is None:
        # All of them by a grid, which needs no memory on a device; on a host, indices are faster.
        by_grid = pattern is None and flat.device.type != "cpu"
        if not (by_grid and buffer is not None and buffer.mark_all()):
            handle.used_marks.mark(flat, pattern)
    return ReduceInput(handle, flat, absent, buffer)


def copy_to_places(places: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
    """Copy, and cast, dense or sparse gradients to their places in a buffer."""
    if not gradients:
        return
    try:
        torch._foreach_copy_(places, gradients)
    except RuntimeError:
        if not any(gradient.is_sparse for gradient in gradients):
            raise
        # Embeddings may have sparse ones. Checking each gradient first would slow every step.
        dense = [g.to_dense() if g.is_sparse else g for g in gradients]
        torch._foreach_copy_(places, dense)


def _copy_rows(buffer: RowReduceBuffer, gradients: Gradients) -> None:
    if buffer.flat.device.type == "cpu" or not buffer.fill(gradients):
        copy_to_places(*buffer.copies(gradients))


class Reducing(NamedTuple):
    """Staged gradients that are being summed over the ranks that share the shards."""

    staged: ReduceInput
    average: Average
    unit: str
    sum: torch.Tensor
    await_sum: Callable[[], None]

    def finish(self) -> torch.Tensor:
        """The mean over all ranks: this rank's shard of it, or all of it."""
        self.await_sum()
        if self.average.copies is not None:
            mean = self.average.in_collective
            self.average.copies.all_reduce(self.sum, self.unit, mean=mean)
        if self.average.after != 1.0:
            self.sum.div_(self.average.after)
        return self.sum


def start_reduce(staged: ReduceInput, average: Average, unit: str, comm: Any = None) -> Reducing:
    """Begin to reduce staged gradients, with the user's ``comm`` if there is one."""
    handle, flat, mean = staged.handle, staged.flat, average.in_collective
    if average.before != 1.0:
        flat.div_(average.before)
    if handle.reduced_in is not None:
        keeps_dtype = handle.keep_low_precision_grads or average.copies is not None
        total, await_sum = start_encoded_reduce(
            handle, flat, staged.absent, average.shards, unit, mean, keeps_dtype
        )
    elif handle.is_sharded and comm is not None:
        total = allocate(comm, handle.layout.shard_numel, flat.dtype, flat.device)
        await_sum = start_reduce_scatter_by(comm, average.shards, total, flat, unit, mean)
    elif handle.is_sharded:
        total = flat.new_empty(handle.layout.shard_numel)
        await_sum = average.shards.start_reduce_scatter(total, flat, unit, mean)
    else:
        total = flat
        await_sum = average.shards.start_all_reduce(flat, unit, mean=mean)
    return Reducing(staged, average, unit, total, await_sum)


class PossiblyUnused(NamedTuple):
    """A reduced gradient that is all negative zero if no rank used the parameter."""

    handle: FlatParamHandle
    slot: int
    gradient: torch.Tensor
    #: The elements that may be negative zeros. Not always the gradient, which may be empty.
    witness: torch.Tensor


def deliver(
    handle: FlatParamHandle, reduced: torch.Tensor, absent: Sequence[int]
) -> list[PossiblyUnused]:
    """Cast reduced gradients to the shard's dtype, and put them on the optimizer's parameters.

    Returns the gradients of parameters that this rank did not use, and maybe no rank did.
    """
    if reduced.dtype is not handle.dtypes.shard and not handle.keep_low_precision_grads:
        reduced = reduced.to(handle.dtypes.shard)
    if handle.offload:
        reduced = streams_for(handle.device).copy_to_host(reduced)
    if not handle.use_orig_params:
        _put_or_add(handle, [(handle.flat_param, reduced)])
        return []
    cut = handle.cut(reduced)
    if not absent:
        _put_or_add(handle, [(handle.params[i], piece) for i, piece in cut])
        return []
    missing = set(absent)
    _put_or_add(handle, [(handle.params[i], piece) for i, piece in cut if i not in missing])
    undecided = [(i, piece) for i, piece in cut if i in missing]
    return [PossiblyUnused(handle, i, p, handle.witness(reduced, i, p)) for i, p in undecided]


def settle(undecided: Sequence[PossiblyUnused]) -> None:
    """Deliver the gradients that some rank has, and leave the others out."""
    if not undecided:
        return
    parts = [as_real(maybe.witness) for maybe in undecided]
    absent = torch.stack([(part.signbit() & (part == 0)).all() for part in parts])
    answers = [*zip(undecided, absent.tolist(), strict=True)]
    for maybe, is_absent in answers:
        maybe.handle.remember_absent(maybe.slot, is_absent)
    accept([maybe for maybe, is_absent in answers if not is_absent])


def settle_as_before(undecided: Sequence[PossiblyUnused]) -> None:
    """Do the same by the results of earlier steps: a capture cannot read from the device.

    A graph repeats the step that was captured, and so do those of the other ranks.
    """
    for handle, slot, *_ in undecided:
        if handle.was_absent(slot) is None:
            raise RuntimeError(
                f"Parameter {handle.places[slot][0].path!r} got no gradient on this rank in a "
                "backward that is captured in a CUDA graph, and whether another rank has one is "
                "known only to the device: run the same step at least once before it is captured"
            )
    accept([maybe for maybe in undecided if not maybe.handle.was_absent(maybe.slot)])


def accept(found: Sequence[PossiblyUnused]) -> None:
    """Put gradients that some rank has on their parameters."""
    for handle, slot, gradient, _ in found:
        _put_or_add(handle, [(handle.params[slot], gradient)])


def _put_or_add(
    handle: FlatParamHandle, pairs: Sequence[tuple[nn.Parameter, torch.Tensor]]
) -> None:
    """Put gradients on parameters that have none, and add the others to those that are there."""
    handle.receive(map(operator.itemgetter(0), pairs))
    if isinstance(handle, RowHandle):
        left = handle.put_gradients(pairs)
    else:
        left = []
        for parameter, gradient in pairs:
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                set_gradient(parameter, gradient)
            else:
                left.append((parameter, gradient))
    if left:
        _add_in_place(handle, left)


def _add_in_place(
    handle: FlatParamHandle, pairs: Sequence[tuple[nn.Parameter, torch.Tensor]]
) -> None:
    """Add gradients to those that their parameters have."""
    old: list[torch.Tensor] = []
    for parameter, gradient in pairs:
        found: Any = parameter.grad
        if isinstance(handle, RowHandle):
            found = handle.local_gradient(parameter)
        if found.shape != gradient.shape:
            check_shape("gradient", handle.where(parameter), gradient, found)
        old.append(found)
    if handle.offload:
        # The host adds gradients that are still being copied from the device.
        streams_for(handle.device).host_after_reduces()
    torch._foreach_add_(old, [gradient for _, gradient in pairs])


def set_gradient(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """Set ``parameter.grad``, even to a gradient of another shape, dtype or device.

    Whole gradients of sharded or offloaded parameters (``no_sync``) and low-precision gradients
    are such cases. Torch compares a gradient with the parameter only when it is assigned.
    """
    try:
        # Comparing first would take longer than all the rest, for every parameter and step.
        parameter.grad = gradient
    except RuntimeError:
        data = parameter.data
        parameter.data = gradient
        parameter.grad = gradient
        parameter.data = data
