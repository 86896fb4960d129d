"""A folder of checkpoints: their names, which is the newest, and which may go.

Note: whole or not at all
    A checkpoint is written into a folder whose name begins with ``.partial-``, its manifest last,
    and moved to its final name when it is complete; then an index, which lists checkpoints in the
    order in which they were saved, is replaced by a new one. Both moves are atomic. Whenever a
    process dies, the last checkpoint in the index is whole; what it left behind is removed by the
    next save.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from .errors import CheckpointError
from .manifest import MANIFEST
from .sealed import read_sealed, write_sealed

INDEX = "checkpoints.json"
PARTIAL = ".partial-"
_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")


def begin(folder: Path, step: int) -> Path:
    """Make a place to write a checkpoint into, after removing what died before it was whole."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Before anything is written: a damaged index would be found only at the end.
        _listed(folder)
        for left in folder.glob(f"{PARTIAL}*"):
            shutil.rmtree(left, ignore_errors=True)
        partial = folder / f"{PARTIAL}{_free_name(folder, step)}"
        partial.mkdir()
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint of step {step} in {folder} could not be written. "
            f"{type(error).__name__}: {error}"
        ) from error
    return partial


def final_place(partial: Path) -> Path:
    """Where a checkpoint will be when it is complete."""
    return partial.with_name(partial.name.removeprefix(PARTIAL))


def commit(partial: Path, keep_last: int | None) -> Path:
    """Move a complete checkpoint in place, make it the newest, and remove those not to be kept."""
    folder = partial.parent
    final = final_place(partial)
    _sync_folder(partial)
    os.rename(partial, final)
    _sync_folder(folder)
    others = [name for name in _names(folder) if name != final.name]
    replaced = [name for name in others if _order(name)[0] == _order(final.name)[0]]
    kept = [name for name in others if name not in replaced] + [final.name]
    if keep_last:
        kept = kept[-keep_last:]
    _write_index(folder, kept)
    for name in others:
        if name not in kept:
            _remove(folder / name)
    return final


def discard(partial: Path) -> None:
    """Remove a checkpoint that will not become whole."""
    shutil.rmtree(partial, ignore_errors=True)


def find(path: Path) -> Path | None:
    """The checkpoint that ``path`` is, or the newest in the folder that it is."""
    if (path / MANIFEST).is_file():
        return path
    names = _names(path)
    _check_listed(path, names)
    return path / names[-1] if names else None


def _check_listed(folder: Path, names: list[str]) -> None:
    """Raise CheckpointError if the newest checkpoint lost its manifest, or all are gone.

    The newest alone may be gone wholly.
    """
    listed = _listed(folder) if folder.is_dir() else []
    there = [name for name in listed if _NAME.fullmatch(name) and (folder / name).is_dir()]
    if there and not (folder / there[-1] / MANIFEST).is_file():
        raise CheckpointError(
            f"{folder / there[-1] / MANIFEST} is missing: the checkpoint is damaged. Remove its "
            "folder to load the one before it",
            advises=True,
        )
    if listed and not names:
        raise CheckpointError(
            f"{folder / INDEX} lists {', '.join(listed)}, but no checkpoint is there. Bring them "
            "back, or remove the index as well to begin without one",
            advises=True,
        )


def _names(folder: Path) -> list[str]:
    """Whole checkpoints, the newest last; those that the index does not know come first."""
    if not folder.is_dir():
        return []
    there = {
        entry.name
        for entry in folder.iterdir()
        if _NAME.fullmatch(entry.name) and (entry / MANIFEST).is_file()
    }
    listed = [name for name in _listed(folder) if name in there]
    return sorted(there.difference(listed), key=_order) + listed


def _listed(folder: Path) -> list[str]:
    try:
        names: list[str] = read_sealed(folder / INDEX)
    except FileNotFoundError:
        return []
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. Load a checkpoint by the path of its own folder, or remove the index: "
            "without it the checkpoint with the highest step is the newest",
            advises=True,
        ) from None
    return names


def _write_index(folder: Path, names: list[str]) -> None:
    beside = folder / f".{INDEX}.new"
    write_sealed(beside, names)
    os.replace(beside, folder / INDEX)
    _sync_folder(folder)


def _remove(checkpoint: Path) -> None:
    """Take a checkpoint away: first its name, so that no half of it is ever found."""
    doomed = checkpoint.with_name(f"{PARTIAL}old-{checkpoint.name}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(checkpoint, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _free_name(folder: Path, step: int) -> str:
    name = plain = f"step-{step:08d}"
    number = 1
    while (folder / name).exists():
        name = f"{plain}.{number}"
        number += 1
    return name


def _order(name: str) -> tuple[int, int]:
    found = _NAME.fullmatch(name)
    assert found is not None
    return int(found[1]), int(found[2] or 0)


def _sync_folder(folder: Path) -> None:
    """See the folder's entries on the disk, where the system can do that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
