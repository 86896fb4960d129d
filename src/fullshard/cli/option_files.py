"""Options as TOML: read, and written so that they can be read again."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

from .options import Options, build_options
from .problems import BadInput

__all__ = ["read_values", "to_toml"]


def read_values(path: Path) -> dict[str, Any]:
    """The options that a TOML file sets, checked."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"config expects a TOML file, but there is no {str(path)!r}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"config expects a TOML file, but {str(path)!r}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{path} is not valid TOML: {error}") from None
    build_options(values, str(path))
    return values


def to_toml(options: Options) -> str:
    """All options, one to a line, each with what it means."""
    lines = []
    for field in dataclasses.fields(options):
        # What JSON writes for numbers, texts and truth values is TOML, too.
        value = json.dumps(getattr(options, field.name), ensure_ascii=False)
        lines.append(f"{field.name} = {value}  # {field.metadata['help']}")
    return "\n".join(lines) + "\n"
