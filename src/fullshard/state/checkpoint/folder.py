"""A folder of checkpoints: finds the newest, makes room for the next, and removes old ones.

Note: whole or not at all
    A checkpoint is written into a folder whose name begins with ``.partial-``, with the manifest
    last, and renamed when it is complete. Then a new index, which lists checkpoints in the order in
    which they were saved, replaces the old one. Both renames are atomic. Whenever a process dies,
    the last checkpoint in the index is whole. The next save removes what the process left behind.

Note: damaged checkpoints are kept
    A checkpoint may be damaged after it was saved, by a disk or by hand. It is kept for somebody to
    look at: a save removes no checkpoint that looks damaged, and none with a damage note. The note
    is left by ``resume`` when it finds damage in the tensors. It does not prevent another attempt
    to load the checkpoint, because the disk may have failed only for a moment.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from pathlib import Path

from .checksummed import read_checksummed, write_checksummed
from .errors import CheckpointError
from .inspection import looks_whole
from .names import (
    DAMAGE_NOTE,
    INDEX,
    MANIFEST,
    PARTIAL,
    checkpoint_name,
    is_data_name,
    step_and_turn,
)
from .schema import Malformed, index_from

# -- saving ---------------------------------------------------------------------------------------


def begin(folder: Path, step: int) -> Path:
    """Make a folder to write a checkpoint into, and remove those of saves that did not complete."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Read now, because a damaged index would otherwise be found only at the end of the save.
        _listed(folder)
        for left in folder.glob(f"{PARTIAL}*"):
            _clear(left)
        partial = folder / f"{PARTIAL}{_free_name(folder, step)}"
        partial.mkdir()
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint of step {step} in {folder} could not be written. "
            f"{type(error).__name__}: {error}"
        ) from error
    return partial


def final_place(partial: Path) -> Path:
    """The folder of a checkpoint when it is complete."""
    return partial.with_name(partial.name.removeprefix(PARTIAL))


def commit(partial: Path, keep_last: int | None) -> Path:
    """Rename a complete checkpoint, make it the newest, and remove those not to be kept.

    See the note on damaged checkpoints.
    """
    folder = partial.parent
    final = final_place(partial)
    _sync_folder(partial)
    os.rename(partial, final)
    _sync_folder(folder)
    others = [
        name
        for name in _names(folder, _listed(folder))
        if name != final.name and _may_be_whole(folder / name)
    ]
    kept = [name for name in others if _order(name)[0] != _order(final.name)[0]]
    if keep_last:
        kept = _last_whole(folder, kept, keep_last - 1)
    _write_index(folder, [*kept, final.name])
    for name in others:
        if name not in kept and looks_whole(folder / name):
            _remove(folder / name)
    return final


def _last_whole(folder: Path, names: list[str], count: int) -> list[str]:
    """The last ``count`` checkpoints that look whole; damaged ones are not counted."""
    found: list[str] = []
    for name in reversed(names):
        if len(found) == count:
            break
        if looks_whole(folder / name):
            found.append(name)
    return found[::-1]


def discard(partial: Path) -> None:
    """Remove a checkpoint whose save has failed."""
    shutil.rmtree(partial, ignore_errors=True)


# -- loading --------------------------------------------------------------------------------------


def candidates(path: Path) -> list[Path]:
    """The checkpoint at ``path``, or all checkpoints in the folder ``path``, the newest first.

    Any of them may be damaged. Raises CheckpointError if the index lists checkpoints and all of
    them are missing. If some are missing, somebody has removed them, which is no error.
    """
    try:
        if _is_checkpoint(path):
            return [path]
        if not path.is_dir():
            return []
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    listed = _listed(path)
    names = _names(path, listed)
    if listed and not names:
        raise CheckpointError(
            f"{path / INDEX} lists {', '.join(listed)}, but no checkpoint is there. Restore them, "
            "or remove the index, too, to start without a checkpoint",
            advises=True,
        )
    return [path / name for name in reversed(names)]


def note_damage(checkpoint: Path, reason: str) -> None:
    """Leave a note in a damaged checkpoint, which keeps later saves from removing it."""
    text = (
        f"This checkpoint was skipped when a run was resumed: {reason}\n"
        "It is kept until somebody removes its folder.\n"
    )
    # Not if there is anything of that name already.
    with contextlib.suppress(OSError), open(checkpoint / DAMAGE_NOTE, "x") as note:
        note.write(text)


def remove_note(checkpoint: Path) -> None:
    """Remove the damage note of a checkpoint that was loaded."""
    with contextlib.suppress(OSError):
        os.unlink(checkpoint / DAMAGE_NOTE)


# -- what is there --------------------------------------------------------------------------------


def _is_checkpoint(path: Path) -> bool:
    """True for the folder of a checkpoint, possibly damaged, as opposed to one of checkpoints."""
    if os.path.lexists(path / MANIFEST):
        return True
    return path.is_dir() and any(map(is_data_name, _entries(path)))


def _may_be_whole(checkpoint: Path) -> bool:
    return (checkpoint / MANIFEST).is_file() and not os.path.lexists(checkpoint / DAMAGE_NOTE)


def _names(folder: Path, listed: list[str]) -> list[str]:
    """The names of checkpoints, the newest last; those that the index does not list come first."""
    expected = set(listed)
    there = {
        name
        for name in _entries(folder)
        if step_and_turn(name) is not None and (name in expected or _is_folder(folder / name))
    }
    known = [name for name in listed if name in there]
    return sorted(there.difference(known), key=_order) + known


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def _entries(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from None


def _listed(folder: Path) -> list[str]:
    try:
        return index_from(read_checksummed(folder / INDEX))
    except FileNotFoundError:
        return []
    except (CheckpointError, Malformed) as error:
        problem = (
            str(error)
            if isinstance(error, CheckpointError)
            else f"{folder / INDEX} is not an index that this version of fullshard reads: {error}"
        )
        raise CheckpointError(
            f"{problem}. Load a checkpoint by the path of its own folder, or remove the index: "
            "without it the checkpoint with the highest step is the newest",
            advises=True,
        ) from None


def _write_index(folder: Path, names: list[str]) -> None:
    beside = folder / f".{INDEX}.new"
    _clear(beside)
    write_checksummed(beside, names)
    os.replace(beside, folder / INDEX)
    _sync_folder(folder)


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint; it is renamed first, so that an incomplete one is never found."""
    doomed = checkpoint.with_name(f"{PARTIAL}old-{checkpoint.name}")
    try:
        _clear(doomed)
        os.rename(checkpoint, doomed)
        _clear(doomed)
    except FileNotFoundError:
        pass
    except OSError as error:
        # A warning, because the new checkpoint is complete and the save has not failed.
        warnings.warn(
            f"{checkpoint} is no longer needed, but cannot be removed: {error}", stacklevel=2
        )


def _clear(path: Path) -> None:
    """Remove a file, a link, or a folder with its content; ignore errors.

    ``shutil.rmtree`` is not used for files, because it would open a FIFO and block.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _free_name(folder: Path, step: int) -> str:
    """An unused name: a step that is saved again replaces the first one when it is complete."""
    turn = 0
    while os.path.lexists(folder / checkpoint_name(step, turn)):
        turn += 1
    return checkpoint_name(step, turn)


def _order(name: str) -> tuple[int, int]:
    found = step_and_turn(name)
    assert found is not None
    return found


def _sync_folder(folder: Path) -> None:
    """Sync the folder's entries to disk, if the system supports that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
