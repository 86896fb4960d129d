"""Reading options from TOML files, and writing them."""

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
    """Read and check the options in a TOML file."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"config expects a TOML file, but there is no {str(path)!r}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            f"config expects a TOML file, but {str(path)!r} cannot be read: {error}"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{path} is not valid TOML: {error}") from None
    build_options(values, str(path))
    return values


def to_toml(options: Options) -> str:
    """All options as TOML, one per line, each with its help text as a comment."""
    lines = []
    for field in dataclasses.fields(options):
        # JSON's notation for numbers, strings and booleans is valid TOML.
        value = json.dumps(getattr(options, field.name), ensure_ascii=False)
        lines.append(f"{field.name} = {value}  # {field.metadata['help']}")
    return "\n".join(lines) + "\n"
