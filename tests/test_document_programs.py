"""Python in the documents runs as it stands there, on two real ranks.

A block is a complete program, or its first line says that it continues the one above it
("# Continues ..."); then it runs after that one, in the same process. A program that needs a GPU,
or a library that is not installed, is skipped.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

import fullshard.compat
from fullshard.testing import device, run_on_ranks

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
CONTINUES, NEEDS_GPU = "# Continues ", "# Needs a GPU"


class Program(NamedTuple):
    """A complete block, and those that continue it."""

    document: Path
    number: int
    blocks: list[str]

    @property
    def name(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.number}"

    @property
    def missing(self) -> list[str]:
        """The libraries that it imports and that are not installed."""
        imports = [re.findall(r"^(?:import|from) (\w+)", b, re.MULTILINE) for b in self.blocks]
        return [name for found in imports for name in found if not importlib.util.find_spec(name)]

    @property
    def is_a_test(self) -> bool:
        return any(re.search(r"^def test_", block, re.MULTILINE) for block in self.blocks)


def programs_in(document: Path) -> list[Program]:
    text = document.read_text(encoding="utf-8")
    found: list[Program] = []
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if block.startswith(CONTINUES):
            assert found, f"{document}: nothing stands before {block!r}"
            found[-1].blocks.append(block)
        else:
            found.append(Program(document, len(found) + 1, [block]))
    return found


PROGRAMS = [program for document in DOCUMENTS for program in programs_in(document)]


def run_as_on_a_launched_rank(blocks: list[str], name: str, folder: Path) -> None:
    """Run ``blocks`` in a rank that a launcher has just started: without a process group."""
    dist.destroy_process_group()
    os.chdir(folder)
    names = {"__name__": "__main__"}
    try:
        for number, block in enumerate(blocks, start=1):
            exec(compile(block, f"{name}, block {number}", "exec"), names)
    finally:
        fullshard.compat.uninstall()  # the rank goes on to other tests


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "program", [p for p in PROGRAMS if not p.is_a_test], ids=lambda program: program.name
)
def test_a_program_in_a_document_runs_on_two_ranks(program: Program, tmp_path: Path) -> None:
    if any(NEEDS_GPU in block for block in program.blocks) and device().type == "cpu":
        pytest.skip("needs a GPU")
    if program.missing:
        pytest.skip(f"needs {', '.join(program.missing)}")
    run_on_ranks(2, run_as_on_a_launched_rank, program.blocks, program.name, tmp_path)


def test_tests_in_the_documents_pass(tmp_path: Path) -> None:
    tests = [program for program in PROGRAMS if program.is_a_test]
    for number, program in enumerate(tests):
        (tmp_path / f"test_{number}.py").write_text("\n".join(program.blocks))

    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert tests
    assert finished.returncode == 0, finished.stdout + finished.stderr
