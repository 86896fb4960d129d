"""Programs that use torch's names only run on fullshard, unchanged, through ``fullshard run``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the command needs it")

PROGRAMS = Path(__file__).parent / "programs"


def run(program: str, *arguments: str) -> None:
    command = [sys.executable, "-m", "fullshard.cli.main", "run", "--ranks", "2"]
    finished = subprocess.run(
        [*command, str(PROGRAMS / program), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.parametrize("program", sorted(p.name for p in PROGRAMS.glob("*.py")))
def test_programs_do_not_know_of_fullshard(program: str) -> None:
    code = (PROGRAMS / program).read_text().split('"""', 2)[2]
    assert "torch.distributed.fsdp" in code
    assert "fullshard" not in code


def test_a_program_trains_clips_accumulates_and_checkpoints_as_under_ddp(tmp_path: Path) -> None:
    run("train.py", str(tmp_path / "result"))

    assert (tmp_path / "result").read_text() == "fullshard.fsdp 2"


# needs: optim
@pytest.mark.skip(reason="optimizer state dicts are not there yet")
def test_a_program_saves_and_loads_its_optimizer(tmp_path: Path) -> None:
    run("resume.py", str(tmp_path))


# needs: scaler
@pytest.mark.skip(reason="the gradient scaler is not there yet")
def test_a_program_scales_its_loss_in_half_precision(tmp_path: Path) -> None:
    run("scale.py", str(tmp_path / "result"))

    assert (tmp_path / "result").read_text().startswith("fullshard.grad.scaler")
