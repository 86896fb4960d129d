"""The training data: text as bytes, from local files. Nothing is downloaded.

Note: the data of a step
    The start of sequence i in step s is drawn from (seed, s, i) alone, not from the rank that
    computes on it. So a resumed run sees the same data as an uninterrupted one, on any number of
    ranks.
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

#: Enough for hours of training on a CPU; of a larger folder, only this much is read.
MAXIMUM_BYTES = 256 * 1024 * 1024
#: Limit for the standard library's sources, so that a run starts within a second.
STANDARD_LIBRARY_BYTES = 8 * 1024 * 1024

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "idlelib"}


class Text:
    """A long text from which sequences are sampled."""

    def __init__(self, data: bytes, description: str) -> None:
        self.bytes = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.description = description

    def __len__(self) -> int:
        return len(self.bytes)

    def batch(self, seed: int, step: int, sequences: range, length: int) -> torch.Tensor:
        """Return the given ``sequences`` of a step's global batch, as tokens (batch, length + 1).

        There is one token more than the model reads, so that every position has a next token.
        """
        starts = [self._start(seed, step, index, length) for index in sequences]
        return torch.stack([self.bytes[s : s + length + 1] for s in starts]).long()

    def _start(self, seed: int, step: int, index: int, length: int) -> int:
        # Combines three numbers into one seed; the generator hashes it, so neighbours differ.
        key = (seed * 1_000_003 + step) * 1_000_003 + index
        generator = torch.Generator().manual_seed(key % 2**63)
        return int(torch.randint(len(self) - length, (), generator=generator))


def read_text(folder: str) -> Text:
    """Read all text files below ``folder``, in order of their names.

    If ``folder`` is empty, read the sources of Python's standard library. A file is text if it is
    valid UTF-8 without zero bytes. Pipes and devices are skipped.
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
    """Read at most ``most`` bytes of a file; empty if they are not text."""
    try:
        with file.open("rb") as opened:
            content = opened.read(most)
        # If the file is longer, the last character may be cut off.
        codecs.getincrementaldecoder("utf-8")().decode(content, final=len(content) < most)
    except (OSError, UnicodeDecodeError):
        return b""
    return b"" if b"\0" in content else content
