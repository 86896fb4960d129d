"""Cases that random search once found to fail, kept in their smallest form."""

from __future__ import annotations

import dataclasses

import pytest
from tests.engine.random_models import Block, Case, Layer, Options, check_parity

from fullshard.testing import run_on_ranks

PLAIN = Options("FULL_SHARD", True, "BACKWARD_PRE", False, True, False)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_a_reentrant_checkpoint_around_a_part_of_a_unit_finds_full_parameters(
    strategy: str, use_orig_params: bool
) -> None:
    inner = Block((Layer("bare linear"),), wrapped=False, checkpointed="reentrant")
    block = Block((Layer("bare linear"),), wrapped=True, inner=inner)
    options = dataclasses.replace(PLAIN, strategy=strategy, use_orig_params=use_orig_params)

    run_on_ranks(2, check_parity, Case((block,), options))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_frozen_parameter_keeps_its_gradient_through_no_sync(world_size: int) -> None:
    # The zero that zero_grad left on it: momentum goes on moving the parameter.
    case = Case(
        (Block((Layer("linear"),), wrapped=True),),
        PLAIN,
        backwards=2,
        no_sync=True,
        set_to_none=False,
        freezes_later=True,
    )

    run_on_ranks(world_size, check_parity, case)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_a_reentrant_checkpoint_that_runs_twice_in_a_unit_counts_twice(
    strategy: str, use_orig_params: bool
) -> None:
    inner = Block((Layer("linear"),), wrapped=False, checkpointed="reentrant")
    block = Block((Layer("linear"), Layer("tanh")), wrapped=True, inner=inner, repeats=2)
    options = dataclasses.replace(PLAIN, strategy=strategy, use_orig_params=use_orig_params)

    run_on_ranks(2, check_parity, Case((block,), options, forwards=2))


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_a_reentrant_checkpoint_inside_of_another_kind_trains(
    strategy: str, use_orig_params: bool
) -> None:
    inner = Block((Layer("linear"),), wrapped=False, checkpointed="reentrant")
    block = Block((Layer("bare linear"),), wrapped=True, inner=inner, checkpointed="plain")
    options = dataclasses.replace(PLAIN, strategy=strategy, use_orig_params=use_orig_params)

    run_on_ranks(2, check_parity, Case((block,), options))


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_units_in_which_only_empty_parameters_are_used_train(strategy: str) -> None:
    block = Block((Layer("nothing"),), wrapped=True, used="odd")
    options = dataclasses.replace(PLAIN, strategy=strategy)

    run_on_ranks(2, check_parity, Case((block,), options, steps=3, forwards=2))


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_reentrant_checkpoints_in_a_row_before_other_layers_find_full_parameters(
    strategy: str,
) -> None:
    inner = Block((Layer("linear"),), wrapped=False, checkpointed="reentrant", repeats=2)
    block = Block((Layer("linear"),), wrapped=True, inner=inner)
    options = dataclasses.replace(PLAIN, strategy=strategy)

    run_on_ranks(2, check_parity, Case((block,), options))
