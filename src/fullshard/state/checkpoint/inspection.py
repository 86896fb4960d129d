"""Finds damage in a checkpoint without reading its tensors.

These checks take the same time for tensors of any size: the manifest's checksum and content, and
the existence and size of the data files. ``storage.py`` compares the bytes of tensors with their
checksums when it reads them.
"""

from __future__ import annotations

from pathlib import Path

from .checksummed import read_checksummed
from .errors import CheckpointError, DamagedCheckpoint
from .manifest import Manifest
from .names import MANIFEST, step_and_turn
from .regular_files import size_of
from .schema import Malformed, bytes_needed, manifest_from


def read_manifest(checkpoint: Path) -> Manifest:
    """Read a manifest; raise DamagedCheckpoint, with the file's name, if it is not valid."""
    path = checkpoint / MANIFEST
    try:
        manifest = manifest_from(read_checksummed(path))
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing: the checkpoint is damaged") from None
    except Malformed as problem:
        raise DamagedCheckpoint(
            f"{path} is not a manifest that this version of fullshard reads: {problem}"
        ) from None
    named = step_and_turn(checkpoint.name)
    if named is not None and named[0] != manifest.step:
        raise DamagedCheckpoint(
            f"{path} is that of step {manifest.step}: the file or its folder was moved here from "
            "another checkpoint"
        )
    return manifest


def check_data_files(checkpoint: Path, manifest: Manifest) -> None:
    """Raise DamagedCheckpoint, with the file's name, if a data file is missing or too short."""
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
                f"{path} is damaged: it ends after {size} bytes, but {needed} were written"
            )


def looks_whole(checkpoint: Path) -> bool:
    """True if these checks find no damage in a checkpoint."""
    try:
        check_data_files(checkpoint, read_manifest(checkpoint))
    except CheckpointError:
        return False
    return True
