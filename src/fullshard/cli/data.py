"""Text as bytes, and which of them each rank sees at each step. Nothing is downloaded.

Note: what a step sees
    Sequence i of step s begins at a place drawn from (seed, s, i) alone. Which rank computes on it
    does not matter: a run that is continued sees what it would have seen, on any number of ranks.
"""

from __future__ import annotations

import codecs
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

from .problems import BadInput
from .words import counted

__all__ = ["Text", "read_text"]

#: Enough for hours of training on a CPU; a folder with more is read up to here.
MAXIMUM_BYTES = 256 * 1024 * 1024
#: The standard library's sources are cut here, so that a run starts within a second.
STANDARD_LIBRARY_BYTES = 8 * 1024 * 1024

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "idlelib"}


class Text:
    """A long text, from which sequences are drawn."""

    def __init__(self, data: bytes, description: str) -> None:
        self.bytes = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.description = description

    def __len__(self) -> int:
        return len(self.bytes)

    def batch(self, seed: int, step: int, sequences: range, length: int) -> torch.Tensor:
        """Those ``sequences`` of a step's global batch, as tokens (batch, length + 1).

        One token more than a model reads: each position has its next one.
        """
        starts = [self._start(seed, step, index, length) for index in sequences]
        return torch.stack([self.bytes[s : s + length + 1] for s in starts]).long()

    def _start(self, seed: int, step: int, index: int, length: int) -> int:
        # Three numbers to one; the generator's own seeding spreads neighbours apart.
        key = (seed * 1_000_003 + step) * 1_000_003 + index
        generator = torch.Generator().manual_seed(key % 2**63)
        return int(torch.randint(len(self) - length, (), generator=generator))


def read_text(folder: str) -> Text:
    """All text files below ``folder``, in order of their names; without one, Python's own sources.

    A file is text if it is valid UTF-8 without zero bytes. Pipes and devices are no files.
    """
    if not folder:
        library = Path(sysconfig.get_paths()["stdlib"])
        files = (f for f in _files_below(library) if f.suffix == ".py")
        data, count = _join(files, STANDARD_LIBRARY_BYTES)
        description = (
            f"Python's standard library ({counted(count, 'file')}, {counted(len(data), 'byte')})"
        )
        return Text(data, description)
    path = Path(folder)
    if not path.is_dir():
        raise BadInput(f"data expects a folder with text files, but {folder!r} is not a folder")
    data, count = _join(_files_below(path), MAXIMUM_BYTES)
    if not data:
        raise BadInput(
            f"data expects a folder with text files, but there is no text below {folder!r}"
        )
    return Text(data, f"{folder} ({counted(count, 'file')}, {counted(len(data), 'byte')})")


def _files_below(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(n for n in folders if n not in _SKIPPED_FOLDERS and n[0] != ".")
        yield from (Path(parent) / name for name in sorted(names) if name[0] != ".")


def _join(files: Iterator[Path], limit: int) -> tuple[bytes, int]:
    parts: list[bytes] = []
    total = 0
    for file in files:
        content = _text_in(file, limit - total) if file.is_file() else b""
        if content:
            parts.append(content)
            total += len(content)
        if total >= limit:
            break
    return b"\n".join(parts)[:limit], len(parts)


def _text_in(file: Path, most: int) -> bytes:
    """The first ``most`` bytes, and no more memory than that; nothing if they are no text."""
    try:
        with file.open("rb") as opened:
            content = opened.read(most)
        # Where there is more, the last character may be cut.
        codecs.getincrementaldecoder("utf-8")().decode(content, final=len(content) < most)
    except (OSError, UnicodeDecodeError):
        return b""
    return b"" if b"\0" in content else content
