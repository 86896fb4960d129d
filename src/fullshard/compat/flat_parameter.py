"""Attributes of torch's flat parameters, computed from the handle of fullshard's.

They are defined on ``nn.Parameter``, but exist for fullshard's flat parameters only: on any other
parameter they raise ``AttributeError``, as if they were not defined.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import _flat_param

from fullshard.engine.params.handle import FlatParamHandle
from fullshard.engine.params.layout import Piece, contiguous_in_memory

__all__ = ["ATTRIBUTES", "PIECE_ATTRIBUTES", "modules_of", "offsets_of"]


class _FromHandle:
    """A descriptor that computes an attribute of a flat parameter from its handle.

    It has no ``__set__``, so that torch's own flat parameters can have attributes of the same name.
    """

    def __init__(self, read: Callable[[FlatParamHandle], Any]) -> None:
        self._read = read
        self.__doc__ = read.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, parameter: Any, owner: type) -> Any:
        if parameter is None:
            return self
        reference = vars(parameter).get("_handle_reference")
        handle = None if reference is None else reference()
        if handle is None:
            raise AttributeError(
                f"{type(parameter).__name__!r} object is not a flat parameter of fullshard, so it "
                "has no such attribute"
            )
        return self._read(handle)


# -- sizes ------------------------------------------------------------------------------------


def _elements(handle: FlatParamHandle) -> list[tuple[int, bool]]:
    """The sizes of parameters and padding in the unsharded buffer, in order; True for padding.

    As in torch, padding is listed only with ``use_orig_params=True``: that for alignment, and that
    which makes the buffer divisible by the number of ranks.
    """
    slots = [(slot.offset, slot.numel, False) for slot in handle.layout.slots]
    if handle.use_orig_params:
        slots += [(start, end - start, True) for start, end in handle.layout.gaps()]
    return [(numel, padding) for _, numel, padding in sorted(slots)]


def _numels_with_padding(handle: FlatParamHandle) -> tuple[int, ...]:
    return tuple(numel for numel, _ in _elements(handle))


def _is_padding_mask(handle: FlatParamHandle) -> list[bool]:
    return [padding for _, padding in _elements(handle)]


def _unpadded_unsharded_size(handle: FlatParamHandle) -> torch.Size:
    return torch.Size([sum(_numels_with_padding(handle))])


def _padded_unsharded_size(handle: FlatParamHandle) -> torch.Size:
    return torch.Size([handle.layout.padded_numel])


def _sharded_size(handle: FlatParamHandle) -> torch.Size:
    return handle.shard_tensor.shape


def _shard_numel_padded(handle: FlatParamHandle) -> int:
    """The elements at the end of this rank's shard that belong to no parameter and no gap."""
    layout = handle.layout
    end = (handle.rank + 1) * layout.shard_numel
    return min(layout.shard_numel, max(0, end - _unpadded_unsharded_size(handle).numel()))


def offsets_of(handle: FlatParamHandle) -> list[tuple[int, int]]:
    """The first and last position of each parameter and padding in the unsharded buffer."""
    offsets, position = [], 0
    for numel, _ in _elements(handle):
        offsets.append((position, position + numel - 1))
        position += numel
    return offsets


# -- memory -----------------------------------------------------------------------------------


def _local_shard(handle: FlatParamHandle) -> torch.Tensor:
    return handle.shard_tensor


def _full_param_padded(handle: FlatParamHandle) -> torch.Tensor:
    """The full buffer for forward and backward; it has memory while the unit is unsharded."""
    if not handle.is_sharded:
        raise AttributeError("_full_param_padded is for sharded strategies only")
    return handle.buffer(handle.gathered_in).flat


def _full_prec_full_param_padded(handle: FlatParamHandle) -> torch.Tensor:
    """The full buffer for ``summon_full_params`` and for evaluation in full precision."""
    if not (handle.is_sharded and _computes_in_low_precision(handle)):
        raise AttributeError("_full_prec_full_param_padded is for mixed precision and sharding")
    return handle.buffer(handle.dtypes.shard).flat


def _mp_shard(handle: FlatParamHandle) -> torch.Tensor:
    """This rank's shard in compute precision, a slice of the full buffer."""
    if not _computes_in_low_precision(handle):
        raise AttributeError("_mp_shard is for mixed precision only")
    return handle.buffer(handle.gathered_in).own


def _computes_in_low_precision(handle: FlatParamHandle) -> bool:
    return handle.dtypes.compute != handle.dtypes.shard


# -- the original parameters --------------------------------------------------------------------


def _param_infos(handle: FlatParamHandle) -> list[_flat_param.ParamInfo]:
    first = [places[0] for places in handle.places]
    return [_flat_param.ParamInfo(place.name, place.module, place.parent) for place in first]


def _shared_param_infos(handle: FlatParamHandle) -> tuple[_flat_param.SharedParamInfo, ...]:
    return tuple(
        _flat_param.SharedParamInfo(
            place.name,
            place.module,
            place.parent,
            places[0].name,
            places[0].module,
            places[0].parent,
        )
        for places in handle.places
        for place in places[1:]
    )


def _shared_params(handle: FlatParamHandle) -> list[nn.Parameter] | None:
    if not handle.use_orig_params:
        return None
    pairs = zip(handle.params, handle.places, strict=True)
    return [parameter for parameter, places in pairs for _ in places[1:]]


def modules_of(handle: FlatParamHandle) -> set[nn.Module]:
    """The modules whose parameters are in the flat buffer."""
    return {place.module for places in handle.places for place in places}


def _strides(handle: FlatParamHandle) -> list[tuple[int, ...]]:
    return [slot.stride for slot in handle.layout.slots]


def _contiguities(handle: FlatParamHandle) -> list[bool]:
    return [contiguous_in_memory(slot.shape, slot.stride) for slot in handle.layout.slots]


def _num_params(handle: FlatParamHandle) -> int:
    return len(handle.layout.slots)


def _param_extensions(handle: FlatParamHandle) -> list[None]:
    return [None] * len(handle.layout.slots)


def _fsdp_flattened(handle: FlatParamHandle) -> bool:
    return True


#: The attributes that flat parameters get.
ATTRIBUTES: dict[str, Any] = {
    read.__name__: _FromHandle(read)
    for read in (
        _numels_with_padding,
        _is_padding_mask,
        _unpadded_unsharded_size,
        _padded_unsharded_size,
        _sharded_size,
        _shard_numel_padded,
        _local_shard,
        _full_param_padded,
        _full_prec_full_param_padded,
        _mp_shard,
        _param_infos,
        _shared_param_infos,
        _shared_params,
        _strides,
        _contiguities,
        _num_params,
        _param_extensions,
        _fsdp_flattened,
    )
}
ATTRIBUTES["_modules"] = _FromHandle(modules_of)


def _if_in_shard(read: Callable[[Piece], int]) -> property:
    return property(lambda piece: read(piece) if piece.in_shard else None)


#: The attributes that the entries of ``_shard_param_infos`` get.
PIECE_ATTRIBUTES: dict[str, Any] = {
    "offset_in_shard": _if_in_shard(lambda piece: piece.offset),
    "numel_in_shard": _if_in_shard(lambda piece: piece.numel),
    "intra_param_start_idx": _if_in_shard(lambda piece: piece.start),
    "intra_param_end_idx": _if_in_shard(lambda piece: piece.start + piece.numel - 1),
}
