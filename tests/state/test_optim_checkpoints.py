"""torch.distributed.checkpoint saves and loads sharded optimizer state, also resharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as torch_state_dict
from tests.original.training import Net, build
from tests.state.models import SHARDED_KINDS, assert_same_state, copied, kind, other, wrapped
from tests.state.optimizers import (
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
from torch import nn

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy
from fullshard.engine.params.locations import WRAPPED_MODULE
from fullshard.state.optim.methods import optim_state_template
from fullshard.testing import run_on_ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
BEFORE = range(2)


class Detour(Net):
    """A model with a part that no step has used yet."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 5)


def save(path: Path, name: str, strategy: ShardingStrategy) -> tuple[Any, Any]:
    model = wrapped(build(Detour), strategy, "blocks", use_orig_params=True)
    optimizer = adamw(model)
    trained(model, optimizer, BEFORE)
    with kind(model, name):
        state = {"model": model.state_dict()}
    with optim_kind(model, name):
        state["optim"] = FSDP.optim_state_dict(model, optimizer)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path))
    return full_state(model, optimizer), next_loss_and_step(model, optimizer, 2)


def load(path: Path, name: str, wrapping: str, expected: Any, losses: Any = None) -> None:
    model = wrapped(other(Detour), ShardingStrategy.FULL_SHARD, wrapping, use_orig_params=True)
    optimizer = adamw(model)
    reader = dcp.FileSystemReader(path)
    with kind(model, name):
        state: dict[str, Any] = {"model": model.state_dict()}
        dcp.load(state, storage_reader=reader)
        model.load_state_dict(state["model"])
    with optim_kind(model, name):
        config = FSDP.get_state_dict_type(model).optim_state_dict_config
        metadata = reader.read_metadata()
        template = {"optim": optim_state_template(model, optimizer, metadata, config=config)}
        # Otherwise torch takes a ShardedTensor of which a rank has nothing for a sign of age.
        planner = dcp.DefaultLoadPlanner(flatten_sharded_tensors=False)
        dcp.load(template, storage_reader=reader, planner=planner)
        FSDP.optim_state_dict_to_load(model, optimizer, template["optim"], load_directly=True)
    assert_same_optim_state(full_state(model, optimizer), expected)
    if losses is not None:
        found = next_loss_and_step(model, optimizer, 2)
        torch.testing.assert_close(found, losses[dist.get_rank()])


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD])
@pytest.mark.parametrize("name", SHARDED_KINDS)
def test_state_of_four_ranks_is_loaded_by_two_three_and_four_that_never_stepped(
    tmp_path: Path, name: str, strategy: ShardingStrategy
) -> None:
    results = run_on_ranks(4, save, tmp_path, name, strategy)
    expected, losses = results[0][0], [loss for _, loss in results]
    assert not any("unused" in parameter for parameter in expected["state"])
    run_on_ranks(4, load, tmp_path, name, "blocks", expected, losses)
    run_on_ranks(2, load, tmp_path, name, "one unit", expected)
    run_on_ranks(3, load, tmp_path, name, "linears", expected)


def test_state_of_one_kind_is_loaded_as_the_other(tmp_path: Path) -> None:
    results = run_on_ranks(2, save, tmp_path, "sharded", ShardingStrategy.FULL_SHARD)
    expected, losses = results[0][0], [loss for _, loss in results]
    run_on_ranks(2, load, tmp_path, "dtensor", "linears", expected, losses)


def point_torch_at_fullshard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's state-dict functions, which know wrappers by class, know ours."""
    for name in (
        "FullOptimStateDictConfig",
        "FullStateDictConfig",
        "ShardedOptimStateDictConfig",
        "ShardedStateDictConfig",
        "StateDictType",
    ):
        monkeypatch.setattr(torch_state_dict, name, getattr(fullshard, name))
    monkeypatch.setattr(torch_state_dict, "FSDP", FSDP)
    monkeypatch.setattr(torch_state_dict, "FSDP_WRAPPED_MODULE", WRAPPED_MODULE)
    monkeypatch.setattr(
        torch_state_dict, "_get_module_fsdp_state_if_fully_sharded_module", lambda module: module
    )
    if hasattr(torch_state_dict, "HYBRID_SHARDING_STRATEGIES"):  # torch 2.11 has it not
        monkeypatch.setattr(
            torch_state_dict, "HYBRID_SHARDING_STRATEGIES", fullshard.api.HYBRID_STRATEGIES
        )


def through_torch(path: Path, use_orig_params: bool, options: dict[str, bool]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        point_torch_at_fullshard(monkeypatch)
        chosen = torch_state_dict.StateDictOptions(**options)
        model = wrapped(
            build(Net), ShardingStrategy.FULL_SHARD, "blocks", use_orig_params=use_orig_params
        )
        optimizer = adam(model)
        trained(model, optimizer, BEFORE)
        expected = full_state(model, optimizer)
        reference = bare_reference(Net, adam, BEFORE)[2]
        assert_close_optim_state(expected, reference)
        weights, state = torch_state_dict.get_state_dict(model, optimizer, options=chosen)
        if not options.get("full_state_dict"):
            dcp.save({"model": weights, "optim": state}, checkpoint_id=path)
        target = wrapped(
            other(Net), ShardingStrategy.FULL_SHARD, "linears", use_orig_params=not use_orig_params
        )
        loaded = adam(target)
        if not options.get("full_state_dict"):
            weights, state = torch_state_dict.get_state_dict(target, loaded, options=chosen)
            dcp.load({"model": weights, "optim": state}, checkpoint_id=path)
        torch_state_dict.set_state_dict(
            target, loaded, model_state_dict=weights, optim_state_dict=state, options=chosen
        )
        assert_same_optim_state(full_state(target, loaded), expected)
        torch.testing.assert_close(
            next_loss_and_step(target, loaded, 2), next_loss_and_step(model, optimizer, 2)
        )


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"full_state_dict": True}, {"flatten_optimizer_state_dict": True}],
    ids=["sharded", "full", "flattened"],
)
def test_get_and_set_state_dict_of_torch_know_the_wrapper(
    tmp_path: Path, options: dict[str, bool], use_orig_params: bool
) -> None:
    run_on_ranks(2, through_torch, tmp_path, use_orig_params, options)


def from_the_first_rank(use_orig_params: bool) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        point_torch_at_fullshard(monkeypatch)
        chosen = torch_state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
        model = wrapped(
            build(Net), ShardingStrategy.FULL_SHARD, "blocks", use_orig_params=use_orig_params
        )
        optimizer = adam(model)
        trained(model, optimizer, BEFORE)
        state = torch_state_dict.get_optimizer_state_dict(model, optimizer, options=chosen)
        assert bool(state.get("state")) == (dist.get_rank() == 0)
        loaded = adam(model)
        torch_state_dict.set_optimizer_state_dict(model, loaded, state, options=chosen)
        assert_same_optim_state(full_state(model, loaded), full_state(model, optimizer))


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_set_optimizer_state_dict_of_torch_sends_what_the_first_rank_has(
    use_orig_params: bool,
) -> None:
    run_on_ranks(2, from_the_first_rank, use_orig_params)


def a_part_of_the_model(use_orig_params: bool) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        point_torch_at_fullshard(monkeypatch)
        bare = build(Net)
        model = wrapped(
            bare, ShardingStrategy.FULL_SHARD, "blocks", use_orig_params=use_orig_params
        )
        expected = copied(bare.state_dict())
        expected["head.weight"] += 1
        torch_state_dict.set_model_state_dict(
            model,
            {"head.weight": expected["head.weight"].clone()},
            options=torch_state_dict.StateDictOptions(full_state_dict=True, strict=False),
        )
        assert_same_state(model.state_dict(), expected)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_set_model_state_dict_of_torch_loads_a_part_of_the_model(use_orig_params: bool) -> None:
    run_on_ranks(2, a_part_of_the_model, use_orig_params)
