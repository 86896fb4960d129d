"""Whatever is in the files of a checkpoint, it is read rightly or refused with CheckpointError.

FULLSHARD_LONG=1 draws thousands of cases.
"""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.original.training import Net, build
from tests.state.damage import (
    IMPOSTORS,
    in_time,
    read_body,
    save_on_rank,
    values_of,
    write_body,
)
from tests.state.models import LONG, wrapped
from tests.state.optimizers import adam

import fullshard
from fullshard import CheckpointError, ShardingStrategy
from fullshard.testing import device, run_on_ranks

pytestmark = pytest.mark.skipif(device().type != "cpu", reason="files are the same everywhere")
NEWEST, OLDER = "step-00000002", "step-00000001"
FILES = (
    "checkpoints.json",
    f"{NEWEST}/manifest.json",
    f"{NEWEST}/rank-00000.bin",
    f"{NEWEST}/rank-00001.bin",
)
SEALED = FILES[:2]
CASES = settings(max_examples=2000 if LONG else 50)
#: For cases on ranks, which take tenths of a second.
FEW_CASES = settings(max_examples=2000 if LONG else 10)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints, as two ranks saved them."""
    folder = tmp_path_factory.mktemp("checkpoints")
    run_on_ranks(2, save_on_rank, folder, (1, 2))
    return folder


def read_all(folder: Path) -> Iterator[tuple[fullshard.Checkpoint, set[float] | None]]:
    """What each way to read finds, with all values of the parameters that it loads."""
    model = build(Net)
    optimizer = adam(model)
    readers: list[Callable[[], Any]] = [
        lambda: fullshard.latest(folder),
        lambda: fullshard.latest(folder / NEWEST),
        lambda: fullshard.load(folder, model, optimizer),
        lambda: fullshard.load(folder / NEWEST, model),
        lambda: fullshard.resume(folder, model, optimizer),
    ]
    for place, reader in enumerate(readers):
        with warnings.catch_warnings(), in_time():
            warnings.simplefilter("ignore")
            try:
                found = reader()
            except CheckpointError as refused:
                assert str(folder) in str(refused)
                continue
        assert found is not None
        assert (type(found.step), type(found.extra)) == (int, dict)
        yield found, values_of(model) if place > 1 else None


@st.composite
def changed(draw: st.DrawFn, document: Any) -> Any:
    """A JSON document with other values, here and there."""
    document = [copy.deepcopy(document)]
    for _ in range(draw(st.integers(1, 3))):
        places = list(places_in(document))
        container, key = draw(st.sampled_from(places))
        elsewhere, other = draw(st.sampled_from(places))
        change = draw(st.sampled_from(["replace", "replace", "copy", "nest", "remove", "add"]))
        if change == "replace":
            container[key] = draw(values())
        elif change == "copy":
            container[key] = copy.deepcopy(elsewhere[other])
        elif change == "nest":
            for _ in range(draw(st.sampled_from([1, 2, 99, 150, 400]))):
                container[key] = draw(st.sampled_from([[container[key]], {"a": container[key]}]))
        elif change == "add":
            if isinstance(container, dict):
                container[draw(names())] = draw(values())
            else:
                container.append(draw(values()))
        elif container is not document:
            del container[key]
    return document[0]


def places_in(document: Any) -> Iterator[tuple[Any, Any]]:
    left = [document]
    while left:
        container = left.pop()
        keys = container if isinstance(container, dict) else range(len(container))
        for key in keys:
            yield container, key
            if isinstance(container[key], (dict, list)):
                left.append(container[key])


def names() -> st.SearchStrategy[str]:
    kinds = ["tensor", "tuple", "dict", "float", "complex", "bytes", "dtype", "new"]
    known = ["model", "extra", "state", "step", "shape", "float16", "qint8", "int1", "bool", "load"]
    return st.sampled_from([f"${kind}" for kind in kinds] + known) | st.text(max_size=3)


def values() -> st.SearchStrategy[Any]:
    numbers = st.sampled_from([0, 1, -1, 2, 7, 2**31, 2**62, 2**63, 2**64, 10**12, 10**30])
    leaves = st.none() | st.booleans() | numbers | st.integers() | st.floats() | names()
    files = st.sampled_from(
        ["../x", "/dev/zero", "manifest.json", "rank-00001.bin", "\x00", "\ud800"]
    )
    inside = leaves | files
    return st.recursive(
        inside,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names(), inner, max_size=2),
        max_leaves=5,
    )


@CASES
@given(st.data())
def test_sealed_files_with_other_values_are_read_or_refused(
    saved: Path, data: st.DataObject
) -> None:
    file = data.draw(st.sampled_from(SEALED))
    body = data.draw(changed(read_body(saved / file)))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(shutil.copytree(saved, Path(temporary) / "copy"))
        write_body(folder / file, body)

        for found, _ in read_all(folder):
            named = found.path.name.removeprefix("step-")
            assert found.step == int(named.partition(".")[0])


def resume_on_rank(folder: Path) -> tuple[int | None, set[float]]:
    """The step that was loaded, or None for a refusal, and the values of the parameters."""
    model = wrapped(build(Net), ShardingStrategy.FULL_SHARD, "blocks", use_orig_params=True)
    with warnings.catch_warnings(), in_time():
        warnings.simplefilter("ignore")
        try:
            found = fullshard.resume(folder, model, adam(model))
        except CheckpointError as refused:
            assert str(folder) in str(refused)
            return None, set()
    assert found is not None
    return found.step, values_of(model)


@FEW_CASES
@given(st.data())
def test_ranks_agree_on_what_to_do_with_content_that_is_another(
    saved: Path, data: st.DataObject
) -> None:
    body = read_body(saved / NEWEST / "manifest.json")
    content = data.draw(changed(body["content"]))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(shutil.copytree(saved, Path(temporary) / "copy"))
        write_body(folder / NEWEST / "manifest.json", {**body, "content": content})

        (first, its_values), (second, _) = run_on_ranks(2, resume_on_rank, folder)

    assert first == second
    assert first != 1 or its_values == {1.0}


@CASES
@given(st.data())
def test_files_with_other_bytes_are_refused_and_never_read_as_others(
    saved: Path, data: st.DataObject
) -> None:
    file = data.draw(st.sampled_from(FILES))
    good = (saved / file).read_bytes()
    start = data.draw(st.integers(0, len(good)))
    length = data.draw(st.integers(0, len(good) - start))
    other = data.draw(st.binary(max_size=64) | st.just(b"\0" * length))
    cut = data.draw(st.sampled_from([b"", good[start + length :]]))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(shutil.copytree(saved, Path(temporary) / "copy"))
        (folder / file).write_bytes(good[:start] + other + cut)

        for found, loaded in read_all(folder):
            assert found.extra["step"] == found.step
            assert loaded in (None, {float(found.step)})


@pytest.mark.parametrize("impostor", IMPOSTORS)
@pytest.mark.parametrize("file", FILES)
def test_what_is_no_regular_file_is_refused_at_once(
    saved: Path, tmp_path: Path, file: str, impostor: str
) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "copy"))
    os.remove(folder / file)
    IMPOSTORS[impostor](folder / file)

    found = [(found.step, loaded) for found, loaded in read_all(folder)]

    if file != "checkpoints.json":
        assert found == [(1, None), (1, {1.0})]
    elif impostor == "nothing":
        # Nothing says that there was an index: the highest step is the newest.
        assert len(found) == 5
    else:
        # Each checkpoint by its own path.
        assert found == [(2, None), (2, {2.0})]
