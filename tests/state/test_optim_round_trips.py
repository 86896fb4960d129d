"""Optimizer state dicts of every type bring back every bit, whatever was sharded and how."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.original.training import Net, build
from tests.state.models import LONG, WRAPPINGS, copied, other, settings, wrapped
from tests.state.optimizers import (
    OPTIM_KINDS,
    adam,
    adamw,
    assert_close_optim_state,
    assert_same_optim_state,
    bare_reference,
    full_state,
    next_loss_and_step,
    optim_kind,
    trained,
)

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import OptimStateKeyType, ShardingStrategy
from fullshard.testing import run_on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
BEFORE = range(2)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize(("world_size", "strategy"), settings(1, 2, 4))
def test_state_of_any_type_brings_a_trained_optimizer_back(
    world_size: int, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    def round_trips() -> None:
        model = wrapped(build(Net), strategy, "blocks", use_orig_params=use_orig_params)
        make = adamw if use_orig_params else adam
        optimizer = make(model)
        trained(model, optimizer, BEFORE)
        weights, expected = copied(model.state_dict()), full_state(model, optimizer)
        own = copy.deepcopy(optimizer.state_dict())
        bare, bare_optimizer, reference = bare_reference(Net, make, BEFORE)
        assert_close_optim_state(expected, reference)
        saved = {}
        for name in OPTIM_KINDS:
            with optim_kind(model, name):
                saved[name] = FSDP.optim_state_dict(model, optimizer)
        losses = next_loss_and_step(model, optimizer, 2)
        bare_losses = next_loss_and_step(bare, bare_optimizer, 2, bare=True)
        torch.testing.assert_close(losses, bare_losses)
        for name, state in saved.items():
            model.load_state_dict(weights)
            loaded = make(model)
            with optim_kind(model, name):
                loaded.load_state_dict(FSDP.optim_state_dict_to_load(model, loaded, state))
            assert_same_optim_state(loaded.state_dict(), own)
            assert_same_optim_state(full_state(model, loaded), expected)
            assert next_loss_and_step(model, loaded, 2) == losses

    run_on_ranks(world_size, round_trips)


@pytest.mark.parametrize(
    ("world_size", "use_orig_params"),
    [(2, False), (4, True), *([(2, True), (4, False)] if LONG else [])],
)
def test_state_moves_to_another_wrapping_strategy_and_flattening(
    world_size: int, use_orig_params: bool
) -> None:
    def move() -> None:
        source = wrapped(
            build(Net), ShardingStrategy.FULL_SHARD, "blocks", use_orig_params=use_orig_params
        )
        optimizer = adam(source)
        trained(source, optimizer, BEFORE)
        weights, expected = copied(source.state_dict()), full_state(source, optimizer)
        saved = {}
        for name in (name for name in OPTIM_KINDS if name != "local"):
            with optim_kind(source, name):
                saved[name] = FSDP.optim_state_dict(source, optimizer)
        losses = next_loss_and_step(source, optimizer, 2)
        for wrapping in WRAPPINGS:
            for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
                target = wrapped(
                    other(Net), strategy, wrapping, use_orig_params=not use_orig_params
                )
                for name, state in saved.items():
                    target.load_state_dict(weights)
                    loaded = adam(target)
                    with optim_kind(target, name):
                        FSDP.optim_state_dict_to_load(target, loaded, state, load_directly=True)
                    assert_same_optim_state(full_state(target, loaded), expected)
                    torch.testing.assert_close(next_loss_and_step(target, loaded, 2), losses)

    run_on_ranks(world_size, move)


def saved_in_full(strategy: ShardingStrategy) -> tuple[dict[str, Any], dict[str, Any]]:
    model = wrapped(build(Net), strategy, "blocks", use_orig_params=True)
    optimizer = adam(model)
    trained(model, optimizer, BEFORE)
    return full_state(model, optimizer), copied(model.state_dict())


def loaded_in_full(
    name: str, use_orig_params: bool, state: dict[str, Any], weights: dict[str, Any]
) -> None:
    target = wrapped(
        other(Net), ShardingStrategy.FULL_SHARD, "linears", use_orig_params=use_orig_params
    )
    target.load_state_dict(weights)
    loaded = adam(target)
    with optim_kind(target, name):
        given = state if name == "full" or dist.get_rank() == 0 else {}
        FSDP.optim_state_dict_to_load(target, loaded, given, load_directly=True)
    assert_same_optim_state(full_state(target, loaded), state)
    bare = build(Net)
    bare.load_state_dict(weights)
    plain = adam(bare)
    plain.load_state_dict(
        FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, bare, optim=plain)
    )
    torch.testing.assert_close(
        next_loss_and_step(target, loaded, 2), next_loss_and_step(bare, plain, 2, bare=True)
    )


@pytest.mark.parametrize("name", ["full", "full on the first rank"])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_full_state_of_four_ranks_is_loaded_by_one_two_and_three(
    use_orig_params: bool, name: str
) -> None:
    state, weights = run_on_ranks(4, saved_in_full, ShardingStrategy.FULL_SHARD)[0]
    for world_size in (1, 2, 3):
        run_on_ranks(world_size, loaded_in_full, name, use_orig_params, state, weights)
