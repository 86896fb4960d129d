"""Whether a checkpoint is whole, as far as that can be seen without reading its tensors.

What is looked at here takes the same time however large the tensors are: the manifest with its
checksum and its meaning, and that the data files are there and long enough. That their bytes are
those that were written is seen when they are read, see ``storage.py``.
"""

from __future__ import annotations

from pathlib import Path

from .checksummed import read_sealed
from .errors import CheckpointError, DamagedCheckpoint
from .manifest import Manifest
from .names import MANIFEST, step_and_turn
from .regular_files import size_of
from .schema import Malformed, bytes_needed, manifest_from


def read_manifest(checkpoint: Path) -> Manifest:
    """Read a manifest; raise DamagedCheckpoint, with the file's name, if it cannot be right."""
    path = checkpoint / MANIFEST
    try:
        manifest = manifest_from(read_sealed(path))
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing: the checkpoint is damaged") from None
    except Malformed as problem:
        raise DamagedCheckpoint(
            f"{path} is no manifest that this version of fullshard reads: {problem}"
        ) from None
    named = step_and_turn(checkpoint.name)
    if named is not None and named[0] != manifest.step:
        raise DamagedCheckpoint(
            f"{path} is that of step {manifest.step}: it, or its folder, was moved here from "
            "another place"
        )
    return manifest


def check_data_files(checkpoint: Path, manifest: Manifest) -> None:
    """Raise DamagedCheckpoint, with the file's name, if a data file is gone or too short."""
    for name, needed in bytes_needed(manifest).items():
        path = checkpoint / name
        try:
            size = size_of(path)
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{path} is missing: the checkpoint is damaged") from None
        except OSError as error:
            raise DamagedCheckpoint(f"{path} cannot be read: {error}") from None
        if size < needed:
            raise DamagedCheckpoint(
                f"{path} is damaged: it ends after {size} bytes, and {needed} were written"
            )


def looks_whole(checkpoint: Path) -> bool:
    """Whether nothing is wrong with a checkpoint that can be seen without reading its tensors."""
    try:
        check_data_files(checkpoint, read_manifest(checkpoint))
    except CheckpointError:
        return False
    return True
