"""Opens the files of a checkpoint, which must be regular files.

Opening a FIFO would block until another process writes into it, and opening a device may have any
effect. Links to regular files are followed, because people keep the files of checkpoints elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

#: Non-blocking, in case the file is replaced by a FIFO after it was checked.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading; raise OSError for everything else."""
    size_of(path)
    with open(os.open(path, _FLAGS), "rb") as file:
        _check_regular(os.fstat(file.fileno()))
        yield file


def size_of(path: Path) -> int:
    """The size of a regular file in bytes; raise OSError for everything else."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        if not os.path.islink(path):
            raise
        # Not FileNotFoundError: an index that cannot be reached is not a missing index.
        raise OSError(
            f"it is a symbolic link to {os.readlink(path)}, which does not exist"
        ) from None
    _check_regular(found)
    return found.st_size


def _check_regular(found: os.stat_result) -> None:
    if stat.S_ISREG(found.st_mode):
        return
    kind = next((name for test, name in _KINDS if test(found.st_mode)), "something else")
    raise OSError(f"it is {kind}, but must be a regular file")
