"""Programs that are written for torch's fully_shard train on fullshard's, unchanged."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.compat.fully_shard_side_by_side import (
    CLIENTS,
    PROGRAMS,
    TOLERANCE,
    difference,
    outcome,
)
from tests.compat.installed import installed
from tests.marks import in_long_runs

import fullshard
from fullshard.testing import ranks


def example(name: str) -> Any:
    sys.path.insert(0, str(CLIENTS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(CLIENTS))


@pytest.mark.filterwarnings("ignore")
@ranks(4)
def test_a_loop_in_torchtitans_manner_trains_as_the_bare_model() -> None:
    with installed():
        program = example("fully_shard_train")
        assert program.fully_shard is fullshard.fully_shard
        for tensor_parallel in (1, 2):
            losses = program.train(tensor_parallel)
            bare = program.train_bare(dist.get_world_size() // tensor_parallel)
            torch.testing.assert_close(losses, bare, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "program", [pytest.param(p, marks=() if "accelerate" in p else in_long_runs) for p in PROGRAMS]
)
def test_the_command_runs_programs_for_torchs_fully_shard(program: str) -> None:
    """Each compares its losses with those of the bare model, or with those before it went on."""
    if program != "fully_shard_train":
        pytest.importorskip("accelerate", reason="install the extra 'clients'")

    found = outcome(program, "fullshard")

    assert found.losses, found.error


@in_long_runs
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_lose_what_they_lose_on_torchs_own(program: str) -> None:
    if program != "fully_shard_train":
        pytest.importorskip("accelerate", reason="install the extra 'clients'")

    theirs, ours = outcome(program, "torch"), outcome(program, "fullshard")

    assert difference(theirs, ours) < TOLERANCE, (theirs, ours)
