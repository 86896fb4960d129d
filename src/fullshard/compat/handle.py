"""Attributes and methods of torch's handles that programs use, for fullshard's handles."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import _common_utils

from fullshard.api import ShardingStrategy
from fullshard.engine.params.handle import FlatParamHandle
from fullshard.engine.params.layout import alignment_elements

from .flat_parameter import modules_of, offsets_of

__all__ = ["ATTRIBUTES"]


def _uses_sharded_strategy(handle: FlatParamHandle) -> bool:
    return handle.strategy is not ShardingStrategy.NO_SHARD


def _aligned_numel(handle: FlatParamHandle) -> int:
    """The number of elements to whose multiples parameters are padded; 0 without padding."""
    return alignment_elements(handle.dtypes.compute.itemsize) if handle.use_orig_params else 0


def _fqns_in_shard(handle: FlatParamHandle) -> list[str]:
    slots = zip(handle.layout.slots, handle.pieces, strict=True)
    return [slot.name for slot, piece in slots if piece.in_shard]


def _sharded_grad(handle: FlatParamHandle) -> torch.Tensor | None:
    """This rank's gradient shard of the flat parameter, once it is reduced."""
    return None if handle.local_gradients else handle.flat_param.grad


def _device_handle(handle: FlatParamHandle) -> Any:
    return _common_utils._FSDPDeviceHandle.from_device(handle.device)


def _parameter_modules(handle: FlatParamHandle) -> Iterator[tuple[str, str]]:
    """The names of all parameters and of their modules; further names of shared ones come last."""
    first = ((places[0].name, places[0].parent) for places in handle.places)
    return itertools.chain(first, _shared_parameter_modules(handle))


def _shared_parameter_modules(handle: FlatParamHandle) -> Iterator[tuple[str, str]]:
    """The further names of shared parameters, and of the modules that hold them."""
    return ((place.name, place.parent) for places in handle.places for place in places[1:])


def _use_unsharded_views(handle: FlatParamHandle, as_params: bool) -> None:
    """Put full parameters into the modules; only while the handle's unit is unsharded."""
    buffer = handle.allocated_buffer()
    if buffer is None:
        full = torch.Size([handle.layout.numel])
        raise AssertionError(
            f"Expects tensor to be unsharded with size {full} but got {handle.flat_param.shape}"
        )
    if as_params:
        trains = handle.trainable
        shown: list[torch.Tensor] = [
            nn.Parameter(view, requires_grad=train)
            for view, train in zip(buffer.shown, trains, strict=True)
        ]
        handle.show(shown)
    else:
        handle.show(buffer.shown)


def _use_sharded_views(handle: FlatParamHandle) -> None:
    """Put this rank's sharded parameters into the modules."""
    handle.show_sharded()


#: The attributes that handles get.
ATTRIBUTES: dict[str, Any] = {
    "uses_sharded_strategy": property(_uses_sharded_strategy),
    "world_size": property(lambda handle: handle.layout.world_size),
    "sharded_grad": property(_sharded_grad),
    "_sharding_strategy": property(lambda handle: handle.strategy),
    "_fwd_bwd_param_dtype": property(lambda handle: handle.dtypes.compute),
    "_reduce_dtype": property(lambda handle: handle.dtypes.reduce),
    "_uses_param_mixed_precision": property(
        lambda handle: handle.dtypes.compute != handle.dtypes.shard
    ),
    "_uses_reduce_mixed_precision": property(
        lambda handle: handle.dtypes.reduce != handle.dtypes.shard
    ),
    "_keep_low_precision_grads": property(lambda handle: handle.keep_low_precision_grads),
    "_offload_params": property(lambda handle: handle.offload),
    "_use_orig_params": property(lambda handle: handle.use_orig_params),
    "_skip_writeback_check": property(lambda handle: handle.skip_writeback_check),
    "_aligned_numel": property(_aligned_numel),
    "_fqns_in_shard": property(_fqns_in_shard),
    "_fully_sharded_module": property(lambda handle: handle.module),
    "_device_handle": property(_device_handle),
    "_get_modules": modules_of,
    "_get_flat_param_offsets": offsets_of,
    "param_module_names": _parameter_modules,
    "shared_param_module_names": _shared_parameter_modules,
    "_use_unsharded_views": _use_unsharded_views,
    "_use_sharded_views": _use_sharded_views,
}
