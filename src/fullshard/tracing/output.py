"""Writes a trace to a file, in the format that its suffix asks for."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from .chrome import as_chrome
from .page import as_page
from .records import TraceData

_SUFFIXES = (".html", ".json", ".png")


def check_suffix(path: Path) -> None:
    """Raise ``ValueError`` for a path of which the format is not known, or cannot be written."""
    if path.suffix not in _SUFFIXES:
        raise ValueError(
            f"A trace is written as {', '.join(_SUFFIXES)}, but got {str(path)!r}: end the path "
            "with one of them (.html is a page, .json is for Perfetto, .png is a picture)"
        )
    if path.suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            "A picture of a trace needs matplotlib: pip install 'fullshard[cli]', or write the "
            "trace as .html"
        )


def write(data: TraceData, path: Path) -> None:
    """Write ``data`` as a page (``.html``), for Perfetto (``.json``), or as a picture."""
    check_suffix(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".png":
        # It needs matplotlib, which nothing else does.
        from .picture import draw

        draw(data, path)
        return
    text = as_page(data) if path.suffix == ".html" else json.dumps(as_chrome(data))
    path.write_text(text, encoding="utf-8")
