"""A folder of checkpoints: which is the newest, where the next one goes, and which may go.

Note: whole or not at all
    A checkpoint is written into a folder whose name begins with ``.partial-``, its manifest last,
    and moved to its final name when it is complete; then an index, which lists checkpoints in the
    order in which they were saved, is replaced by a new one. Both moves are atomic. Whenever a
    process dies, the last checkpoint in the index is whole; what it left behind is removed by the
    next save.

Note: damaged checkpoints stay
    A checkpoint may be damaged afterwards, by a disk or by hand. It is left for somebody to look
    at: a save removes none that looks damaged, and none with a note of damage, which is left by
    who found it when reading the tensors. Such a note means nothing to who looks for a checkpoint
    to load: the disk may have failed for a moment only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from pathlib import Path

from .checksummed import read_sealed, write_sealed
from .errors import CheckpointError
from .inspection import looks_whole
from .names import (
    INDEX,
    MANIFEST,
    NOTE_OF_DAMAGE,
    PARTIAL,
    checkpoint_name,
    is_data_name,
    step_and_turn,
)
from .schema import Malformed, index_from

# -- saving ---------------------------------------------------------------------------------------


def begin(folder: Path, step: int) -> Path:
    """Make a place to write a checkpoint into, after removing what died before it was whole."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Before anything is written: a damaged index would be found only at the end.
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
    """Where a checkpoint will be when it is complete."""
    return partial.with_name(partial.name.removeprefix(PARTIAL))


def commit(partial: Path, keep_last: int | None) -> Path:
    """Move a complete checkpoint in place, make it the newest, and remove those not to be kept.

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
    """The last ``count`` that look whole: a damaged one does not take the place of another."""
    found: list[str] = []
    for name in reversed(names):
        if len(found) == count:
            break
        if looks_whole(folder / name):
            found.append(name)
    return found[::-1]


def discard(partial: Path) -> None:
    """Remove a checkpoint that will not become whole."""
    shutil.rmtree(partial, ignore_errors=True)


# -- loading --------------------------------------------------------------------------------------


def candidates(path: Path) -> list[Path]:
    """The checkpoint that ``path`` is, or those in the folder that it is, the newest first.

    Any of them may be damaged. Raises CheckpointError if the index lists some and none is there;
    that some are gone, others than all, is how people remove them.
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
            f"{path / INDEX} lists {', '.join(listed)}, but no checkpoint is there. Bring them "
            "back, or remove the index as well to begin without one",
            advises=True,
        )
    return [path / name for name in reversed(names)]


def note_damage(checkpoint: Path, reason: str) -> None:
    """Keep a damaged checkpoint from being removed by later saves, and say in it why."""
    text = (
        f"This checkpoint was passed over when a run was resumed: {reason}\n"
        "It is kept until somebody removes its folder.\n"
    )
    # Not where something has the name already, whatever it is.
    with contextlib.suppress(OSError), open(checkpoint / NOTE_OF_DAMAGE, "x") as note:
        note.write(text)


def remove_note(checkpoint: Path) -> None:
    """Let a checkpoint that was loaded be one like any other."""
    with contextlib.suppress(OSError):
        os.unlink(checkpoint / NOTE_OF_DAMAGE)


# -- what is there --------------------------------------------------------------------------------


def _is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint, perhaps a damaged one, and no folder of checkpoints."""
    if os.path.lexists(path / MANIFEST):
        return True
    return path.is_dir() and any(map(is_data_name, _entries(path)))


def _may_be_whole(checkpoint: Path) -> bool:
    return (checkpoint / MANIFEST).is_file() and not os.path.lexists(checkpoint / NOTE_OF_DAMAGE)


def _names(folder: Path, listed: list[str]) -> list[str]:
    """Checkpoints, the newest last; those that the index does not know come first."""
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
        return index_from(read_sealed(folder / INDEX))
    except FileNotFoundError:
        return []
    except (CheckpointError, Malformed) as error:
        problem = (
            str(error)
            if isinstance(error, CheckpointError)
            else f"{folder / INDEX} is no index that this version of fullshard reads: {error}"
        )
        raise CheckpointError(
            f"{problem}. Load a checkpoint by the path of its own folder, or remove the index: "
            "without it the checkpoint with the highest step is the newest",
            advises=True,
        ) from None


def _write_index(folder: Path, names: list[str]) -> None:
    beside = folder / f".{INDEX}.new"
    _clear(beside)
    write_sealed(beside, names)
    os.replace(beside, folder / INDEX)
    _sync_folder(folder)


def _remove(checkpoint: Path) -> None:
    """Take a checkpoint away: first its name, so that no half of it is ever found."""
    doomed = checkpoint.with_name(f"{PARTIAL}old-{checkpoint.name}")
    try:
        _clear(doomed)
        os.rename(checkpoint, doomed)
        _clear(doomed)
    except FileNotFoundError:
        pass
    except OSError as error:
        # The new checkpoint is complete, and the save has not failed.
        warnings.warn(
            f"{checkpoint} is no longer needed, but cannot be removed: {error}", stacklevel=2
        )


def _clear(path: Path) -> None:
    """Remove whatever stands at ``path``, as far as that can be done.

    A folder with all that is in it; of a link the link alone. ``shutil.rmtree`` would open a FIFO,
    and wait for somebody to write into it.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _free_name(folder: Path, step: int) -> str:
    """A name that nothing has: a step that is saved again replaces the first when it is whole."""
    turn = 0
    while os.path.lexists(folder / checkpoint_name(step, turn)):
        turn += 1
    return checkpoint_name(step, turn)


def _order(name: str) -> tuple[int, int]:
    found = step_and_turn(name)
    assert found is not None
    return found


def _sync_folder(folder: Path) -> None:
    """See the folder's entries on the disk, where the system can do that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
