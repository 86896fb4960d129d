"""Optimizers that list the same parameters in another order, or other groups first, on each rank.

State goes by names: the order is each rank's own affair, and what is saved is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.original.training import Block, Net, build
from tests.state.models import other, wrapped
from tests.state.optimizers import (
    OPTIM_KINDS,
    adamw,
    assert_close_optim_state,
    assert_same_optim_state,
    bare_reference,
    full_state,
    optim_kind,
    trained,
)
from torch import nn

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import OptimStateKeyType, ShardingStrategy
from fullshard.state.optim.methods import optim_state_template
from fullshard.testing import ranks
from fullshard.wrap import ModuleWrapPolicy

FULL_SHARD = ShardingStrategy.FULL_SHARD
BEFORE = range(2)
Input = Callable[[nn.Module], Any]


def turned(items: list[Any]) -> list[Any]:
    """Another order on every rank."""
    rank = dist.get_rank()
    items = items[::-1] if rank % 2 else items
    return items[rank // 2 :] + items[: rank // 2]


def parameters(model: nn.Module) -> list[nn.Parameter]:
    return turned(list(model.parameters()))


def generated(model: nn.Module) -> Iterator[nn.Parameter]:
    yield from parameters(model)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Groups with other learning rates, in another order on every rank, as their parameters are."""
    every = list(model.parameters())
    cuts = [every[0::3], every[1::3], every[2::3]]
    made = [
        {"params": turned(cut), "lr": 0.01 * (n + 1)} for n, cut in enumerate(filter(None, cuts))
    ]
    return turned(made)


def generated_groups(model: nn.Module) -> Iterator[dict[str, Any]]:
    for group in groups(model):
        yield {**group, "params": iter(group["params"])}


def by_rate(state: dict[str, Any]) -> dict[str, Any]:
    """Groups in an order that all ranks share."""
    return {**state, "param_groups": sorted(state["param_groups"], key=lambda g: g["lr"])}


@pytest.mark.parametrize("make_input", [parameters, generated, groups, generated_groups])
@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_the_whole_family_takes_optimizers_that_list_parameters_in_another_order_per_rank(
    use_orig_params: bool, make_input: Input
) -> None:
    options = {"use_orig_params": use_orig_params}
    model = wrapped(build(Net), FULL_SHARD, "blocks", **options)
    optimizer = torch.optim.Adam(make_input(model), lr=0.02)
    trained(model, optimizer, BEFORE)

    everywhere = FSDP.full_optim_state_dict(model, optimizer, make_input(model), rank0_only=False)
    others: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(others, by_rate(everywhere))
    for found in others:
        assert_same_optim_state(found, others[0])
    first = FSDP.full_optim_state_dict(model, optimizer, make_input(model))
    sharded = FSDP.sharded_optim_state_dict(model, optimizer)

    target = wrapped(other(Net), FULL_SHARD, "blocks", **options)
    loaded = torch.optim.Adam(make_input(target))
    for to_load in (
        FSDP.shard_full_optim_state_dict(everywhere, target, make_input(target)),
        FSDP.shard_full_optim_state_dict(everywhere, target, optim=loaded),
        FSDP.scatter_full_optim_state_dict(first or None, target, make_input(target)),
        FSDP.scatter_full_optim_state_dict(first or None, target, optim=loaded),
        FSDP.flatten_sharded_optim_state_dict(sharded, target, loaded),
    ):
        loaded = torch.optim.Adam(make_input(target))
        loaded.load_state_dict(to_load)
        assert_same_optim_state(by_rate(full_state(target, loaded)), by_rate(everywhere))


@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_state_of_parameters_in_another_order_per_rank_is_that_of_the_bare_model(
    use_orig_params: bool,
) -> None:
    _, _, expected = bare_reference(
        Net, lambda bare: torch.optim.Adam(bare.parameters(), lr=0.02), BEFORE
    )
    model = wrapped(build(Net), FULL_SHARD, "blocks", use_orig_params=use_orig_params)
    optimizer = torch.optim.Adam(parameters(model), lr=0.02)
    trained(model, optimizer, BEFORE)
    assert_close_optim_state(full_state(model, optimizer), expected)


@pytest.mark.parametrize("name", list(OPTIM_KINDS))
@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(4)
def test_what_is_saved_with_one_order_is_loaded_with_another(
    use_orig_params: bool, name: str
) -> None:
    options = {"use_orig_params": use_orig_params}
    model = wrapped(build(Net), ShardingStrategy.HYBRID_SHARD, "blocks", **options)
    optimizer = torch.optim.Adam(groups(model))
    trained(model, optimizer, BEFORE)
    expected = full_state(model, optimizer)
    with optim_kind(model, name):
        saved = FSDP.optim_state_dict(model, optimizer)
        turned_back = torch.optim.Adam(groups(model)[::-1], lr=7)
        FSDP.optim_state_dict_to_load(model, turned_back, saved, load_directly=True)
    assert_same_optim_state(by_rate(full_state(model, turned_back)), by_rate(expected))


@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_parameters_that_no_unit_manages_may_be_anywhere_in_the_order(
    use_orig_params: bool,
) -> None:
    def make(bare: nn.Module) -> FSDP:
        return FSDP(
            bare,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            ignored_modules=[bare.head],
            use_orig_params=use_orig_params,
        )

    model = make(build(Net))
    optimizer = torch.optim.Adam(parameters(model))
    trained(model, optimizer, BEFORE)
    # Nothing averages gradients of what is ignored; the first rank's state counts.
    first = FSDP.full_optim_state_dict(model, optimizer)
    target = make(other(Net))
    loaded = torch.optim.Adam(parameters(target))
    loaded.load_state_dict(FSDP.scatter_full_optim_state_dict(first or None, target, optim=loaded))
    found = full_state(target, loaded)
    if dist.get_rank() == 0:
        assert_same_optim_state(found, first)


@ranks(2)
def test_ids_are_those_of_each_rank_s_own_order() -> None:
    model = wrapped(build(Net), FULL_SHARD, "blocks", use_orig_params=True)
    optimizer = torch.optim.Adam(groups(model))
    trained(model, optimizer, BEFORE)
    full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    bare = build(Net)
    kind = OptimStateKeyType.PARAM_ID
    by_id = FSDP.rekey_optim_state_dict(full, kind, bare, generated_groups(bare))
    plain = torch.optim.Adam(groups(bare))
    plain.load_state_dict(by_id)
    names = {parameter: name for name, parameter in bare.named_parameters()}
    assert plain.state.keys() == names.keys()
    for parameter, state in plain.state.items():
        found = state["exp_avg"].cpu()
        assert torch.equal(found, full["state"][names[parameter]]["exp_avg"].cpu())
    by_name = FSDP.rekey_optim_state_dict(
        plain.state_dict(), OptimStateKeyType.PARAM_NAME, bare, generated_groups(bare)
    )
    assert_same_optim_state(by_rate(by_name), by_rate(full))


@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_distributed_checkpoints_do_not_see_the_order(
    use_orig_params: bool, tmp_path: Path
) -> None:
    model = wrapped(build(Net), FULL_SHARD, "blocks", use_orig_params=use_orig_params)
    optimizer = torch.optim.Adam(parameters(model))
    trained(model, optimizer, BEFORE)
    expected = full_state(model, optimizer)
    dcp.save({"optim": FSDP.sharded_optim_state_dict(model, optimizer)}, checkpoint_id=tmp_path)
    target = wrapped(other(Net), FULL_SHARD, "linears", use_orig_params=use_orig_params)
    loaded = torch.optim.Adam(parameters(target)[::-1])
    reader = dcp.FileSystemReader(tmp_path)
    state = {"optim": optim_state_template(target, loaded, reader.read_metadata())}
    dcp.load(state, storage_reader=reader)
    with optim_kind(target, "sharded"):
        FSDP.optim_state_dict_to_load(target, loaded, state["optim"], load_directly=True)
    assert_same_optim_state(full_state(target, loaded), expected)


@ranks(2)
def test_an_optimizer_that_lacks_a_parameter_is_told_apart_from_one_in_another_order() -> None:
    model = wrapped(build(Net), FULL_SHARD, "blocks", use_orig_params=True)
    held = list(model.parameters())
    if dist.get_rank() == 1:
        held = held[:0:-1]
    optimizer = torch.optim.Adam(held)
    trained(model, optimizer, BEFORE)
    message = r"rank 1 lacks \['embed\.weight'\] and has \[\] in addition"
    with pytest.raises(RuntimeError, match=message):
        FSDP.optim_state_dict(model, optimizer)


@ranks(2)
def test_groups_that_were_saved_with_other_hyperparameters_are_refused_in_any_order() -> None:
    model = wrapped(build(Net), FULL_SHARD, "blocks", use_orig_params=True)
    optimizer = adamw(model)
    trained(model, optimizer, BEFORE)
    saved = full_state(model, optimizer)
    together = torch.optim.AdamW(parameters(model))
    with pytest.raises(RuntimeError, match=r"were saved in groups with other hyperparameters"):
        FSDP.optim_state_dict_to_load(model, together, saved)
