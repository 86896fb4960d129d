"""Opening the files of a checkpoint: regular files, and nothing else that may stand in their place.

Opening a FIFO would wait for somebody to write into it, and opening a device may do anything.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

#: Where something else is put there at the last moment, it is neither followed nor waited for.
_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_BINARY", 0)
)
_KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
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
    """The bytes in a regular file; raise OSError for everything else."""
    found = os.lstat(path)
    _check_regular(found)
    return found.st_size


def _check_regular(found: os.stat_result) -> None:
    if stat.S_ISREG(found.st_mode):
        return
    kind = next((name for test, name in _KINDS if test(found.st_mode)), "something else")
    raise OSError(f"it is {kind}, where a regular file is expected")
