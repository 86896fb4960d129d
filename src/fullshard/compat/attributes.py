"""Attributes and methods of torch's wrapper that fullshard's classes get from ``install``.

Programs use them although most are half private. Attributes without a counterpart in fullshard do
not exist, and raise ``AttributeError`` as usual. ``uninstall`` removes them, because natively they
would hide attributes of the wrapped module, such as ``params``, and because names of parameters
differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed.fsdp import _common_utils

from fullshard import FullyShardedDataParallel
from fullshard.engine.params.handle import FlatParamHandle
from fullshard.engine.params.layout import Piece
from fullshard.full_parameters import UnshardHandle
from fullshard.grad.hooks import make_hook, register
from fullshard.introspection import Introspection

from . import flat_parameter, handle

__all__ = ["attach", "detach"]

_native_parameters = FullyShardedDataParallel.named_parameters
_native_buffers = FullyShardedDataParallel.named_buffers
_comm_hook = vars(Introspection)["_comm_hook"].fget
_comm_hook_state = vars(Introspection)["_comm_hook_state"].fget


# -- names of parameters ----------------------------------------------------------------------


def _named_parameters(
    wrapper: FullyShardedDataParallel,
    prefix: str = "",
    recurse: bool = True,
    remove_duplicate: bool = True,
) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters under torch's names, by which programs select them.

    Inside ``summon_full_params`` these are the names of the unwrapped model; elsewhere they contain
    ``_fsdp_wrapped_module.`` for every wrapper on the path.
    """
    if wrapper._is_summoned:
        return _native_parameters(wrapper, prefix, recurse, remove_duplicate)
    return wrapper._registered_parameters(prefix, recurse, remove_duplicate)


def _named_buffers(
    wrapper: FullyShardedDataParallel,
    prefix: str = "",
    recurse: bool = True,
    remove_duplicate: bool = True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers under torch's names, see :func:`_named_parameters`."""
    if wrapper._is_summoned:
        return _native_buffers(wrapper, prefix, recurse, remove_duplicate)
    return nn.Module.named_buffers(wrapper, prefix, recurse, remove_duplicate)


# -- parts of a wrapper -----------------------------------------------------------------------


def _params(wrapper: FullyShardedDataParallel) -> list[Any]:
    """The wrapper's flat parameters."""
    return [each.flat_param for each in wrapper._unit.handles]


def _unshard(wrapper: FullyShardedDataParallel, async_op: bool = False) -> UnshardHandle | None:
    return wrapper.unshard(async_op)


def _reshard(wrapper: FullyShardedDataParallel) -> None:
    wrapper.reshard()


def _device_handle(wrapper: FullyShardedDataParallel) -> Any:
    """Torch's proxy for a device module, such as ``torch.cuda``."""
    return _common_utils._FSDPDeviceHandle.from_device(wrapper.compute_device)


def _modules_to_handles(wrapper: FullyShardedDataParallel) -> dict[nn.Module, FlatParamHandle]:
    return {} if wrapper._handle is None else {wrapper.module: wrapper._handle}


class ExecutionOrder(NamedTuple):
    """The order in which units ran in the last forward, under torch's names."""

    process_group: Any
    rank: int
    world_size: int
    is_first_iter: bool
    all_handles: list[FlatParamHandle]
    handles_pre_forward_order: list[FlatParamHandle]


def _execution_order(wrapper: FullyShardedDataParallel) -> ExecutionOrder:
    schedule = wrapper._schedule
    order = schedule.last_order if schedule is not None else []
    root = schedule.root if schedule is not None else wrapper._unit
    units = schedule.units if schedule is not None else [wrapper._unit]
    return ExecutionOrder(
        root.shards.group,
        root.shards.rank,
        root.shards.size,
        schedule is None or not schedule.has_run,
        [each for unit in units for each in unit.handles],
        [each for unit in order for each in unit.handles],
    )


# -- communication hooks ----------------------------------------------------------------------


def _register_comm_hook(
    wrapper: FullyShardedDataParallel, state: object, hook: Callable[..., Any]
) -> None:
    """Register ``hook`` without checking its arguments; a unit that cannot call it raises then."""
    register(wrapper._units(), wrapper._schedule_for_hooks(), state, hook)


def _set_comm_hook(wrapper: FullyShardedDataParallel, hook: Callable[..., Any] | None) -> None:
    state = wrapper._comm_hook_state
    wrapper._unit.reduction.set_comm_hook(None if hook is None else make_hook(state, hook))


def _set_comm_hook_state(wrapper: FullyShardedDataParallel, state: object) -> None:
    registered = wrapper._unit.reduction.comm_hook
    if registered is not None:
        wrapper._unit.reduction.set_comm_hook(make_hook(state, registered.given))
    elif state is not None:
        raise AttributeError(
            f"_comm_hook_state of unit {wrapper._unit.name!r} is the state of its communication "
            "hook, but the unit has no hook: set _comm_hook first"
        )


class _Absent:
    """Marks an attribute that a class did not have before ``attach``."""


_ABSENT = _Absent()

#: The attributes that each class gets.
_GAINED: dict[type, dict[str, Any]] = {
    FullyShardedDataParallel: {
        "named_parameters": _named_parameters,
        "named_buffers": _named_buffers,
        "params": property(_params),
        "_unshard": _unshard,
        "_reshard": _reshard,
        "_device_handle": property(_device_handle),
        "_fully_sharded_module_to_handle": property(_modules_to_handles),
        "_all_fsdp_states": property(FullyShardedDataParallel.fsdp_modules),
        "_exec_order_data": property(_execution_order),
        "register_comm_hook": _register_comm_hook,
        "_comm_hook": property(_comm_hook, _set_comm_hook),
        "_comm_hook_state": property(_comm_hook_state, _set_comm_hook_state),
    },
    FlatParamHandle: handle.ATTRIBUTES,
    Piece: flat_parameter.PIECE_ATTRIBUTES,
    # Flat parameters are plain nn.Parameter objects: optimizers choose fast paths by exact type.
    nn.Parameter: flat_parameter.ATTRIBUTES,
}

_before: list[tuple[type, str, Any]] = []


def attach() -> None:
    """Add torch's attributes to fullshard's classes."""
    for owner, attributes in _GAINED.items():
        for name, value in attributes.items():
            _before.append((owner, name, vars(owner).get(name, _ABSENT)))
            setattr(owner, name, value)


def detach() -> None:
    """Undo :func:`attach`."""
    while _before:
        owner, name, value = _before.pop()
        if value is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
