"""What the package says of itself: one version, and versions of Python that agree."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import fullshard

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_version_of_what_is_built_is_the_one_in_the_package() -> None:
    configuration = pytest.importorskip("setuptools.config.pyprojecttoml")

    built = configuration.read_configuration(ROOT / "pyproject.toml", expand=True)

    assert "version" not in PROJECT
    assert built["project"]["version"] == fullshard.__version__


def test_the_command_shows_the_version_of_the_package() -> None:
    pytest.importorskip("typer")

    shown = subprocess.run(
        [sys.executable, "-m", "fullshard", "--version"], capture_output=True, text=True, check=True
    )

    assert shown.stdout == f"fullshard {fullshard.__version__}, torch {torch.__version__}\n"


def test_the_oldest_python_is_the_same_wherever_it_is_named() -> None:
    oldest = PROJECT["requires-python"].removeprefix(">=")
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    tested = re.findall(r'python: "(3\.\d+)"', workflow)

    assert named[0] == oldest
    assert tested == [named[0], named[-1]]


def test_the_oldest_and_the_newest_torch_are_tested() -> None:
    (requirement,) = PROJECT["dependencies"]
    match = re.fullmatch(r"torch>=2\.(\d+),<2\.(\d+)", requirement)
    assert match is not None
    oldest, beyond = map(int, match.groups())
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")

    tested = re.findall(r'torch: "(2\.\d+)\.\*"', workflow)

    assert tested == [f"2.{oldest}", f"2.{beyond - 1}"]
