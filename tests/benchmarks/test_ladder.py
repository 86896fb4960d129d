"""The tuning ladder measures and plans a row of each kind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.marks import in_long_runs

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "ladder.py"
ROW = "shard parameters as well"


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run the program on one row, and return what it wrote about it."""
    file = folder / "ladder.json"
    command = [sys.executable, str(PROGRAM), "--rows", ROW, "--json", str(file), *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    numbers: dict[str, Any] = json.loads(file.read_text())["rows"][ROW]
    return numbers


@in_long_runs
def test_a_row_has_its_speed_and_the_memory_that_the_trainer_measured(tmp_path: Path) -> None:
    pytest.importorskip("typer")

    numbers = run(tmp_path, "--rounds", "1")

    assert numbers["tokens/s"] > 0
    assert numbers["x first"] == 1.0
    # 19 million parameters in float32: a rank of two holds half of each, and Adam's two averages.
    half = 19.0e6 / 2 * 4 / 2**20
    assert 3 * half < numbers["MiB"] < 8 * half


@in_long_runs
def test_a_planned_row_has_the_memory_that_the_command_predicts(tmp_path: Path) -> None:
    pytest.importorskip("typer")

    numbers = run(tmp_path, "--plan")

    # 6.7 billion parameters on eight ranks: shards, Adam's averages, and activations beside them.
    assert 3 * 6.7e9 / 8 * 4 / 2**30 < numbers["GiB"] < 80
