"""``export_safetensors``: files that other tools read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.original.training import build
from tests.state.models import Odd, wrapped
from tests.state.test_checkpoints import shared_folder

import fullshard
from fullshard import ShardingStrategy
from fullshard.testing import ranks

safetensors = pytest.importorskip("safetensors.torch")
FULL_SHARD = ShardingStrategy.FULL_SHARD


@ranks(2)
def test_the_file_holds_the_bare_models_state(tmp_path: Path) -> None:
    folder, bare = shared_folder(tmp_path), build(Odd)
    model = wrapped(bare, FULL_SHARD, "blocks", use_orig_params=True)

    files = fullshard.export_safetensors(folder, model)
    named = fullshard.export_safetensors(folder / "deep" / "net.safetensors", model)

    assert (files, named) == (
        [folder / "model.safetensors"],
        [folder / "deep" / "net.safetensors"],
    )
    for file in (*files, *named):
        state = safetensors.load_file(file)
        assert state.keys() == bare.state_dict().keys()
        assert bare.load_state_dict(state)
        for name, value in bare.state_dict().items():
            assert torch.equal(state[name], value.cpu()), name


@ranks(2)
def test_a_large_model_becomes_several_files_with_an_index(tmp_path: Path) -> None:
    folder, bare = shared_folder(tmp_path), build(Odd)
    model = wrapped(bare, FULL_SHARD, "one unit", use_orig_params=True)

    files = fullshard.export_safetensors(folder, model, file_bytes=500)

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(files) > 2
    assert sorted(set(index["weight_map"].values())) == [file.name for file in files]
    state = {
        name: safetensors.load_file(folder / f)[name] for name, f in index["weight_map"].items()
    }
    assert state.keys() == bare.state_dict().keys()
    assert all(torch.equal(state[n], v.cpu()) for n, v in bare.state_dict().items())
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in state.values())
    dist.barrier()
    assert not list(folder.glob(".*"))


@ranks(2)
def test_an_export_takes_the_place_of_the_one_before_it(tmp_path: Path) -> None:
    folder = shared_folder(tmp_path)
    model = wrapped(build(Odd), FULL_SHARD, "one unit", use_orig_params=True)
    if dist.get_rank() == 0:
        (folder / "model-card.md").touch()

    for file_bytes in (10**6, 500, 1000, 10**6):
        files = fullshard.export_safetensors(folder, model, file_bytes=file_bytes)
        index = {"model.safetensors.index.json"} if len(files) > 1 else set()
        found = {entry.name for entry in folder.iterdir()}
        assert found == {file.name for file in files} | index | {"model-card.md"}
        dist.barrier()


def test_a_tensor_that_is_conjugated_lazily_is_exported_as_it_is_seen(tmp_path: Path) -> None:
    model = torch.nn.Module()
    model.register_buffer("phase", torch.tensor([1 + 2j]).conj())

    (file,) = fullshard.export_safetensors(tmp_path, model)

    assert safetensors.load_file(file)["phase"].tolist() == [1 - 2j]
