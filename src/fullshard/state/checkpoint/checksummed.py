"""JSON files that carry a checksum of their content."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any, BinaryIO

from .errors import CheckpointError, DamagedCheckpoint
from .regular_files import opened

FORMAT = 1
_VERSION = re.compile(rb'\{"fullshard":([0-9]{1,9}),')
_HEAD = re.compile(rb'\{"fullshard":[0-9]{1,9},"sha256":"([0-9a-f]{64})","body":')
_LONGEST_HEAD = 128
_TAIL = b"}\n"
_BLOCK = 2**20


def write_checksummed(path: Path, content: Any) -> None:
    """Write ``content`` with its checksum, and sync the file to disk."""
    body = json.dumps(content, separators=(",", ":"))
    with open(path, "w", encoding="utf-8") as file:
        file.write(_with_checksum(body))
        file.flush()
        os.fsync(file.fileno())


def read_checksummed(path: Path) -> Any:
    """Return the content of a file; raise DamagedCheckpoint, with its name, if it was changed.

    The meaning of the content is not checked here: see ``schema.py``.
    """
    try:
        with opened(path) as file:
            body = _checked_body(file, path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error}") from None
    try:
        return json.loads(body.decode("utf-8"))
    except ValueError as error:
        raise DamagedCheckpoint(f"{path} is damaged: its content is not JSON: {error}") from None
    except RecursionError:
        raise DamagedCheckpoint(f"{path} is damaged: its content is nested too deeply") from None


def _checked_body(file: BinaryIO, path: Path) -> bytes:
    """The bytes of the content, which are read into memory only if their checksum matches."""
    beginning = file.read(_LONGEST_HEAD)
    version, head = _VERSION.match(beginning), _HEAD.match(beginning)
    if version is not None and int(version[1]) != FORMAT:
        raise CheckpointError(
            f"{path} has format {int(version[1])}, but this version of fullshard reads format "
            f"{FORMAT}"
        )
    end = file.seek(0, os.SEEK_END) - len(_TAIL)
    if head is None or end < head.end():
        raise DamagedCheckpoint(
            f"{path} is damaged, or is not a file of a checkpoint: it has no checksum"
        )
    file.seek(end)
    if file.read() != _TAIL:
        raise DamagedCheckpoint(f"{path} is damaged: its end is missing")
    digest, left = hashlib.sha256(), end - head.end()
    file.seek(head.end())
    while block := file.read(min(left, _BLOCK)):
        digest.update(block)
        left -= len(block)
    if digest.hexdigest().encode() != head[1]:
        raise DamagedCheckpoint(f"{path} is damaged: its content does not match its checksum")
    file.seek(head.end())
    return file.read(end - head.end())


def _with_checksum(body: str) -> str:
    digest = hashlib.sha256(body.encode("utf-8")).hexdigest()
    return f'{{"fullshard":{FORMAT},"sha256":"{digest}","body":{body}}}\n'
