"""``offload_to_cpu``: on which device the values of each type of state dict are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.original.training import Net, adam, blocks_policy, build, train_step
from torch.distributed.tensor import DTensor

from fullshard import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.testing import device, ranks

CONFIGS: dict[str, tuple[StateDictType, Any]] = {
    "full": (StateDictType.FULL_STATE_DICT, FullStateDictConfig),
    "local": (StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig),
    "sharded": (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig),
    "dtensor": (
        StateDictType.SHARDED_STATE_DICT,
        lambda **options: ShardedStateDictConfig(_use_dtensor=True, **options),
    ),
}
OPTIM_CONFIGS: dict[str, Any] = {
    "full": FullOptimStateDictConfig,
    "local": LocalOptimStateDictConfig,
    "sharded": ShardedOptimStateDictConfig,
    "dtensor": lambda **options: ShardedOptimStateDictConfig(_use_dtensor=True, **options),
}


def parts(value: Any) -> list[torch.Tensor]:
    """The plain tensors that a value of a state dict is made of on this rank."""
    if isinstance(value, DTensor):
        return [value.to_local()]
    if hasattr(value, "local_shards"):
        return [shard.tensor for shard in value.local_shards()]
    return [value]


def leaves(state: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """Entries of every parameter's state, by their names."""
    return [entry for values in state.values() for entry in values.items()]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
@ranks(2)
def test_values_are_on_the_host_when_asked_for_and_can_be_loaded_from_there(
    name: str, offload: bool
) -> None:
    model = FSDP(build(Net), auto_wrap_policy=blocks_policy(), use_orig_params=True)
    kind, config = CONFIGS[name]

    with FSDP.state_dict_type(model, kind, config(offload_to_cpu=offload)):
        state = model.state_dict()
        places = {part.device.type for value in state.values() for part in parts(value)}
        model.load_state_dict(state)

    assert places == {"cpu" if offload else device().type}


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("name", OPTIM_CONFIGS)
@ranks(2)
def test_optimizer_state_is_on_the_host_when_asked_for_and_can_be_loaded_from_there(
    name: str, offload: bool
) -> None:
    model = FSDP(build(Net), auto_wrap_policy=blocks_policy(), use_orig_params=True)
    optimizer = adam(model)
    train_step(model, 0)
    optimizer.step()
    kind, config = CONFIGS[name][0], OPTIM_CONFIGS[name](offload_to_cpu=offload)

    with FSDP.state_dict_type(model, kind, None, config):
        saved = FSDP.optim_state_dict(model, optimizer)
        averages = [v for k, v in leaves(saved["state"]) if k == "exp_avg"]
        places = {part.device.type for value in averages for part in parts(value)}
        FSDP.optim_state_dict_to_load(model, optimizer, saved, load_directly=True)

    assert places == {"cpu" if offload else device().type}
    kept = {v["exp_avg"].device.type for v in optimizer.state.values() if v}
    assert kept == {device().type}
