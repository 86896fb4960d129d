"""Whole flat buffers out of shards, and a rank's part out of whole parameters.

Independent of a step: nothing here changes what a unit shows or holds, so parameters can be read
between forward and backward without disturbing either.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...engine.params.handle import FlatParamHandle
from ...engine.params.layout import Slot
from ...engine.runtime.unit import Unit


def whole_views(handle: FlatParamHandle, flat: torch.Tensor) -> list[torch.Tensor]:
    """The group's parameters in their original shapes, as views of a whole flat buffer."""
    return [flat.as_strided(s.shape, s.stride, s.offset) for s in handle.layout.slots]


def gather_shards(
    unit: Unit, handles: Sequence[FlatParamHandle], shards: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Whole flat buffers, one per group, on every rank; a group that is whole already stays."""
    whole = list(shards)
    sent = [i for i, handle in enumerate(handles) if _is_spread(handle)]
    for position in sent:
        whole[position] = _empty_buffer(handles[position], shards[position])
    if sent:
        inputs = [shards[i].to(handles[i].device) for i in sent]
        works = unit.shards.gather([whole[i] for i in sent], inputs, unit.name)
        unit.shards.wait(*works)
    return whole


def gather_shards_to_first(
    unit: Unit, handles: Sequence[FlatParamHandle], shards: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Whole flat buffers on the first of the ranks that share shards; elsewhere an empty list."""
    whole: list[torch.Tensor] = []
    is_first = unit.shards.rank == 0
    for handle, flat in zip(handles, shards, strict=True):
        if _is_spread(handle):
            shard = flat.to(handle.device)
            flat = _empty_buffer(handle, shard) if is_first else flat
            slices = flat.view(handle.layout.world_size, -1).unbind() if is_first else ()
            unit.shards.gather_to_first(slices, shard, unit.name)
        if is_first:
            whole.append(flat)
    return whole


def _is_spread(handle: FlatParamHandle) -> bool:
    return handle.layout.world_size > 1 and handle.layout.padded_numel > 0


def _empty_buffer(handle: FlatParamHandle, shard: torch.Tensor) -> torch.Tensor:
    return torch.empty(handle.layout.padded_numel, dtype=shard.dtype, device=handle.device)


def in_buffer_order(slot: Slot, whole: torch.Tensor) -> torch.Tensor:
    """The elements of a whole parameter in the order in which they lie in the flat buffer."""
    if whole.stride() != slot.stride:
        ordered = torch.empty_strided(
            slot.shape, slot.stride, dtype=whole.dtype, device=whole.device
        )
        whole = ordered.copy_(whole)
    return whole.as_strided((slot.numel,), (1,))


def own_part(handle: FlatParamHandle, index: int, whole: torch.Tensor) -> torch.Tensor:
    """The elements of a whole parameter that lie in this rank's shard, as a view where it can."""
    piece = handle.pieces[index]
    flat = in_buffer_order(handle.layout.slots[index], whole.detach())
    return flat[piece.start : piece.start + piece.numel]


def store_own_part(handle: FlatParamHandle, index: int, whole: torch.Tensor) -> None:
    """Copy this rank's part of a whole parameter into the shard."""
    piece = handle.pieces[index]
    if not piece.in_shard:
        return
    mine = own_part(handle, index, whole)
    # Through data: autograd must not take it for a change of a saved full parameter.
    handle.shard_tensor.data[piece.offset : piece.offset + piece.numel].copy_(mine)
