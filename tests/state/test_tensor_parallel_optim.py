"""Optimizer state of tensor-parallel parameters that are sharded is that of the bare model."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.engine.models import make
from tests.engine.parity import train, train_alone
from tests.engine.tensor_parallel import Tokens, mesh_of, sharded, uneven
from tests.original.training import MODES
from tests.state.optimizers import (
    OPTIM_KINDS,
    adam,
    assert_close_optim_state,
    assert_same_optim_state,
    full_state,
    optim_kind,
    state_by_names,
)

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy
from fullshard.state.optim.methods import optim_state_template
from fullshard.testing import device, ranks, run_on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")


def trained(*shape: int, **options: Any) -> tuple[FSDP, torch.optim.Optimizer]:
    """A sharded model on a mesh of this shape, and an optimizer, after two steps."""
    mesh = mesh_of(*shape)
    model = sharded(mesh, **options)
    optimizer = adam(model)
    train(model, optimizer, steps=2, rank=mesh["dp"].get_local_rank())
    return model, optimizer


def bare_state(world_size: int) -> dict[str, Any]:
    """The state of the bare model's optimizer, by names, after the same steps."""
    bare, optimizers = make(Tokens), []

    def kept(parameters: Any) -> torch.optim.Optimizer:
        optimizers.append(adam(bare))
        return optimizers[0]

    train_alone(bare, kept, steps=2, world_size=world_size, rank=0)
    return state_by_names(bare, optimizers[0])


@ranks(4)
def test_optimizer_state_is_the_bare_models_and_any_type_brings_it_back() -> None:
    expected = bare_state(2)
    for strategy, use_orig_params in [*MODES, (ShardingStrategy.NO_SHARD, False)]:
        model, optimizer = trained(2, 2, strategy=strategy, use_orig_params=use_orig_params)
        found = full_state(model, optimizer)
        assert_close_optim_state(found, expected)
        for name in OPTIM_KINDS:
            with optim_kind(model, name):
                saved = FSDP.optim_state_dict(model, optimizer)
                loaded = adam(model)
                loaded.load_state_dict(FSDP.optim_state_dict_to_load(model, loaded, saved))
            assert_same_optim_state(full_state(model, loaded), found)


@ranks(4)
def test_ranks_whose_part_is_empty_take_part() -> None:
    for shape, use_orig_params in itertools.product([(2, 2), (1, 4)], [True, False]):
        bare, model = uneven(), uneven(shape, use_orig_params=use_orig_params)
        optimizer, expected = adam(model), adam(bare)
        for each, own in ((bare, expected), (model, optimizer)):
            for _ in range(2):
                own.zero_grad()
                each(torch.ones((), device=device())).backward()
                own.step()
        found = full_state(model, optimizer)
        assert_close_optim_state(found, state_by_names(bare, expected))
        for name in ("full on the first rank", "dtensor"):
            with optim_kind(model, name):
                saved = FSDP.optim_state_dict(model, optimizer)
                loaded = adam(model)
                loaded.load_state_dict(FSDP.optim_state_dict_to_load(model, loaded, saved))
            assert_same_optim_state(full_state(model, loaded), found)


def save(path: Path, *shape: int) -> None:
    model, optimizer = trained(*shape)
    with optim_kind(model, "dtensor"):
        state = {"optim": FSDP.optim_state_dict(model, optimizer)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path))


def load(path: Path, *shape: int) -> None:
    model = sharded(mesh_of(*shape))
    optimizer = adam(model)
    reader = dcp.FileSystemReader(path)
    with optim_kind(model, "dtensor"):
        state = {"optim": optim_state_template(model, optimizer, reader.read_metadata())}
        dcp.load(state, storage_reader=reader)
        FSDP.optim_state_dict_to_load(model, optimizer, state["optim"], load_directly=True)
    assert_close_optim_state(full_state(model, optimizer), bare_state(2))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_checkpoint_of_optimizer_state_is_loaded_by_other_numbers_of_parts_and_shards(
    tmp_path: Path,
) -> None:
    run_on_ranks(4, save, tmp_path, 2, 2)
    run_on_ranks(4, load, tmp_path, 2, 2)
    run_on_ranks(4, load, tmp_path, 4, 1)
    run_on_ranks(2, load, tmp_path, 2, 1)
    run_on_ranks(2, load, tmp_path, 1, 2)
