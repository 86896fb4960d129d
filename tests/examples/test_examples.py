"""Every file in examples/ runs, as a user would run it."""

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@functools.cache
def run_example(file: Path) -> str:
    finished = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, timeout=300
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda file: file.name)
def test_example_runs(file: Path) -> None:
    assert run_example(file)


def test_training_on_two_ranks_learns_the_sum() -> None:
    losses = re.findall(r"loss ([\d.]+)", run_example(EXAMPLES / "train_two_ranks.py"))

    first, *_, last = map(float, losses)
    assert last < first / 5
