"""Sharded optimizer state of parameters that no unit manages where it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.compat.installed import installed
from tests.original.training import Block, Net, build
from tests.state.models import SHARDED_KINDS, other, wrapped
from tests.state.optimizers import (
    adam,
    assert_same_optim_state,
    full_state,
    optim_kind,
    state_by_names,
    trained,
)
from torch import nn
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy, StateDictType
from fullshard.state.optim.methods import optim_state_template
from fullshard.testing import device, ranks
from fullshard.wrap import ModuleWrapPolicy

FULL_SHARD = ShardingStrategy.FULL_SHARD
BEFORE = range(2)


def blocks_ignored(bare: nn.Module, use_orig_params: bool) -> nn.Module:
    return FSDP(bare, ignored_modules=[bare.blocks], use_orig_params=use_orig_params)


def ends_ignored(bare: nn.Module, use_orig_params: bool) -> nn.Module:
    return FSDP(
        bare,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        ignored_states=[*bare.embed.parameters(), *bare.head.parameters()],
        use_orig_params=use_orig_params,
    )


def units_inside(bare: nn.Module, use_orig_params: bool) -> nn.Module:
    """A plain module with units, which do not have all of its parameters."""
    bare.blocks[1] = FSDP(bare.blocks[1], use_orig_params=use_orig_params)
    return bare


def unwrapped(bare: nn.Module, use_orig_params: bool) -> nn.Module:
    return bare


REWRAPPED = (blocks_ignored, ends_ignored, units_inside, unwrapped)
Rewrap = Callable[[nn.Module, bool], nn.Module]


def loaded_with(
    target: nn.Module, to_load: Callable[[torch.optim.Optimizer], dict[str, Any]]
) -> dict[str, Any]:
    """What an optimizer over ``target`` has after loading, as full state by names."""
    optimizer = adam(target)
    optimizer.load_state_dict(to_load(optimizer))
    for state in optimizer.state.values():
        assert all(type(value) is torch.Tensor for value in state.values())
    if not FSDP.fsdp_modules(target):
        return state_by_names(target, optimizer)
    return full_state(target, optimizer)


@pytest.mark.parametrize("name", SHARDED_KINDS)
@pytest.mark.parametrize("rewrap", REWRAPPED)
@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_sharded_state_is_gathered_for_parameters_outside_of_all_units(
    use_orig_params: bool, rewrap: Rewrap, name: str
) -> None:
    model = wrapped(build(Net), FULL_SHARD, "blocks", use_orig_params=use_orig_params)
    optimizer = adam(model)
    trained(model, optimizer, BEFORE)
    expected = full_state(model, optimizer)
    with optim_kind(model, name):
        saved = FSDP.optim_state_dict(model, optimizer)
    target = rewrap(other(Net), use_orig_params)
    if FSDP.fsdp_modules(target):
        with optim_kind(target, name):
            found = loaded_with(target, lambda o: FSDP.optim_state_dict_to_load(target, o, saved))
    else:
        found = loaded_with(target, lambda o: FSDP.optim_state_dict_to_load(target, o, saved))
    assert_same_optim_state(found, expected)
    assert_same_optim_state(
        loaded_with(target, lambda o: FSDP.flatten_sharded_optim_state_dict(saved, target, o)),
        expected,
    )


@pytest.mark.parametrize("name", SHARDED_KINDS)
@ranks(4)
def test_ranks_without_rows_and_copies_of_shards_gather_as_well(name: str) -> None:
    model = wrapped(build(Net), ShardingStrategy.HYBRID_SHARD, "one unit")
    optimizer = adam(model)
    trained(model, optimizer, BEFORE)
    expected = full_state(model, optimizer)
    with optim_kind(model, name):
        saved = FSDP.optim_state_dict(model, optimizer)
    everywhere = wrapped(build(Net), FULL_SHARD, "one unit")
    spread = adam(everywhere)
    FSDP.optim_state_dict_to_load(everywhere, spread, expected, load_directly=True)
    with optim_kind(everywhere, name):
        # Four ranks share three rows of the head.
        chunks = FSDP.optim_state_dict(everywhere, spread)
    for given in (saved, chunks):
        target = other(Net)
        found = loaded_with(
            target,
            lambda o, g=given, t=target: FSDP.flatten_sharded_optim_state_dict(g, t, o),  # type: ignore[misc]
        )
        assert_same_optim_state(found, expected)


@pytest.mark.parametrize("rewrap", [blocks_ignored, units_inside, unwrapped])
@ranks(4)
def test_what_torch_reads_from_a_checkpoint_is_gathered(rewrap: Rewrap, tmp_path: Path) -> None:
    model = wrapped(build(Net), FULL_SHARD, "blocks", use_orig_params=True)
    optimizer = adam(model)
    trained(model, optimizer, BEFORE)
    expected = full_state(model, optimizer)
    dcp.save({"optim": FSDP.sharded_optim_state_dict(model, optimizer)}, checkpoint_id=tmp_path)
    target = rewrap(other(Net), True)
    units = FSDP.fsdp_modules(target)
    for unit in units:
        FSDP.set_state_dict_type(unit, StateDictType.SHARDED_STATE_DICT)
    reader = dcp.FileSystemReader(tmp_path)

    read = load_sharded_optimizer_state_dict(target.state_dict(), "optim", reader)["optim"]
    found = loaded_with(target, lambda o: FSDP.optim_state_dict_to_load(target, o, read))
    assert_same_optim_state(found, expected)

    def from_template(loaded: torch.optim.Optimizer) -> dict[str, Any]:
        state = {"optim": optim_state_template(target, loaded, reader.read_metadata())}
        dcp.load(state, storage_reader=reader)
        return FSDP.optim_state_dict_to_load(target, loaded, state["optim"])

    assert_same_optim_state(loaded_with(target, from_template), expected)


@ranks(2)
def test_torch_s_functions_for_checkpoints_move_state_out_of_units() -> None:
    with installed():
        model = wrapped(build(Net), FULL_SHARD, "blocks", use_orig_params=True)
        optimizer = adam(model)
        trained(model, optimizer, BEFORE)
        expected = full_state(model, optimizer)
        saved = get_optimizer_state_dict(model, optimizer, options=StateDictOptions())
        target = ends_ignored(other(Net), True)
        loaded = adam(target)
        set_optimizer_state_dict(target, loaded, saved, options=StateDictOptions())
        assert_same_optim_state(full_state(target, loaded), expected)


@ranks(2)
def test_an_ignored_parameter_that_is_a_dtensor_keeps_its_placement() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device().type, (2,))
    bare = build(Net)
    bare.head.weight = nn.Parameter(distribute_tensor(bare.head.weight, mesh, [Shard(1)]))
    model = FSDP(bare, ignored_modules=[bare.head], use_orig_params=True)
    # Torch's update of several parameters at once refuses plain ones beside DTensors.
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with optim_kind(model, "dtensor"):
        saved = FSDP.optim_state_dict(model, optimizer)
        FSDP.optim_state_dict_to_load(model, optimizer, saved, load_directly=True)
    (found,) = (s["exp_avg"] for p, s in optimizer.state.items() if p is model.module.head.weight)
    assert isinstance(found, DTensor)
    assert found.placements == (Shard(1),)


@ranks(2)
def test_a_sharded_tensor_of_another_shape_is_refused_by_all_ranks() -> None:
    model = wrapped(build(Net), FULL_SHARD, "blocks", use_orig_params=True)
    optimizer = adam(model)
    trained(model, optimizer, BEFORE)
    saved = FSDP.sharded_optim_state_dict(model, optimizer)
    saved["state"]["head.weight"]["exp_avg"] = saved["state"]["embed.weight"]["exp_avg"]
    target = ends_ignored(other(Net), True)
    with pytest.raises(RuntimeError, match=r"'exp_avg' of head\.weight: it has shape \(7, 5\)"):
        FSDP.flatten_sharded_optim_state_dict(saved, target, adam(target))
