"""torch.distributed.checkpoint saves and loads both kinds of sharded state, also resharded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.original.training import Net, build
from tests.state.models import (
    SHARDED_KINDS,
    Odd,
    assert_same_state,
    kind,
    next_loss,
    other,
    wrapped,
)

from fullshard import ShardingStrategy
from fullshard.testing import run_on_ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
MODELS = {"net": Net, "odd": Odd}


def save(path: Path, name: str, model_name: str, strategy: ShardingStrategy) -> None:
    model = wrapped(build(MODELS[model_name]), strategy, "blocks", use_orig_params=True)
    with kind(model, name):
        dcp.save(model.state_dict(), storage_writer=dcp.FileSystemWriter(path))


def load(path: Path, name: str, model_name: str, wrapping: str, use_orig_params: bool) -> None:
    bare = build(MODELS[model_name])
    model = wrapped(
        other(MODELS[model_name]),
        ShardingStrategy.FULL_SHARD,
        wrapping,
        use_orig_params=use_orig_params,
    )
    with kind(model, name):
        state = model.state_dict()
        dcp.load(state, storage_reader=dcp.FileSystemReader(path))
        model.load_state_dict(state)
    assert_same_state(model.state_dict(), dict(bare.state_dict()))
    if model_name == "net":
        assert next_loss(model) == next_loss(bare)


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD])
@pytest.mark.parametrize("name", SHARDED_KINDS)
def test_a_checkpoint_of_four_ranks_is_loaded_by_two_three_and_four(
    tmp_path: Path, name: str, strategy: ShardingStrategy
) -> None:
    run_on_ranks(4, save, tmp_path, name, "net", strategy)
    run_on_ranks(4, load, tmp_path, name, "net", "blocks", True)
    run_on_ranks(2, load, tmp_path, name, "net", "one unit", False)
    run_on_ranks(3, load, tmp_path, name, "net", "linears", True)


@pytest.mark.parametrize("name", SHARDED_KINDS)
def test_odd_parameters_survive_a_checkpoint(tmp_path: Path, name: str) -> None:
    run_on_ranks(4, save, tmp_path, name, "odd", ShardingStrategy.FULL_SHARD)
    run_on_ranks(2, load, tmp_path, name, "odd", "one unit", True)


def test_a_checkpoint_of_one_kind_is_loaded_as_the_other(tmp_path: Path) -> None:
    run_on_ranks(2, save, tmp_path, "sharded", "net", ShardingStrategy.FULL_SHARD)
    run_on_ranks(3, load, tmp_path, "dtensor", "net", "blocks", True)


def test_shards_of_units_are_saved_as_parts_of_a_whole(tmp_path: Path) -> None:
    run_on_ranks(2, save, tmp_path, "local", "net", ShardingStrategy.FULL_SHARD)
    run_on_ranks(3, load, tmp_path, "local", "net", "blocks", True)


def test_a_checkpoint_is_read_into_the_bare_model_without_ranks(tmp_path: Path) -> None:
    run_on_ranks(2, save, tmp_path, "dtensor", "net", ShardingStrategy.FULL_SHARD)
    expected, found = build(Net).cpu(), other(Net).cpu()
    state = found.state_dict()
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    for name, value in expected.state_dict().items():
        assert torch.equal(state[name], value), name
