"""An extension of Griffe: docstrings as Markdown.

Docstrings are written for readers of the code: examples begin with ``>>>``, as the tests run them,
and names may have Sphinx's roles. Here examples become blocks of Python, and roles plain code.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|meth|func|mod|attr|exc|data|ref):`~?\.?([^`]+)`")
_EXAMPLE = re.compile(r"(?:^[ ]*>>> .*\n(?:^[ ]*(?!>>>)\S.*\n?)*)+", re.MULTILINE)
_TERM = re.compile(r"^(``[^\n]*``)\n((?: {4}.*\n?)+)", re.MULTILINE)


class MarkdownDocstrings(griffe.Extension):
    """Rewrites every docstring once."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of ``obj``, if it has one."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(docstring: str) -> str:
    """Examples as blocks with output as comments; roles as code; terms as a list."""
    listed = _TERM.sub(_item, _ROLE.sub(r"`\1`", docstring) + "\n")
    return _EXAMPLE.sub(_block, listed).rstrip("\n")


def _item(term: re.Match[str]) -> str:
    return f"- {term[1]}: {' '.join(term[2].split())}\n"


def _block(example: re.Match[str]) -> str:
    lines = [_line(line.strip()) for line in example[0].splitlines()]
    return "\n".join(["", "```python", *lines, "```", ""])


def _line(line: str) -> str:
    return line[4:] if line.startswith((">>>", "...")) else f"# {line}"
