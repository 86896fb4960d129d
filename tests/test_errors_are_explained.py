"""docs/troubleshooting.md explains every error that the package raises with its own message."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "fullshard"
PAGE = ROOT / "docs" / "troubleshooting.md"
#: The command and the tests on ranks say in one line what was given and what is expected; the page
#: has a section on each, but not their lines one by one.
IN_ONE_LINE = ("cli", "testing")
#: Caught inside the package, or assertions that only a mistake in it can make fail.
FOR_MAINTAINERS = {
    "No such word: …",
    "Timed out: the collective is still under way",
    "Unknown request from a rank with data: …",
}
#: What says "expects" and "got" says what to do by itself; the page's introduction is about these.
SAYS_IT_ALL = re.compile(r"\b(expects?|Expected|takes?|needs)\b.*\bgot\b", re.DOTALL)


class Raised(NamedTuple):
    where: str
    message: str


def as_template(argument: ast.expr) -> str:
    """A message with "…" for what is put into it."""
    if isinstance(argument, ast.Constant):
        return str(argument.value)
    if isinstance(argument, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "…" for part in argument.values
        )
    return ""


def raised() -> list[Raised]:
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        where = file.relative_to(PACKAGE)
        if where.parts[0] in IN_ONE_LINE:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                message = as_template(node.exc.args[0])
                if re.search(r"\w{3}", message):
                    found.append(Raised(f"{where}:{node.lineno}", message))
    return found


def explained() -> list[re.Pattern[str]]:
    cells = re.findall(r'^\| ("[^|]*") \|', PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    messages = [message for cell in cells for message in re.findall(r'"([^"]*)"', cell)]
    return [
        re.compile(
            ".*".join(re.escape(part.strip(" .:")) for part in message.split("…")), re.DOTALL
        )
        for message in messages
    ]


@pytest.mark.parametrize("error", raised(), ids=lambda error: error.where)
def test_an_error_that_is_raised_is_on_the_page(error: Raised) -> None:
    if error.message in FOR_MAINTAINERS or SAYS_IT_ALL.search(error.message):
        return
    assert any(pattern.search(error.message) for pattern in explained()), (
        f"docs/troubleshooting.md does not explain {error.message!r}"
    )
