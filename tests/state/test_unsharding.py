"""``unshard`` and ``reshard``: parameters gathered and freed on the user's word."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.engine.traffic import counted_traffic
from tests.original.training import (
    MODES,
    Net,
    adam,
    assert_at_rest,
    assert_same_parameters,
    average_gradients,
    blocks_policy,
    build,
    inputs,
    train_step,
)
from tests.state.models import assert_same_state
from torch import nn

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import MixedPrecision, ShardingStrategy
from fullshard.testing import ranks

EACH_MODE = pytest.mark.parametrize(("strategy", "use_orig_params"), MODES)


def wrap(bare: nn.Module, strategy: ShardingStrategy, use_orig_params: bool) -> FSDP:
    return FSDP(
        bare,
        auto_wrap_policy=blocks_policy(),
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
    )


@EACH_MODE
@pytest.mark.parametrize("async_op", [False, True])
@ranks(2)
def test_a_wrappers_own_parameters_are_full_until_they_are_resharded(
    async_op: bool, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    bare = build(Net)
    model = wrap(copy.deepcopy(bare), strategy, use_orig_params)
    block = model.blocks[1]

    handle = block.unshard(async_op=async_op)
    if async_op:
        handle.wait()
    else:
        assert handle is None

    assert torch.equal(block.up.weight, bare.blocks[1].up.weight)
    assert not model.blocks[0]._unit.shows_full
    block.unshard()
    block.reshard()
    block.reshard()
    assert_at_rest(model)


@EACH_MODE
@ranks(2)
def test_a_step_uses_what_was_unsharded_and_trains_as_ever(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    bare = build(Net)
    model = wrap(copy.deepcopy(bare), strategy, use_orig_params)
    optimizers = [adam(bare), adam(model)]
    for step in range(3):
        model.unshard(async_op=True)
        handles = [block.unshard(async_op=True) for block in model.blocks]
        handles[1].wait()
        losses = [train_step(each, step) for each in (bare, model)]
        torch.testing.assert_close(losses[1], losses[0])
        average_gradients(bare)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    assert_at_rest(model)
    assert_same_parameters(bare, model)


@ranks(2)
def test_a_gather_that_was_asked_for_is_not_repeated_by_forward() -> None:
    model = wrap(build(Net), ShardingStrategy.FULL_SHARD, True)
    with torch.no_grad():
        model(inputs(0))
        with counted_traffic() as without:
            model(inputs(0))
        with counted_traffic() as before:
            for unit in FSDP.fsdp_modules(model):
                unit.unshard(async_op=True)
        with counted_traffic() as inside:
            model(inputs(0))

    assert before.gathered == without.gathered > 0
    assert inside.gathered == 0
    assert_at_rest(model)


@ranks(2)
def test_parameters_that_changed_since_are_gathered_again() -> None:
    bare = build(Net)
    model = wrap(copy.deepcopy(bare), ShardingStrategy.FULL_SHARD, True)
    model.blocks[0].unshard(async_op=True)
    with torch.no_grad():
        for each in (bare, model):
            for parameter in each.parameters():
                parameter.mul_(2)

        torch.testing.assert_close(model(inputs(0)), bare(inputs(0)))


@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_what_is_done_to_full_parameters_is_kept(use_orig_params: bool) -> None:
    bare = build(Net)
    model = wrap(copy.deepcopy(bare), ShardingStrategy.FULL_SHARD, use_orig_params)
    with torch.no_grad():
        bare.blocks[0].up.weight.fill_(0.25)
        model.blocks[0].unshard()
        model.blocks[0].up.weight.fill_(0.25)
        model.blocks[0].reshard()

    assert_same_parameters(bare, model)


@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_a_state_dict_has_what_was_done_to_full_parameters(use_orig_params: bool) -> None:
    bare = build(Net)
    model = wrap(copy.deepcopy(bare), ShardingStrategy.FULL_SHARD, use_orig_params)
    model.blocks[0].unshard()
    for value in (0.25, 0.5):
        with torch.no_grad():
            for each in (bare, model):
                each.blocks[0].up.weight.fill_(value)
        assert_same_state(model.state_dict(), dict(bare.state_dict()))
    model.blocks[0].reshard()

    assert_same_parameters(bare, model)


@ranks(2)
def test_a_part_of_a_unit_can_be_used_by_hand_and_its_gradients_are_reduced() -> None:
    bare = build(Net)
    model = wrap(copy.deepcopy(bare), ShardingStrategy.FULL_SHARD, True)
    for each in (bare, model):
        if each is model:
            each.blocks[0].unshard()
        each.blocks[0].up.weight.square().sum().backward()
    average_gradients(bare)

    assert_at_rest(model)
    with FSDP.summon_full_params(model, with_grads=True, writeback=False):
        found = model.blocks[0].up.weight.grad
        torch.testing.assert_close(found, bare.blocks[0].up.weight.grad)
        assert model.blocks[1].up.weight.grad is None


@ranks(2)
def test_the_next_unit_can_be_unsharded_from_inside_a_forward() -> None:
    bare = build(Net)
    model = wrap(copy.deepcopy(bare), ShardingStrategy.FULL_SHARD, True)

    def look_ahead(*_: object) -> None:
        model.blocks[1].unshard(async_op=True)

    model.blocks[0].register_forward_pre_hook(look_ahead)
    losses = [train_step(each, 0) for each in (bare, model)]

    torch.testing.assert_close(losses[1], losses[0])
    assert_at_rest(model)


@ranks(2)
def test_unsharded_parameters_are_in_compute_precision() -> None:
    bare = build(Net)
    model = FSDP(
        bare, use_orig_params=True, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)
    )

    model.unshard()

    assert model.head.weight.dtype is torch.bfloat16
    assert model.head.weight.shape == (3, 7)
    model.reshard()


@ranks(2)
def test_resharding_what_is_in_use_is_refused() -> None:
    model = wrap(build(Net), ShardingStrategy.FULL_SHARD, True)
    model.blocks[0].register_forward_pre_hook(lambda *_: model.reshard())

    with pytest.raises(RuntimeError, match=r"\(root\) Net' is in use by a forward"):
        model(inputs(0))
    with (
        FSDP.summon_full_params(model),
        pytest.raises(RuntimeError, match="a backward or summon_full_params"),
    ):
        model.blocks[0].reshard()


@EACH_MODE
@ranks(2)
def test_unsharding_without_gradients_between_forward_and_backward_changes_nothing(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    bare = build(Net)
    models = [wrap(copy.deepcopy(bare), strategy, use_orig_params) for _ in range(2)]
    for model in models:
        output = model(inputs(0))
        if model is models[1]:
            with torch.no_grad():
                model.unshard()
                model.blocks[1].unshard()
        output.sum().backward()

    for expected, found in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)
    assert_at_rest(models[1])


@ranks(2)
def test_what_is_done_to_full_parameters_is_used_by_the_next_forward_and_kept() -> None:
    bare = build(Net)
    model = wrap(copy.deepcopy(bare), ShardingStrategy.FULL_SHARD, True)
    model.blocks[0].unshard()
    with torch.no_grad():
        for each in (bare, model):
            each.blocks[0].up.weight.fill_(0.25)
        torch.testing.assert_close(model(inputs(0)), bare(inputs(0)))

    assert_same_parameters(bare, model)
