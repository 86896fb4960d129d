"""The replacements: for every module of ``torch.distributed.fsdp``, torch's names and our objects.

Other names keep their meaning, except functions in the modules of torch's engine: they need state
that fullshard's units do not have, so they are replaced by functions that raise an error.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch.distributed.fsdp

import fullshard
from fullshard import api, wrap
from fullshard.api import HYBRID_STRATEGIES, NO_RESHARD_AFTER_FORWARD_STRATEGIES, ShardingStrategy
from fullshard.engine.params import handle as flat_param
from fullshard.engine.params.layout import FlatParamShardMetadata
from fullshard.engine.params.locations import clean_tensor_name
from fullshard.introspection import TrainingState

from . import private

__all__ = ["Replacement", "replacements"]

PACKAGE = "torch.distributed.fsdp"


class Replacement(NamedTuple):
    """One name of torch's, its original object, and our object that replaces it."""

    name: str
    original: Any
    ours: Any


_RESHARD = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)

#: Options that torch has in another module, or not at all.
_ELSEWHERE = ("Communication", "OptimStateKeyType")

#: Our objects, by torch's module and name.
TABLE: dict[str, dict[str, Any]] = {
    "": {
        "register_fsdp_forward_method": private.register_fsdp_forward_method,
        **{
            name: getattr(fullshard, name)
            for name in (
                "CPUOffloadPolicy",
                "DataParallelMeshDims",
                "FSDPModule",
                "MixedPrecisionPolicy",
                "OffloadPolicy",
                "UnshardHandle",
                "fully_shard",
                "share_comm_ctx",
            )
        },
    },
    "api": {name: getattr(api, name) for name in api.__all__ if name not in _ELSEWHERE},
    "fully_sharded_data_parallel": {
        "FullyShardedDataParallel": fullshard.FullyShardedDataParallel,
        "OptimStateKeyType": api.OptimStateKeyType,
    },
    "sharded_grad_scaler": {"ShardedGradScaler": fullshard.ShardedGradScaler},
    "wrap": {
        name: getattr(wrap, name)
        for name in (
            "CustomPolicy",
            "ModuleWrapPolicy",
            "_Policy",
            "_or_policy",
            "_wrap_module_cls_individually",
            "always_wrap_policy",
            "enable_wrap",
            "lambda_auto_wrap_policy",
            "size_based_auto_wrap_policy",
            "transformer_auto_wrap_policy",
            "wrap",
        )
    },
    "_wrap_utils": {"_validate_frozen_params": wrap._validate_frozen_params},
    "_flat_param": {
        "FlatParamHandle": flat_param.FlatParamHandle,
        "FlatParamShardMetadata": FlatParamShardMetadata,
        "FlatParameter": flat_param.FlatParameter,
        "HandleShardingStrategy": flat_param.HandleShardingStrategy,
        "NO_RESHARD_AFTER_FORWARD_HANDLE_STRATEGIES": NO_RESHARD_AFTER_FORWARD_STRATEGIES,
        "RESHARD_AFTER_FORWARD_HANDLE_STRATEGIES": _RESHARD,
    },
    "_init_utils": {
        "HYBRID_SHARDING_STRATEGIES": list(HYBRID_STRATEGIES),
        "NO_RESHARD_AFTER_FORWARD_STRATEGIES": NO_RESHARD_AFTER_FORWARD_STRATEGIES,
        "_init_inter_node_process_group": private._init_inter_node_process_group,
        "_init_intra_and_inter_node_groups": private._init_intra_and_inter_node_groups,
        "_init_intra_node_process_group": private._init_intra_node_process_group,
        "_is_valid_hybrid_shard_device_mesh": private._is_valid_hybrid_shard_device_mesh,
        "_is_valid_hybrid_shard_pg_type": private._is_valid_hybrid_shard_pg_type,
        "SHARDING_STRATEGY_MAP": {strategy: strategy for strategy in ShardingStrategy},
    },
    "_common_utils": {
        "TrainingState": TrainingState,
        "_FSDPState": fullshard.FullyShardedDataParallel,
        "clean_tensor_name": clean_tensor_name,
        "_get_handle_fqns_from_root": private._get_handle_fqns_from_root,
        "_get_module_fsdp_state": private._get_module_fsdp_state,
        "_get_module_fsdp_state_if_fully_sharded_module": private._get_module_fsdp_state,
        "_get_param_to_fqns": private._get_param_to_fqns,
        "_get_sharding_strategy": private._get_sharding_strategy,
        "_has_fsdp_params": private._has_fsdp_params,
        "_is_composable": private._is_composable,
        "_is_fsdp_flattened": private._is_fsdp_flattened,
        "_module_handle": private._module_handle,
    },
    "_traversal_utils": {
        "_get_fsdp_handles": private._get_fsdp_handles,
        "_get_fsdp_states": private._get_fsdp_states,
        "_get_fsdp_states_with_modules": private._get_fsdp_states_with_modules,
    },
    "_runtime_utils": {
        "_get_fsdp_root_states": private._get_fsdp_root_states,
        "_get_fsdp_root_states_with_modules": private._get_fsdp_root_states_with_modules,
        "_is_fsdp_root": private._is_fsdp_root,
        "_lazy_init": private._lazy_init,
    },
    "_unshard_param_utils": {
        "_unshard_fsdp_state_params": private._unshard_state,
        "_unshard_params": private._unshard_params,
        "_unshard_params_for_summon": private._unshard_state,
    },
}

#: Our objects in other modules of torch, by the module's full name.
ELSEWHERE: dict[str, dict[str, Any]] = {
    "torch.distributed.checkpoint.state_dict": {"_get_fqns": private._get_fqns},
    "torch.distributed.fsdp._fully_shard._fsdp_state": {
        "_get_module_fsdp_state": private._get_state_in_place,
    },
    "torch.distributed._composable.replicate_with_fsdp": {
        "ReplicateModule": fullshard.ReplicateModule,
        "replicate": fullshard.replicate,
    },
}

#: Modules whose functions work on the state of torch's own engine.
ENGINE = (
    "_init_utils",
    "_optim_utils",
    "_runtime_utils",
    "_state_dict_utils",
    "_unshard_param_utils",
    "_wrap_utils",
)
#: Functions in these modules that do not depend on that engine.
LEFT_ALONE = {
    "_cast_buffers_to_dtype_and_device",
    "_get_managed_param_to_fqn",
    "_get_post_order_named_modules",
    "_is_named_optimizer",
    "_is_zero_dim_tensor",
    "sorted_items",
}
#: Functions elsewhere that would be accepted and then have no effect.
WITHOUT_EFFECT = {"_fsdp_extensions": ("_set_fsdp_extensions",)}


@functools.cache
def replacements() -> tuple[Replacement, ...]:
    """All replacements whose names exist in this version of torch."""
    # Policies created with torch's classes before pass isinstance checks against ours.
    wrap._Policy.register(importlib.import_module(f"{PACKAGE}.wrap")._Policy)
    return tuple(_from_table()) + tuple(_refusals())


def _from_table() -> Iterator[Replacement]:
    homes = [(_module(home), names) for home, names in TABLE.items()]
    for home, names in ELSEWHERE.items():
        if importlib.util.find_spec(home) is not None:
            homes.append((importlib.import_module(home), names))
    for module, names in homes:
        for name, ours in names.items():
            if hasattr(module, name):
                yield Replacement(name, getattr(module, name), ours)


def _refusals() -> Iterator[Replacement]:
    for home in ENGINE:
        module = _module(home)
        answered = {*TABLE.get(home, ()), *LEFT_ALONE}
        for name, value in vars(module).items():
            defined_there = getattr(value, "__module__", None) == module.__name__
            if inspect.isfunction(value) and defined_there and name not in answered:
                yield Replacement(name, value, _refusal(f"{module.__name__}.{name}"))
    for home, names in WITHOUT_EFFECT.items():
        module = _module(home)
        for name in filter(vars(module).__contains__, names):
            yield Replacement(name, getattr(module, name), _refusal(f"{module.__name__}.{name}"))


def _module(home: str) -> ModuleType:
    return importlib.import_module(f"{PACKAGE}.{home}") if home else torch.distributed.fsdp


def _refusal(path: str) -> Callable[..., Any]:
    def refused(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            f"{path} is part of torch's own FSDP engine, which fullshard.compat.install() has "
            "replaced by fullshard's; fullshard has no such function. Use the public methods of "
            "FullyShardedDataParallel. If the call came from a model that was wrapped by torch "
            "before install(), wrap it after install(), or call fullshard.compat.uninstall() first."
        )

    refused.__name__ = path.rpartition(".")[2]
    refused.__qualname__ = refused.__name__
    return refused
