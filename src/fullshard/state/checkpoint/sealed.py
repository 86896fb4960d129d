"""JSON files that carry a checksum of their content."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from .errors import CheckpointError

FORMAT = 1


def write_sealed(path: Path, content: Any) -> None:
    """Write ``content`` and see it safely on the disk."""
    body = json.dumps(content, separators=(",", ":"))
    with open(path, "w", encoding="utf-8") as file:
        file.write(_seal(body))
        file.flush()
        os.fsync(file.fileno())


def read_sealed(path: Path) -> Any:
    """The content of a sealed file; raise CheckpointError, with its name, if it was changed."""
    try:
        text = path.read_bytes().decode("utf-8")
        version = json.loads(text)["fullshard"]
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged or no file of a checkpoint: {error}") from None
    if version != FORMAT:
        raise CheckpointError(
            f"{path} has format {version}, and this version of fullshard reads format {FORMAT}"
        )
    body = text.partition(',"body":')[2].removesuffix("}\n")
    if text != _seal(body):
        raise CheckpointError(f"{path} is damaged: its content does not match its checksum")
    return json.loads(body)


def _seal(body: str) -> str:
    digest = hashlib.sha256(body.encode("utf-8")).hexdigest()
    return f'{{"fullshard":{FORMAT},"sha256":"{digest}","body":{body}}}\n'
