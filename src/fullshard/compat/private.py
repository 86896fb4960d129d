"""Stand-ins for private functions of torch's FSDP that programs and torch's own tests call.

They have torch's names and parameters, and work on fullshard's wrappers. Where torch has a state
object and a module, both are the wrapper here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_state

import fullshard
from fullshard import FlatParameter, FullyShardedDataParallel
from fullshard.api import ShardingStrategy
from fullshard.engine.comm.process_groups import groups_by_node
from fullshard.engine.params.handle import FlatParamHandle
from fullshard.engine.params.locations import clean_tensor_name
from fullshard.state.model.unit_state import FLAT_NAME

_names_in_torch = torch.distributed.checkpoint.state_dict._get_fqns
_register_in_torch = torch.distributed.fsdp.register_fsdp_forward_method
_state_in_torch = _fsdp_state._get_module_fsdp_state
Wrappers = list[FullyShardedDataParallel]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make a method unshard parameters as ``forward`` does.

    Works on our wrapper and on modules of ``fully_shard``; does nothing on other modules.
    """
    if isinstance(module, (FullyShardedDataParallel, fullshard.FSDPModule)):
        fullshard.register_fsdp_forward_method(module, method_name)
    else:
        _register_in_torch(module, method_name)


def _get_state_in_place(module: nn.Module) -> Any:
    """The state of a module that ``fully_shard`` was applied to, ours or torch's own; or None."""
    if isinstance(module, fullshard.FSDPModule):
        return module._get_fsdp_state()
    return _state_in_torch(module)


# -- wrappers and their parts -----------------------------------------------------------------


def _get_module_fsdp_state(module: nn.Module) -> FullyShardedDataParallel | None:
    return module if isinstance(module, FullyShardedDataParallel) else None


def _get_fsdp_states(module: nn.Module) -> Wrappers:
    return FullyShardedDataParallel.fsdp_modules(module)


def _get_fsdp_states_with_modules(module: nn.Module) -> tuple[Wrappers, Wrappers]:
    return _get_fsdp_states(module), _get_fsdp_states(module)


def _get_fsdp_root_states(module: nn.Module) -> Wrappers:
    return FullyShardedDataParallel.fsdp_modules(module, root_only=True)


def _get_fsdp_root_states_with_modules(module: nn.Module) -> tuple[Wrappers, Wrappers]:
    return _get_fsdp_root_states(module), _get_fsdp_root_states(module)


def _get_fsdp_handles(module: nn.Module) -> list[FlatParamHandle]:
    return [h for wrapper in _get_fsdp_states(module) for h in wrapper._unit.handles]


def _module_handle(state: FullyShardedDataParallel, module: nn.Module) -> FlatParamHandle | None:
    return state._handle


def _has_fsdp_params(state: FullyShardedDataParallel, module: nn.Module) -> bool:
    return bool(state._unit.handles)


def _is_composable(state: Any) -> bool:
    return False


def _get_sharding_strategy(handle: FlatParamHandle | None) -> ShardingStrategy | None:
    return handle.strategy if handle is not None else None


# -- groups of ranks for the hybrid strategies --------------------------------------------------


def _init_intra_and_inter_node_groups(
    global_process_group: Any, num_devices_per_node: int
) -> tuple[Any, Any]:
    """The process groups within nodes of the given size, and across these nodes."""
    groups = groups_by_node(global_process_group, num_devices_per_node)
    return groups.shards, groups.copies


def _init_intra_node_process_group(num_devices_per_node: int) -> Any:
    return groups_by_node(torch.distributed.group.WORLD, num_devices_per_node).shards


def _init_inter_node_process_group(global_process_group: Any, num_devices_per_node: int) -> Any:
    return groups_by_node(global_process_group, num_devices_per_node).copies


def _is_valid_hybrid_shard_pg_type(process_group: Any) -> bool:
    return (
        isinstance(process_group, tuple)
        and len(process_group) == 2
        and all(isinstance(group, torch.distributed.ProcessGroup) for group in process_group)
    )


def _is_valid_hybrid_shard_device_mesh(device_mesh: Any) -> bool:
    return isinstance(device_mesh, DeviceMesh) and device_mesh.ndim == 2


# -- parameters and their names ---------------------------------------------------------------


def _is_fsdp_flattened(tensor: torch.Tensor) -> bool:
    """Return True for a flat parameter, or a tensor that torch's own code marked as flattened."""
    return isinstance(tensor, FlatParameter) or getattr(tensor, "_fsdp_flattened", False)


def _get_param_to_fqns(
    model: nn.Module, dedup_shared_params: bool = True
) -> dict[nn.Parameter, list[str]]:
    """Map each parameter to the fully qualified names of the parameters that it contains."""
    names: dict[nn.Parameter, list[str]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        if parameter not in names:
            names[parameter] = _names_of(path, parameter)
        elif not dedup_shared_params and not isinstance(parameter, FlatParameter):
            names[parameter] += _names_of(path, parameter)
    return names


def _names_of(path: str, parameter: Any) -> list[str]:
    if not isinstance(parameter, FlatParameter):
        return [clean_tensor_name(path)]
    return _beside(path, parameter._fqns)


def _beside(path: str, names: Iterable[str]) -> list[str]:
    """The ``names`` of a unit's parameters, relative to the root (``path``: its flat parameter)."""
    unit = clean_tensor_name(path).rpartition(".")[0]
    return [f"{unit}.{name}" if unit else name for name in names]


def _get_fqns(model: nn.Module, name: str, *args: Any, **kwargs: Any) -> set[str]:
    """The fully qualified names that ``torch.distributed.checkpoint`` uses for a parameter.

    Torch's own function expects a wrapper's prefix before the name of a flat parameter; here names
    are those of the unwrapped model.
    """
    known = clean_tensor_name(name)
    if known.rpartition(".")[2] != FLAT_NAME:
        return _names_in_torch(model, name, *args, **kwargs)
    flat: Any = functools.reduce(getattr, known.split("."), model)
    # Further arguments are passed when a model is loaded, in which a shared parameter has all its
    # names. In optimizers it has only one.
    return set(_beside(known, _paths_in(model, flat) if args else flat._fqns))


def _paths_in(model: nn.Module, flat: Any) -> list[str]:
    """All names of the parameters in ``flat``, relative to its unit."""
    handles = (h for wrapper in _get_fsdp_states(model) for h in wrapper._unit.handles)
    found = [handle.places for handle in handles if handle.flat_param is flat]
    return [place.path for of_handle in found for places in of_handle for place in places]


def _get_handle_fqns_from_root(
    state: FullyShardedDataParallel, handle: FlatParamHandle | None
) -> list[str] | None:
    """The names of a handle's parameters, relative to the root; None without a handle."""
    if handle is None:
        return None
    unit = state._unit.name
    prefix = "" if unit.startswith("(root)") else f"{unit}."
    return [f"{prefix}{name}" for name in handle.flat_param._fqns]


# -- starting, and full parameters ------------------------------------------------------------


def _lazy_init(state: FullyShardedDataParallel, root_module: nn.Module) -> FullyShardedDataParallel:
    state.check_is_root()
    return state


def _is_fsdp_root(state: FullyShardedDataParallel, module: nn.Module) -> bool:
    return state.check_is_root()


def _unshard_params(
    module: nn.Module,
    recurse: bool,
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
    with_grads: bool,
) -> AbstractContextManager[None]:
    return FullyShardedDataParallel.summon_full_params(
        module, recurse, writeback, rank0_only, offload_to_cpu, with_grads
    )


def _unshard_state(
    module: nn.Module,
    state: FullyShardedDataParallel,
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
    with_grads: bool,
) -> AbstractContextManager[None]:
    return FullyShardedDataParallel.summon_full_params(
        state, False, writeback, rank0_only, offload_to_cpu, with_grads
    )
