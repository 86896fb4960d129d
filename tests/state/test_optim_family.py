"""The older methods for optimizer state, whose names say the type; and keys by name or by id."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from tests.original.training import Net, build
from tests.state.models import STRATEGIES, other, wrapped
from tests.state.optimizers import (
    OPTIM_KINDS,
    adam,
    adamw,
    assert_same_optim_state,
    full_state,
    next_loss_and_step,
    optim_kind,
    state_by_names,
    trained,
)
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import OptimStateKeyType, ShardingStrategy
from fullshard.testing import ranks

FULL_SHARD = ShardingStrategy.FULL_SHARD
BEFORE = range(2)
METHODS = (
    "optim_state_dict",
    "optim_state_dict_to_load",
    "full_optim_state_dict",
    "sharded_optim_state_dict",
    "shard_full_optim_state_dict",
    "scatter_full_optim_state_dict",
    "flatten_sharded_optim_state_dict",
    "rekey_optim_state_dict",
)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_takes_what_torch_s_takes(method: str) -> None:
    def arguments(wrapper: type) -> list[tuple[str, object]]:
        found = inspect.signature(getattr(wrapper, method)).parameters.values()
        return [(parameter.name, parameter.default) for parameter in found]

    assert arguments(FSDP) == arguments(torch.distributed.fsdp.FullyShardedDataParallel)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(4)
def test_full_state_is_sharded_scattered_and_gathered_without_losing_a_bit(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    model = wrapped(build(Net), strategy, "blocks", use_orig_params=use_orig_params)
    optimizer = adam(model)
    trained(model, optimizer, BEFORE)
    expected = full_state(model, optimizer)

    everywhere = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    assert_same_optim_state(everywhere, expected)
    first = FSDP.full_optim_state_dict(model, optimizer)
    assert bool(first) == (dist.get_rank() == 0)
    sharded = FSDP.sharded_optim_state_dict(model, optimizer)
    assert isinstance(sharded["state"]["embed.weight"]["exp_avg"], ShardedTensor)

    target = wrapped(other(Net), strategy, "linears", use_orig_params=not use_orig_params)
    loaded = adam(target)
    for to_load in (
        FSDP.shard_full_optim_state_dict(everywhere, target),
        FSDP.shard_full_optim_state_dict(everywhere, target, optim=loaded),
        FSDP.shard_full_optim_state_dict(everywhere, target, list(target.parameters())),
        FSDP.scatter_full_optim_state_dict(first or None, target, optim=loaded),
        FSDP.flatten_sharded_optim_state_dict(sharded, target, loaded),
    ):
        loaded = adam(target)
        loaded.load_state_dict(to_load)
        assert_same_optim_state(full_state(target, loaded), expected)


@ranks(2)
def test_groups_are_found_by_their_members_whatever_their_order() -> None:
    model = wrapped(build(Net), FULL_SHARD, "blocks", use_orig_params=True)
    optimizer = adamw(model)
    trained(model, optimizer, BEFORE)
    saved = full_state(model, optimizer)
    slow = [p for name, p in model.named_parameters() if name.startswith("embed")]
    fast = [p for name, p in model.named_parameters() if not name.startswith("embed")]
    turned = torch.optim.AdamW([{"params": slow}, {"params": fast[::-1]}])
    FSDP.optim_state_dict_to_load(model, turned, saved, load_directly=True)
    assert [group["lr"] for group in turned.param_groups] == [0.003, 0.02]
    found = full_state(model, turned)
    assert_same_optim_state({**found, "param_groups": found["param_groups"][::-1]}, saved)
    assert next_loss_and_step(model, turned, 2)


@ranks(2)
def test_groups_with_other_hyperparameters_reach_the_bare_model_s_optimizer() -> None:
    model = wrapped(build(Net), FULL_SHARD, "blocks", use_orig_params=True)
    optimizer = adamw(model)
    trained(model, optimizer, BEFORE)
    full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    bare = build(Net)
    plain = adamw(bare)
    by_id = FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, bare, optim=plain)
    assert all(isinstance(key, int) for key in by_id["state"])
    plain.load_state_dict(by_id)
    assert_same_optim_state(state_by_names(bare, plain), full)
    by_name = FSDP.rekey_optim_state_dict(
        plain.state_dict(), OptimStateKeyType.PARAM_NAME, bare, optim=plain
    )
    assert_same_optim_state(by_name, full)


@ranks(2)
def test_ids_are_those_of_a_wrapped_optimizer_that_has_every_parameter_on_its_own() -> None:
    model = wrapped(build(Net), FULL_SHARD, "blocks", use_orig_params=True)
    optimizer = adam(model)
    trained(model, optimizer, BEFORE)
    full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    kind = torch.distributed.fsdp.OptimStateKeyType.PARAM_ID
    by_id = FSDP.rekey_optim_state_dict(full, kind, model)
    assert set(by_id["state"]) == set(range(len(full["state"])))
    flat = wrapped(build(Net), FULL_SHARD, "blocks")
    with pytest.raises(ValueError, match=r"_flat_param holds \d+ parameters .*embed\.weight"):
        FSDP.rekey_optim_state_dict(full, kind, flat)
    with pytest.raises(ValueError, match=r"does not have, by name: \['embed\.weight'"):
        FSDP.rekey_optim_state_dict(full, kind, nn.Linear(3, 3))


@ranks(2)
def test_an_optimizer_that_calls_parameters_by_name_gets_names() -> None:
    model = wrapped(build(Net), FULL_SHARD, "blocks")
    optimizer = adam(model)
    trained(model, optimizer, BEFORE)
    expected = full_state(model, optimizer)
    own = optimizer.state_dict()
    names = [name for name, _ in model.named_parameters()]
    named = {
        "state": {names[key]: value for key, value in own["state"].items()},
        "param_groups": [
            {**g, "params": [names[i] for i in g["params"]]} for g in own["param_groups"]
        ],
    }
    with optim_kind(model, "full"):
        assert_same_optim_state(FSDP.optim_state_dict(model, optimizer, named), expected)
        # Named optimizers of torch list them in the order of their names.
        named["param_groups"][0]["params"] = sorted(names, reverse=True)
        assert_same_optim_state(FSDP.optim_state_dict(model, optimizer, named), expected)
    found = FSDP.optim_state_dict_to_load(model, optimizer, expected, is_named_optimizer=True)
    assert list(found["state"]) == names
    assert found["param_groups"][0]["params"] == names
    outer = nn.ModuleDict({"inner": model})
    with optim_kind(outer, "full"):
        state = FSDP.optim_state_dict(outer, optimizer)
        found = FSDP.optim_state_dict_to_load(outer, optimizer, state, is_named_optimizer=True)
    assert list(found["state"]) == [name for name, _ in outer.named_parameters()]


@pytest.mark.parametrize("name", list(OPTIM_KINDS))
@ranks(2)
def test_state_without_parameter_groups_is_saved_and_loaded_without_them(name: str) -> None:
    model = wrapped(build(Net), FULL_SHARD, "blocks", use_orig_params=True)
    optimizer = adam(model)
    trained(model, optimizer, BEFORE)
    expected, groups = full_state(model, optimizer), optimizer.state_dict()["param_groups"]
    with optim_kind(model, name):
        alone = {"state": copy.deepcopy(optimizer.state_dict()["state"])}
        saved = FSDP.optim_state_dict(model, optimizer, alone)
        trained(model, optimizer, BEFORE)
        found = FSDP.optim_state_dict_to_load(model, optimizer, saved)
    assert "param_groups" not in saved
    assert "param_groups" not in found
    optimizer.load_state_dict({**found, "param_groups": groups})
    assert_same_optim_state(full_state(model, optimizer), expected)
    with pytest.raises(ValueError, match=r"ids of the optimizer.*, 0 to \d+, but .*'head'"):
        FSDP.optim_state_dict(model, optimizer, {"state": {"head": {}}})


@ranks(2)
def test_optim_input_is_no_longer_needed() -> None:
    model = wrapped(build(Net), FULL_SHARD, "blocks")
    optimizer = adam(model)
    given = list(model.parameters())
    with pytest.warns(FutureWarning, match="`optim_input` argument is deprecated"):
        full = FSDP.full_optim_state_dict(model, optimizer, given, rank0_only=False)
    with pytest.warns(FutureWarning, match="`optim_input` argument is deprecated"):
        FSDP.shard_full_optim_state_dict(full, model, given)
    with pytest.warns(FutureWarning, match="`optim_input` argument is deprecated"):
        FSDP.scatter_full_optim_state_dict(full, model, given)


@pytest.mark.parametrize("name", ["full", "full on the first rank", "sharded", "local"])
@ranks(2)
def test_a_learning_rate_that_is_a_tensor_is_saved_as_it_was_and_loaded_everywhere(
    name: str,
) -> None:
    model = wrapped(build(Net), FULL_SHARD, "blocks")
    rate = torch.tensor(0.02)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    trained(model, optimizer, BEFORE)
    with optim_kind(model, name):
        saved = FSDP.optim_state_dict(model, optimizer)
        rate.fill_(7)
        loaded = torch.optim.Adam(model.parameters(), lr=rate)
        FSDP.optim_state_dict_to_load(model, loaded, saved, load_directly=True)
    assert loaded.param_groups[0]["lr"] == torch.tensor(0.02)
