"""What is wrong with an optimizer's state is said by the names users know."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.original.training import Net, build, loss_of
from tests.state.models import wrapped
from tests.state.optimizers import adam, full_state, optim_kind, trained

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy
from fullshard.testing import ranks

FULL_SHARD = ShardingStrategy.FULL_SHARD


def stepped(use_orig_params: bool = False) -> tuple[Any, torch.optim.Optimizer, dict[str, Any]]:
    model = wrapped(build(Net), FULL_SHARD, "blocks", use_orig_params=use_orig_params)
    optimizer = adam(model)
    trained(model, optimizer, range(1))
    return model, optimizer, full_state(model, optimizer)


@ranks(2)
def test_an_optimizer_over_another_model_is_refused() -> None:
    bare = build(Net)
    early = adam(bare)
    model = wrapped(bare, FULL_SHARD, "blocks")
    message = r"group 0 of the optimizer has 16 parameters .*\(7, 5\).*optimizer after wrapping"
    with pytest.raises(ValueError, match=message):
        FSDP.optim_state_dict(model, early)
    with pytest.raises(ValueError, match="not parameters of this FullyShardedDataParallel"):
        FSDP.optim_state_dict_to_load(model, early, {"state": {}, "param_groups": []})


@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_an_optimizer_that_lacks_a_parameter_on_one_rank_is_refused_on_all(
    use_orig_params: bool,
) -> None:
    model = wrapped(build(Net), FULL_SHARD, "blocks", use_orig_params=use_orig_params)
    parameters = list(model.parameters())
    held = parameters[:-1] if torch.distributed.get_rank() == 1 else parameters
    optimizer = torch.optim.Adam(held)
    trained(model, optimizer, range(1))
    with pytest.raises(RuntimeError, match=r"states needed by rank 0's.* rank 1 lacks \['"):
        FSDP.full_optim_state_dict(model, optimizer)


@ranks(2)
def test_missing_and_unexpected_names_are_reported_together() -> None:
    model, optimizer, state = stepped()
    broken = copy.deepcopy(state)
    broken["state"]["head.gain"] = broken["state"].pop("head.bias")
    broken["param_groups"][0]["params"].remove("head.bias")
    with pytest.raises(RuntimeError) as raised:
        FSDP.optim_state_dict_to_load(model, optimizer, broken)
    assert "head.bias is in none of the saved parameter groups" in str(raised.value)
    assert "the optimizer has no parameters named ['head.gain']" in str(raised.value)


@ranks(2)
def test_state_of_another_shape_is_reported_with_both_shapes() -> None:
    model, optimizer, state = stepped(use_orig_params=True)
    state["state"]["head.weight"]["exp_avg"] = torch.zeros(3, 8)
    message = (
        r"'exp_avg' of head.weight: it has shape \(3, 8\), the parameter in the model \(3, 7\)"
    )
    with pytest.raises(RuntimeError, match=message):
        FSDP.optim_state_dict_to_load(model, optimizer, state)


@ranks(2)
def test_a_group_that_was_two_with_other_hyperparameters_is_reported() -> None:
    model, optimizer, state = stepped(use_orig_params=True)
    names = state["param_groups"][0]["params"]
    first, second = copy.deepcopy(state["param_groups"][0]), state["param_groups"][0]
    first["params"], second["params"], second["lr"] = names[:2], names[2:], 0.5
    state["param_groups"] = [first, second]
    with pytest.raises(RuntimeError, match=r"group 0 .* embed\.weight .* other hyperparameters"):
        FSDP.optim_state_dict_to_load(model, optimizer, state)
    second["lr"] = first["lr"]
    FSDP.optim_state_dict_to_load(model, optimizer, state)


@ranks(2)
def test_a_dict_that_is_no_state_dict_is_refused_with_advice() -> None:
    model, optimizer, _ = stepped()
    for given in ({}, {"model": 1}):
        with pytest.raises(ValueError, match=r"'state' and 'param_groups'.*rank0_only=True"):
            FSDP.optim_state_dict_to_load(model, optimizer, given)
    with pytest.raises(ValueError, match="'state' and 'param_groups'"):
        FSDP.scatter_full_optim_state_dict({}, model, optim=optimizer)
    own = optimizer.state_dict()
    own["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match=r"groups of \[3\] parameters, the optimizer of \[4\]"):
        FSDP.optim_state_dict(model, optimizer, own)


@ranks(2)
def test_ranks_that_stepped_differently_are_named() -> None:
    model = wrapped(build(Net), FULL_SHARD, "blocks")
    optimizer = adam(model)
    loss_of(model, 0).backward()
    if model.rank == 0:
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"\['exp_avg', .*\] on rank 0 and \[\] on rank 1"):
        FSDP.optim_state_dict(model, optimizer)


@ranks(2)
def test_a_local_state_dict_is_for_its_wrapping() -> None:
    model, optimizer, _ = stepped()
    with optim_kind(model, "local"):
        saved = FSDP.optim_state_dict(model, optimizer)
        saved["local_shapes"]["blocks.0._flat_param"] = (3,)
        with pytest.raises(RuntimeError, match=r"mismatch for blocks\.0\._flat_param: a local"):
            FSDP.optim_state_dict_to_load(model, optimizer, saved)
    target = wrapped(build(Net), FULL_SHARD, "one unit")
    with optim_kind(target, "local"), pytest.raises(RuntimeError, match="no parameters named"):
        FSDP.optim_state_dict_to_load(target, adam(target), saved)


@ranks(2)
def test_state_is_refused_in_the_middle_of_a_forward() -> None:
    model, optimizer, _ = stepped()
    found: list[str] = []

    def ask(*_: Any) -> None:
        with pytest.raises(RuntimeError, match="in the middle of a forward or backward") as raised:
            FSDP.optim_state_dict(model, optimizer)
        found.append(str(raised.value))

    model.module.head.register_forward_hook(ask)
    loss_of(model, 1)
    assert found


@ranks(2)
def test_what_a_flat_parameter_cannot_know_is_said_and_begins_with_zeros() -> None:
    model, optimizer, state = stepped()
    del state["state"]["blocks.0.scale"]
    message = r"no saved 'exp_avg.*blocks\.0\.scale.*initialised with zeros"
    with pytest.warns(UserWarning, match=message):
        FSDP.optim_state_dict_to_load(model, optimizer, state, load_directly=True)
    found = full_state(model, optimizer)["state"]
    assert not found["blocks.0.scale"]["exp_avg"].any()
    assert torch.equal(
        found["blocks.0.up.weight"]["exp_avg"], state["state"]["blocks.0.up.weight"]["exp_avg"]
    )
