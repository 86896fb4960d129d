"""Which kind of state dict a module hands out, and with which options."""

from __future__ import annotations

from typing import Any

from ...api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    adopt,
)

_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def default_settings() -> StateDictSettings:
    """What holds when nobody asked for anything: full state dicts on every rank."""
    return StateDictSettings(
        StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
    )


def make_settings(state_dict_type: Any, config: Any, optim_config: Any) -> StateDictSettings:
    """Settings of a type, with the type's default options where none are given."""
    kind = adopt(state_dict_type, StateDictType, "state_dict_type")
    model_kind, optim_kind = _CONFIGS[kind]
    return StateDictSettings(
        kind,
        _config(config, model_kind, "state_dict_config"),
        _config(optim_config, optim_kind, "optim_state_dict_config"),
    )


def _config(given: Any, kind: type[Any], argument: str) -> Any:
    if given is None:
        return kind()
    try:
        return adopt(given, kind, argument)
    except TypeError:
        raise RuntimeError(
            f"Expected {argument} of type {kind} but got {type(given)}: every state dict type has "
            "options of its own"
        ) from None
