"""Saving into a folder in which something stands in the way, and reading links and odd folders."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.original.training import Net, build
from tests.state.damage import IMPOSTORS, fill, in_time, read_body, values_of, write_body
from tests.state.models import wrapped
from tests.state.optimizers import adam, trained
from tests.state.test_checkpoints import shared_folder
from torch import nn

import fullshard
from fullshard import CheckpointError, ShardingStrategy
from fullshard.testing import ranks

INDEX = "checkpoints.json"


def saved_alone(folder: Path, *steps: int, keep_last: int | None = None) -> nn.Module:
    """Checkpoints by one process; every number tells the step."""
    model = nn.Linear(3, 2)
    for step in steps:
        fill(model, step)
        fullshard.save(folder, model, step=step, keep_last=keep_last)
    return model


def names_in(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()} - {INDEX}


@pytest.mark.parametrize("make", IMPOSTORS.values(), ids=IMPOSTORS)
@pytest.mark.parametrize(
    "place", [f".{INDEX}.new", ".partial-step-00000002", ".partial-old-step-00000001", ".partial-x"]
)
def test_what_stands_in_the_place_of_a_temporary_file_is_removed(
    tmp_path: Path, place: str, make: Callable[[Path], None]
) -> None:
    saved_alone(tmp_path, 1)
    make(tmp_path / place)
    with in_time():
        saved_alone(tmp_path, 2, keep_last=1)
    assert names_in(tmp_path) == {"step-00000002"}
    found = fullshard.latest(tmp_path)
    assert found is not None
    assert found.step == 2


@pytest.mark.parametrize("place", [f".{INDEX}.new", ".partial-step-00000002"])
def test_a_save_leaves_alone_what_a_link_in_its_way_leads_to(tmp_path: Path, place: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("as it was")
    target = elsewhere / "precious" if "json" in place else elsewhere
    folder = tmp_path / "checkpoints"
    saved_alone(folder, 1)
    (folder / place).symlink_to(target)
    saved_alone(folder, 2)
    assert (elsewhere / "precious").read_text() == "as it was"


def test_files_that_are_links_to_regular_files_are_read(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    model = saved_alone(folder, 1)
    elsewhere.mkdir()
    for number, file in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        shutil.move(file, elsewhere / str(number))
        file.symlink_to(elsewhere / str(number))
    fill(model, 9)
    assert fullshard.load(folder, model).step == 1
    assert values_of(model) == {1.0}


def test_an_index_that_is_a_link_to_nowhere_is_not_taken_for_none(tmp_path: Path) -> None:
    saved_alone(tmp_path, 2, 1)
    (tmp_path / INDEX).unlink()
    (tmp_path / INDEX).symlink_to("/nowhere/at/all")
    with pytest.raises(CheckpointError, match="a symbolic link to /nowhere/at/all"):
        fullshard.latest(tmp_path)


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path: Path) -> None:
    saved_alone(tmp_path, 1, 2, 3)
    os.truncate(tmp_path / "step-00000003" / "rank-00000.bin", 1)
    saved_alone(tmp_path, 4, keep_last=2)
    assert names_in(tmp_path) == {"step-00000002", "step-00000003", "step-00000004"}
    assert read_body(tmp_path / INDEX) == ["step-00000002", "step-00000004"]


def test_a_save_succeeds_where_an_old_checkpoint_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_alone(tmp_path, 1)
    rename = os.rename

    def refuse_old(source: Path, target: Path) -> None:
        # As in a folder with the sticky bit, where another user saved it.
        if source.name == "step-00000001":
            raise PermissionError(1, "Operation not permitted")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse_old)
    with pytest.warns(UserWarning, match="step-00000001 is no longer needed, but cannot be"):
        saved_alone(tmp_path, 2, keep_last=1)
    assert read_body(tmp_path / INDEX) == ["step-00000002"]


def test_a_path_that_the_system_refuses_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / ("x" * 300), Path("y" * 5000)):
        with pytest.raises(CheckpointError, match=r"cannot be read.*name too long"):
            fullshard.latest(path)


def test_an_empty_part_does_not_hide_the_one_that_begins_where_it_does(tmp_path: Path) -> None:
    model = saved_alone(tmp_path, 1)
    manifest = tmp_path / "step-00000001" / "manifest.json"
    body = read_body(manifest)
    body["tensors"]["/model/weight"]["chunks"].append([[0, 0], [0, 3], "rank-00000.bin", 0, 0, 0])
    write_body(manifest, body)
    fill(model, 9)
    fullshard.load(tmp_path, model)
    assert values_of(model) == {1.0}


def test_many_parts_in_one_row_are_compared_in_time(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    count = 50_000
    extra = {"row": torch.zeros(1, count, dtype=torch.int8)}
    fullshard.save(tmp_path, model, step=1, extra=extra)
    manifest = tmp_path / "step-00000001" / "manifest.json"
    body = read_body(manifest)
    (whole,) = body["tensors"]["/extra/row"]["chunks"]
    checksum_of_a_zero_byte = 0xD202EF8D
    body["tensors"]["/extra/row"]["chunks"] = [
        [[0, at], [1, 1], whole[2], whole[3] + at, 1, checksum_of_a_zero_byte]
        for at in range(count)
    ]
    write_body(manifest, json.loads(json.dumps(body)))
    with in_time():
        assert fullshard.latest(tmp_path) is not None


def test_memory_that_cannot_be_had_is_told_with_the_checkpoint(tmp_path: Path) -> None:
    fullshard.save(tmp_path, nn.Linear(1, 1), step=1, extra={"huge": torch.zeros(8)})
    checkpoint = tmp_path / "step-00000001"
    body = read_body(checkpoint / "manifest.json")
    size = 2**42
    body["tensors"]["/extra/huge"] = {
        "dtype": "int8",
        "shape": [size],
        "chunks": [[[0], [size], "rank-00001.bin", 0, size, 0]],
    }
    write_body(checkpoint / "manifest.json", body)
    with open(checkpoint / "rank-00001.bin", "wb") as file:
        file.truncate(size)
    with pytest.raises(CheckpointError, match=f"{checkpoint} cannot be loaded: /extra/huge"):
        fullshard.latest(tmp_path)


@ranks(2)
def test_an_optimizer_that_lacks_parameters_on_one_rank_is_refused_on_all(tmp_path: Path) -> None:
    folder = shared_folder(tmp_path)
    model = wrapped(build(Net), ShardingStrategy.FULL_SHARD, "blocks", use_orig_params=True)
    optimizer = adam(model)
    trained(model, optimizer, range(1))
    fullshard.save(folder, model, optimizer, step=1)
    fill(model, 9)
    first, *others = model.parameters()
    lacking = torch.optim.Adam(others if dist.get_rank() == 1 else [first, *others])

    with in_time(), pytest.raises(CheckpointError, match="step-00000001 does not fit"):
        fullshard.load(folder, model, lacking)

    assert values_of(model) == {9.0}
