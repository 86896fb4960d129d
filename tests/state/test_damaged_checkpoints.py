"""A damaged checkpoint is refused with its file; an older one that is whole takes its place."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.original.training import Net, build
from tests.state.damage import (
    DEEP,
    fill,
    in_time,
    read_body,
    save_on_rank,
    turn_a_bit,
    values_of,
    write_body,
    write_text,
)
from tests.state.models import wrapped
from tests.state.optimizers import adam, assert_same_optim_state, full_state, trained
from tests.state.test_checkpoints import shared_folder
from torch import nn

import fullshard
from fullshard import CheckpointError, ShardingStrategy
from fullshard.testing import ranks

FULL_SHARD = ShardingStrategy.FULL_SHARD


def saved_alone(folder: Path, *steps: int) -> nn.Module:
    """Checkpoints by one process; every number tells the step."""
    model = nn.Linear(3, 2)
    for step in steps:
        fill(model, step)
        fullshard.save(folder, model, step=step, extra={"noise": torch.full((4,), step)})
    return model


def names_in(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()} - {"checkpoints.json"}


def contents_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


# -- what is refused ------------------------------------------------------------------------------


def manifest_with(**parts: Any) -> Callable[[Any], Any]:
    return lambda good: {**good, **parts}


def tensor_with(**parts: Any) -> Callable[[Any], Any]:
    """A manifest in which ``/extra/noise``, four numbers of eight bytes, is something else."""

    def change(good: Any) -> Any:
        table = {**good["tensors"]["/extra/noise"], **parts}
        return {**good, "tensors": {**good["tensors"], "/extra/noise": table}}

    return change


FILE = "rank-00000.bin"
MANIFESTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a number": (lambda good: 5, "the manifest: expected a dict, but it is 5"),
    "empty content": (manifest_with(content={}), "content: expected a dict with the keys model"),
    "extra data nested deeply": (
        lambda good: {
            **good,
            "content": {**good["content"], "extra": {"a": nested(200)}},
        },
        "at most 100 levels",
    ),
    "a step that is a string": (manifest_with(step="1"), "step: expected a whole number"),
    "a step that is true": (manifest_with(step=True), "step: expected a whole number"),
    "a tensor larger than its file": (
        tensor_with(shape=[10**12], chunks=[[[0], [10**12], FILE, 99, 8 * 10**12, 0]]),
        f"{FILE} is damaged: it ends after",
    ),
    "parts that overlap": (
        tensor_with(chunks=[[[0], [3], FILE, 32, 24, 0], [[1], [1], FILE, 56, 8, 0]]),
        "chunks of /extra/noise overlap",
    ),
    "parts with the same bytes": (
        tensor_with(chunks=[[[0], [2], FILE, 32, 16, 0], [[2], [2], FILE, 32, 16, 0]]),
        "two chunks share bytes of rank-00000.bin",
    ),
    "a dtype of which nothing can be copied": (tensor_with(dtype="qint32"), "can be copied"),
    "no optimizer where one is expected": (
        lambda good: {**good, "content": {**good["content"], "optimizers": [None]}},
        "/optimizers/0: expected a dict",
    ),
}


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_sealed_manifest_that_makes_no_sense_is_refused_with_the_reason(
    tmp_path: Path, name: str
) -> None:
    model = saved_alone(tmp_path, 1)
    path = tmp_path / "step-00000001" / "manifest.json"
    change, reason = MANIFESTS[name]
    write_body(path, change(read_body(path)))

    for read in (
        lambda: fullshard.latest(tmp_path),
        lambda: fullshard.load(tmp_path, model),
        lambda: fullshard.load(path.parent, model),
        lambda: fullshard.resume(tmp_path, model),
    ):
        with in_time(), pytest.raises(CheckpointError) as refused:
            read()
        assert str(path.parent) in str(refused.value)
        assert reason in str(refused.value)
    assert values_of(model) == {1.0}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (5, "the index: expected a list, but it is 5"),
        ([5, None], "entry 0: expected the name of a checkpoint, but it is 5"),
        (["../elsewhere"], "entry 0: expected the name of a checkpoint"),
        (["step-00000001", "step-00000001"], "a name that is not listed twice"),
    ],
)
def test_a_sealed_index_that_makes_no_sense_is_refused_with_advice(
    tmp_path: Path, body: Any, reason: str
) -> None:
    model = saved_alone(tmp_path, 1)
    write_body(tmp_path / "checkpoints.json", body)

    for use in (
        lambda: fullshard.latest(tmp_path),
        lambda: fullshard.load(tmp_path, model),
        lambda: fullshard.resume(tmp_path, model),
        lambda: fullshard.save(tmp_path, model, step=2),
    ):
        with pytest.raises(CheckpointError) as refused:
            use()
        for part in (str(tmp_path / "checkpoints.json"), reason, "remove the index"):
            assert part in str(refused.value)
    assert fullshard.load(tmp_path / "step-00000001", model).step == 1


def test_files_nested_too_deeply_are_refused(tmp_path: Path) -> None:
    saved_alone(tmp_path, 1)
    for path in (tmp_path / "step-00000001" / "manifest.json", tmp_path / "checkpoints.json"):
        write_text(path, DEEP)

        with pytest.raises(CheckpointError, match=f"{path} is damaged: .* nested too deeply"):
            fullshard.latest(tmp_path)


def test_a_fifo_in_the_place_of_a_data_file_is_not_waited_for(tmp_path: Path) -> None:
    model = saved_alone(tmp_path, 1)
    data = tmp_path / "step-00000001" / FILE
    os.remove(data)
    os.mkfifo(data)

    for read in (fullshard.latest, lambda path: fullshard.load(path, model)):
        with (
            in_time(),
            pytest.raises(CheckpointError, match=f"{FILE} cannot be read: it is a FIFO"),
        ):
            read(tmp_path)


def test_of_two_folders_that_were_swapped_neither_is_taken_for_the_other(tmp_path: Path) -> None:
    model = saved_alone(tmp_path, 10, 20, 30)
    for old, new in (("20", "x"), ("30", "20"), ("x", "30")):
        os.rename(tmp_path / f"step-000000{old}", tmp_path / f"step-000000{new}")

    with pytest.warns(UserWarning, match="is that of step") as told:
        found = fullshard.latest(tmp_path)
    assert len(told) == 2
    assert found is not None
    assert (found.step, found.path) == (10, tmp_path / "step-00000010")
    assert "step-00000030/manifest.json is that of step 20" in found.skipped[0]
    with pytest.raises(CheckpointError, match="is that of step 30"):
        fullshard.load(tmp_path / "step-00000020", model)


def test_a_checkpoint_under_a_name_of_the_users_own_is_loaded(tmp_path: Path) -> None:
    model = saved_alone(tmp_path, 10)
    shutil.copytree(tmp_path / "step-00000010", tmp_path / "best")

    assert fullshard.load(tmp_path / "best", model).step == 10


def test_data_that_is_too_deep_to_be_read_back_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    fullshard.save(tmp_path, model, step=1, extra={"deep": nested(99)})
    found = fullshard.latest(tmp_path)
    assert found is not None
    assert found.extra == {"deep": nested(99)}
    endless: list[Any] = []
    endless.append(endless)

    for extra in (nested(100), endless):
        with pytest.raises(ValueError, match=r"/extra/deep/0/.* more than 100 lists and dicts"):
            fullshard.save(tmp_path, model, step=2, extra={"deep": extra})


# -- what takes its place -------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["manifest", "short", "missing", "no manifest", "extra data"])
def test_latest_passes_over_what_is_damaged_and_says_so(tmp_path: Path, damage: str) -> None:
    saved_alone(tmp_path, 1, 2)
    newest = tmp_path / "step-00000002"
    data, manifest = newest / FILE, newest / "manifest.json"
    if damage == "manifest":
        turn_a_bit(manifest)
    elif damage == "short":
        data.write_bytes(data.read_bytes()[:-1])
    elif damage == "missing":
        data.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    else:
        data.write_bytes(data.read_bytes().replace(b"\x02", b"\x03"))
    before = contents_of(newest)

    with pytest.warns(UserWarning, match=r"Skipped a damaged .* stays .*: .*step-00000002") as told:
        found = fullshard.latest(tmp_path)

    assert found is not None
    assert (found.step, found.path) == (1, tmp_path / "step-00000001")
    assert len(told) == len(found.skipped) == 1
    assert found.skipped[0] in str(told[0].message)
    assert contents_of(newest) == before


@ranks(2)
def test_resuming_goes_back_to_the_newest_that_is_whole_on_all_ranks(tmp_path: Path) -> None:
    folder = shared_folder(tmp_path)
    model = wrapped(build(Net), FULL_SHARD, "blocks", use_orig_params=True)
    optimizer = adam(model)
    states = {}
    for step in (1, 2, 3):
        trained(model, optimizer, range(step))
        fill(model, step)
        states[step] = full_state(model, optimizer)
        fullshard.save(folder, model, optimizer, step=step, extra={"step": step})
    dist.barrier()
    if dist.get_rank() == 0:
        # The newest shows its damage when it is read, by one rank alone; the next one at once.
        turn_a_bit(folder / "step-00000003" / "rank-00001.bin")
        turn_a_bit(folder / "step-00000002" / "manifest.json")
    dist.barrier()
    fill(model, 7)
    before = contents_of(folder / "step-00000003")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loaded = adam(model)

        found = fullshard.resume(folder, model, loaded)

    assert found is not None
    assert (found.step, found.extra, found.path) == (1, {"step": 1}, folder / "step-00000001")
    assert values_of(model) == {1.0}
    assert_same_optim_state(full_state(model, loaded), states[1])
    assert [reason.partition(" ")[0].removeprefix(f"{folder}/") for reason in found.skipped] == [
        "step-00000003/rank-00001.bin",
        "step-00000002/manifest.json",
    ]
    warned = [str(w.message) for w in told if "Skipped a damaged" in str(w.message)]
    assert len(warned) == (2 if dist.get_rank() == 0 else 0)
    dist.barrier()
    after = contents_of(folder / "step-00000003")
    assert found.skipped[0] in after.pop("damaged.txt").decode()
    assert after == before


@ranks(2)
def test_damage_that_one_rank_alone_sees_sends_all_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shared_folder(tmp_path)
    own = folder / f"rank-{dist.get_rank()}"
    save_on_rank(folder / "run", (1, 2))
    dist.barrier()
    shutil.copytree(folder / "run", own / "run")
    if dist.get_rank() == 1:
        for data in (own / "run" / "step-00000002").glob("*.bin"):
            turn_a_bit(data)
    monkeypatch.chdir(own)
    model = wrapped(build(Net), FULL_SHARD, "blocks", use_orig_params=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = fullshard.resume("run", model, adam(model))

    assert found is not None
    assert found.step == 1
    assert values_of(model) == {1.0}


@ranks(2)
def test_where_none_is_whole_each_is_named_and_the_model_stays_as_it_was(tmp_path: Path) -> None:
    folder = shared_folder(tmp_path)
    save_on_rank(folder, (1, 2, 3))
    dist.barrier()
    if dist.get_rank() == 0:
        turn_a_bit(folder / "step-00000001" / "manifest.json")
        os.remove(folder / "step-00000002" / "manifest.json")
        turn_a_bit(folder / "step-00000003" / "rank-00000.bin")
    dist.barrier()
    model = wrapped(build(Net), FULL_SHARD, "blocks", use_orig_params=True)
    fill(model, 7)

    with pytest.raises(CheckpointError) as refused:
        fullshard.resume(folder, model, adam(model))

    reasons = (
        f"No checkpoint in {folder} is whole",
        "step-00000003/rank-00000.bin is damaged",
        "step-00000002/manifest.json is missing",
        "step-00000001/manifest.json is damaged",
    )
    for reason in reasons:
        assert reason in str(refused.value)
    assert values_of(model) == {7.0}
    # Nothing was loaded: the disk may have failed for a moment, and nothing is held against them.
    assert not list(folder.glob("*/damaged.txt"))


def test_where_there_was_never_one_there_is_nothing_to_resume(tmp_path: Path) -> None:
    assert fullshard.resume(tmp_path, nn.Linear(1, 1)) is None
    assert fullshard.resume(tmp_path / "nowhere", nn.Linear(1, 1)) is None


def test_a_checkpoint_of_another_model_is_no_reason_to_take_an_older_one(tmp_path: Path) -> None:
    saved_alone(tmp_path, 1)
    fullshard.save(tmp_path, nn.Linear(5, 2), step=2)

    with pytest.raises(CheckpointError, match="step-00000002 is a checkpoint of another model"):
        fullshard.resume(tmp_path, nn.Linear(3, 2))


def test_load_takes_no_older_one_and_says_what_does(tmp_path: Path) -> None:
    model = saved_alone(tmp_path, 1, 2)
    (tmp_path / "step-00000002" / FILE).unlink()

    with pytest.raises(CheckpointError, match=f"{FILE} is missing.* fullshard.resume goes on"):
        fullshard.load(tmp_path, model)


# -- what is saved afterwards ---------------------------------------------------------------------


@ranks(2)
def test_a_step_saved_again_leaves_its_damaged_checkpoint_there(tmp_path: Path) -> None:
    folder = shared_folder(tmp_path)
    model = wrapped(build(Net), FULL_SHARD, "blocks", use_orig_params=True)
    for step in (10, 20):
        fill(model, step)
        fullshard.save(folder, model, step=step, keep_last=2)
    dist.barrier()
    if dist.get_rank() == 0:
        turn_a_bit(folder / "step-00000020" / "rank-00001.bin")
    dist.barrier()
    damaged = contents_of(folder / "step-00000020")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = fullshard.resume(folder, model)
    assert found is not None
    assert found.step == 10

    # A step between, so that whoever goes on next does not know of the damage.
    for step in (15, 20, 30, 40):
        fill(model, step)
        path = fullshard.save(folder, model, step=step, keep_last=2).wait()
        assert fullshard.load(folder, model).path == path
        assert values_of(model) == {float(step)}
        dist.barrier()
        after = contents_of(folder / "step-00000020")
        after.pop("damaged.txt")
        assert after == damaged

    assert names_in(folder) == {"step-00000020", "step-00000030", "step-00000040"}


def test_a_save_removes_none_that_looks_damaged(tmp_path: Path) -> None:
    model = saved_alone(tmp_path, 1, 2, 3, 4)
    turn_a_bit(tmp_path / "step-00000001" / "manifest.json")
    os.remove(tmp_path / "step-00000002" / FILE)
    os.remove(tmp_path / "step-00000003" / "manifest.json")

    fullshard.save(tmp_path, model, step=2, keep_last=1)

    whole = {"step-00000002.1"}
    assert names_in(tmp_path) == {"step-00000001", "step-00000002", "step-00000003", *whole}
    found = fullshard.latest(tmp_path)
    assert found is not None
    assert (found.path.name, found.skipped) == ("step-00000002.1", ())


def test_a_checkpoint_that_turns_out_to_be_whole_is_like_any_other_again(tmp_path: Path) -> None:
    model = saved_alone(tmp_path, 1, 2)
    data = tmp_path / "step-00000002" / FILE
    good = data.read_bytes()
    turn_a_bit(data)
    with pytest.warns(UserWarning, match="Skipped"):
        fullshard.resume(tmp_path, model)
    data.write_bytes(good)

    found = fullshard.resume(tmp_path, model)

    assert found is not None
    assert (found.step, found.skipped) == (2, ())
    fullshard.save(tmp_path, model, step=3, keep_last=1)
    assert names_in(tmp_path) == {"step-00000003"}
