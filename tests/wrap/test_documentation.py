"""The output of ``describe`` that the documentation shows is what it prints."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "wrapping.md"


def test_the_example_of_the_page_prints_what_the_page_shows() -> None:
    page = PAGE.read_text(encoding="utf-8")
    example = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)\n```", page, re.DOTALL)
    assert example is not None
    code, shown = example.groups()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {"__name__": "example"})
    assert printed.getvalue().rstrip("\n") == shown
