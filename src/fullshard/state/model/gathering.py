"""All-gathers shards into full flat buffers, and copies full parameters into shards.

The all-gathers use buffers of their own and do not change the unit's state, so parameters can be
read between forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...engine.params.handle import FlatParamHandle
from ...engine.params.layout import Slot
from ...engine.runtime.unit import Unit


def full_views(handle: FlatParamHandle, flat: torch.Tensor) -> list[torch.Tensor]:
    """The group's parameters in their original shapes, as views of a full flat buffer."""
    return [flat.as_strided(s.shape, s.stride, s.offset) for s in handle.layout.slots]


def gather_shards(
    unit: Unit, handles: Sequence[FlatParamHandle], shards: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """All-gather one full flat buffer per group; a group that is not sharded is returned as is."""
    full = list(shards)
    sent = [i for i, handle in enumerate(handles) if _is_sharded(handle)]
    for position in sent:
        full[position] = _empty_buffer(handles[position], shards[position])
    if sent:
        inputs = [shards[i].to(handles[i].device) for i in sent]
        works = unit.shards.gather([full[i] for i in sent], inputs, unit.name)
        unit.shards.wait(*works)
    return full


def gather_shards_to_first(
    unit: Unit, handles: Sequence[FlatParamHandle], shards: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Gather full flat buffers on the first rank of the unit; return an empty list elsewhere."""
    full: list[torch.Tensor] = []
    is_first = unit.shards.rank == 0
    for handle, flat in zip(handles, shards, strict=True):
        if _is_sharded(handle):
            shard = flat.to(handle.device)
            flat = _empty_buffer(handle, shard) if is_first else flat
            slices = flat.view(handle.layout.world_size, -1).unbind() if is_first else ()
            unit.shards.gather_to_first(slices, shard, unit.name)
        if is_first:
            full.append(flat)
    return full


def _is_sharded(handle: FlatParamHandle) -> bool:
    return handle.layout.world_size > 1 and handle.layout.padded_numel > 0


def _empty_buffer(handle: FlatParamHandle, shard: torch.Tensor) -> torch.Tensor:
    return torch.empty(handle.layout.padded_numel, dtype=shard.dtype, device=handle.device)


def in_buffer_order(slot: Slot, full: torch.Tensor) -> torch.Tensor:
    """The elements of a full parameter in the order in which they lie in the flat buffer."""
    if full.stride() != slot.stride:
        ordered = torch.empty_strided(slot.shape, slot.stride, dtype=full.dtype, device=full.device)
        full = ordered.copy_(full)
    return full.as_strided((slot.numel,), (1,))


def own_part(handle: FlatParamHandle, index: int, full: torch.Tensor) -> torch.Tensor:
    """The elements of a full parameter that lie in this rank's shard, as a view if possible."""
    piece = handle.pieces[index]
    flat = in_buffer_order(handle.layout.slots[index], full.detach())
    return flat[piece.start : piece.start + piece.numel]


def store_own_part(handle: FlatParamHandle, index: int, full: torch.Tensor) -> None:
    """Copy this rank's part of a full parameter into the shard."""
    piece = handle.pieces[index]
    if not piece.in_shard:
        return
    mine = own_part(handle, index, full)
    # Through .data, so that autograd does not see a change of a parameter saved for backward.
    handle.shard_tensor.data[piece.offset : piece.offset + piece.numel].copy_(mine)
