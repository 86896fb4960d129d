"""Choosing a type of state dict, and what strict loading says about one that does not fit."""

from __future__ import annotations

import os

import pytest
import torch
from tests.original.training import Net, build, inputs, loss_of
from tests.state.models import kind, wrapped
from torch import nn

from fullshard import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.engine.params.handle import _FSDP_USE_FULL_PREC_IN_EVAL
from fullshard.testing import ranks
from fullshard.wrap import ModuleWrapPolicy

FULL_SHARD = ShardingStrategy.FULL_SHARD


@ranks(1)
def test_the_type_is_set_for_all_units_and_restored_by_the_context() -> None:
    model = wrapped(build(Net), ShardingStrategy.NO_SHARD, "blocks")
    config = FullStateDictConfig(offload_to_cpu=True)
    before = FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, config)
    assert before.state_dict_type is StateDictType.FULL_STATE_DICT
    assert before.state_dict_config == FullStateDictConfig()
    assert before.optim_state_dict_config == FullOptimStateDictConfig()
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        for module in FSDP.fsdp_modules(model):
            found = FSDP.get_state_dict_type(module)
            assert found.state_dict_type is StateDictType.SHARDED_STATE_DICT
            assert found.state_dict_config == ShardedStateDictConfig()
    assert FSDP.get_state_dict_type(model).state_dict_config is config
    FSDP.set_state_dict_type(model.module.blocks[0], StateDictType.LOCAL_STATE_DICT)
    with pytest.raises(AssertionError, match="the same state dict settings"):
        FSDP.get_state_dict_type(model)


@ranks(1)
def test_options_of_another_type_are_refused() -> None:
    model = wrapped(build(Net), ShardingStrategy.NO_SHARD, "blocks")
    with pytest.raises(RuntimeError, match=r"Expected state_dict_config of type .*Full.*Local"):
        FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, LocalStateDictConfig())
    with pytest.raises(TypeError, match="state_dict_type expects one of"):
        FSDP.set_state_dict_type(model, "full")


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("name", ["full", "sharded"])
@ranks(2)
def test_strict_loading_names_keys_as_users_know_them(name: str, use_orig_params: bool) -> None:
    model = wrapped(build(Net), FULL_SHARD, "blocks", use_orig_params=use_orig_params)
    with kind(model, name):
        state = model.state_dict()
        gone = ["blocks.1.up.bias", "head.weight"]
        for key in gone:
            state.pop(key)
        state["blocks.1.sideways"] = state["blocks.0._flat_param"] = torch.ones(1)
        with pytest.raises(RuntimeError) as caught:
            model.load_state_dict(state)
        found = model.load_state_dict(state, strict=False)
    message = str(caught.value)
    for key in (*gone, "blocks.1.sideways", "blocks.0._flat_param"):
        assert f'"{key}"' in message
    assert "_fsdp" not in message
    assert sorted(found.missing_keys) == gone
    assert sorted(found.unexpected_keys) == ["blocks.0._flat_param", "blocks.1.sideways"]


@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_a_value_of_another_shape_is_named_with_both_shapes(use_orig_params: bool) -> None:
    outer = nn.Sequential(
        wrapped(build(Net), FULL_SHARD, "blocks", use_orig_params=use_orig_params)
    )
    state = outer.state_dict()
    state["0.blocks.2.up.weight"] = torch.zeros(9, 8)
    state["0.head.bias"] = torch.zeros(3, 1)
    before = outer[0].state_dict()["head.bias"]
    with pytest.raises(RuntimeError) as caught:
        outer.load_state_dict(state)
    message = str(caught.value)
    assert "size mismatch for 0.blocks.2.up.weight" in message
    assert "torch.Size([9, 8])" in message
    assert "torch.Size([9, 7])" in message
    assert "size mismatch for 0.head.bias" in message
    assert "_fsdp" not in message
    assert torch.equal(outer[0].state_dict()["head.bias"], before)


class ReadWhenNeeded:
    """Stands for a tensor on disk, as libraries put them in state dicts to save memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.shape = tensor.shape

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return function(*(a.tensor if isinstance(a, cls) else a for a in args), **(kwargs or {}))


@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_values_that_are_read_when_needed_are_loaded(use_orig_params: bool) -> None:
    bare = build(Net)
    expected = {name: value + 1 for name, value in bare.state_dict().items()}
    model = wrapped(bare, FULL_SHARD, "blocks", use_orig_params=use_orig_params)

    model.load_state_dict({name: ReadWhenNeeded(value) for name, value in expected.items()})

    found = model.state_dict()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@ranks(2)
def test_a_local_state_dict_of_another_wrapping_is_refused_by_size() -> None:
    one = wrapped(build(Net), FULL_SHARD, "one unit")
    blocks = wrapped(build(Net), FULL_SHARD, "blocks")
    with kind(one, "local"), kind(blocks, "local"):
        state = one.state_dict()
        with pytest.raises(RuntimeError, match=r"size mismatch for _flat_param") as caught:
            blocks.load_state_dict(state)
    assert "blocks.0._flat_param" in str(caught.value)


@pytest.mark.parametrize("full_precision_in_eval", [False, True])
@ranks(2)
def test_a_checkpoint_after_eval_does_not_look_like_a_write_back(
    full_precision_in_eval: bool,
) -> None:
    if full_precision_in_eval:
        os.environ[_FSDP_USE_FULL_PREC_IN_EVAL] = "1"
    bare = build(Net)
    model = FSDP(
        bare,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        mixed_precision=MixedPrecision(param_dtype=torch.float16),
        use_orig_params=True,
    )
    loss_of(model, 0).backward()
    model.eval()
    model(inputs(0))
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        model.load_state_dict(model.state_dict())
    loss_of(model, 0).backward()
    model.train()
    loss_of(model, 1).backward()
