"""Programs that are written for torch's fully_shard train on fullshard's, unchanged."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.compat.installed import installed

import fullshard
from fullshard.testing import ranks

CLIENTS = Path(__file__).resolve().parents[2] / "examples" / "clients"


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


@pytest.mark.parametrize("name", ["fully_shard_train", "accelerate_fully_shard"])
def test_the_command_runs_programs_for_torchs_fully_shard(name: str) -> None:
    if name.startswith("accelerate"):
        pytest.importorskip("accelerate", reason="install the extra 'clients'")
    command = [sys.executable, "-m", "fullshard", "run", "--ranks", "2"]

    found = subprocess.run(
        [*command, str(CLIENTS / f"{name}.py")], capture_output=True, text=True, check=False
    )

    assert found.returncode == 0, found.stderr
    assert "as the bare model's" in found.stdout
