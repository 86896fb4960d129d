"""Gradients that are kept unreduced, because the user asked for that (``no_sync``).

Note: gradients that the user sees in between
    Inside ``no_sync``, a wrapper's parameters have whole gradients, in compute precision. Gradients
    that an earlier backward reduced are first made whole, in their own precision, so that both can
    be added. A user of ``fully_shard`` sees reduced gradients only; unreduced ones are kept
    separately, and added up in the dtype that they are reduced in, if that is more precise.
"""

from __future__ import annotations

import torch

from ..params.handle import FlatParamHandle
from ..params.row_handle import RowHandle
from .gradients import Gradients, copy_to_places, set_gradient


def keep_local(handle: FlatParamHandle, gradients: Gradients) -> None:
    """Add a group's unreduced gradients to those that are kept."""
    if isinstance(handle, RowHandle):
        dtype = torch.promote_types(handle.dtypes.compute, handle.dtypes.reduce)
        handle.keep_unreduced(_accumulate(handle.take_unreduced(), gradients, dtype))
        handle.show_local_gradients(True)
        return
    if not handle.local_gradients:
        _make_whole(handle)
        handle.show_local_gradients(True)
    if not handle.use_orig_params:
        gradients = [_flatten(handle, gradients)]
    for parameter, gradient in zip(handle.optimizer_params, gradients, strict=True):
        if gradient is None:
            continue
        if parameter.grad is None:
            # A copy: autograd may hand the same tensor to somebody else as well.
            set_gradient(parameter, gradient.to_dense() if gradient.is_sparse else gradient.clone())
        else:
            parameter.grad.add_(gradient)


def take_local(handle: FlatParamHandle, gradients: Gradients) -> Gradients:
    """Return the sum of ``gradients`` and the kept ones, and stop keeping them."""
    handle.show_local_gradients(False)
    if isinstance(handle, RowHandle):
        kept_aside = handle.take_unreduced()
        return _accumulate(kept_aside, gradients) if kept_aside else gradients
    kept = [p.grad if p.requires_grad else None for p in handle.optimizer_params]
    for parameter in handle.optimizer_params:
        if parameter.requires_grad:
            parameter.grad = None
    if not handle.use_orig_params:
        flat = kept[0]
        if flat is None:
            return gradients
        kept = [flat.as_strided(s.shape, s.stride, s.offset) for s in handle.layout.slots]
    return [_sum(old, new) for old, new in zip(kept, gradients, strict=True)]


def _accumulate(
    kept: Gradients, gradients: Gradients, dtype: torch.dtype | None = None
) -> list[torch.Tensor | None]:
    """Add ``gradients`` to ``kept`` in place, and return the sums; copy others to ``dtype``."""
    if not kept:
        kept = [None] * len(gradients)
    pairs = zip(kept, gradients, strict=True)
    return [_copy_of(new, dtype) if old is None else _sum(old, new) for old, new in pairs]


def _copy_of(gradient: torch.Tensor | None, dtype: torch.dtype | None) -> torch.Tensor | None:
    """A dense copy: autograd may hand the same tensor to somebody else as well."""
    if gradient is None:
        return None
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return dense.to(dtype or dense.dtype, copy=True)


def _sum(old: torch.Tensor | None, new: torch.Tensor | None) -> torch.Tensor | None:
    if old is None or new is None:
        return new if old is None else old
    return old.add_(new)


def _flatten(handle: FlatParamHandle, gradients: Gradients) -> torch.Tensor:
    flat = torch.zeros(handle.layout.numel, dtype=handle.dtypes.compute, device=handle.device)
    slots = [s for s, g in zip(handle.layout.slots, gradients, strict=True) if g is not None]
    places = [flat.as_strided(s.shape, s.stride, s.offset) for s in slots]
    copy_to_places(places, [gradient for gradient in gradients if gradient is not None])
    return flat


def _make_whole(handle: FlatParamHandle) -> None:
    """Replace reduced gradients by full-size ones whose mean over the ranks is the same shard.

    This rank's shard is multiplied by the number of ranks, and the rest is zero: the mean over the
    ranks is then the shard again.
    """
    layout = handle.layout
    for index, parameter in enumerate(handle.optimizer_params):
        if parameter.grad is None or not parameter.requires_grad:
            continue
        # Not in compute precision, which would round what was reduced in a higher one.
        dtype = torch.promote_types(parameter.grad.dtype, handle.dtypes.compute)
        reduced = parameter.grad.to(handle.device, dtype)
        if not handle.is_sharded:
            whole = reduced.clone()
        elif handle.use_orig_params:
            slot, piece = layout.slots[index], handle.pieces[index]
            flat = torch.zeros(slot.numel, dtype=dtype, device=handle.device)
            flat[piece.start : piece.start + piece.numel] = reduced * layout.world_size
            whole = flat.as_strided(slot.shape, slot.stride)
        else:
            whole = torch.zeros(layout.padded_numel, dtype=dtype, device=handle.device)
            start = handle.rank * layout.shard_numel
            whole[start : start + layout.shard_numel] = reduced * layout.world_size
            whole = whole[: layout.numel]
        parameter.grad = None
        set_gradient(parameter, whole)
