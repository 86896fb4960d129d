"""Programs that use torch's names only run on fullshard, unchanged, through ``fullshard run``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"


Runs = dict[str, Future[None]]


def run(program: str, argument: str) -> None:
    command = [sys.executable, "-m", "fullshard.cli.launcher.run", "--ranks", "2"]
    finished = subprocess.run(
        [*command, str(PROGRAMS / program), argument],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def runs(folder: Path) -> Iterator[Runs]:
    """The programs, which all run at the same time, each with a file or folder of its own."""
    with ThreadPoolExecutor() as pool:
        yield {
            path.name: pool.submit(run, path.name, str(folder / path.stem))
            for path in PROGRAMS.glob("*.py")
        }


@pytest.mark.parametrize("program", sorted(p.name for p in PROGRAMS.glob("*.py")))
def test_programs_do_not_know_of_fullshard(program: str) -> None:
    code = (PROGRAMS / program).read_text().split('"""', 2)[2]
    assert "torch.distributed.fsdp" in code
    assert "fullshard" not in code


def test_a_program_trains_clips_accumulates_and_checkpoints_as_under_ddp(
    runs: Runs, folder: Path
) -> None:
    runs["train.py"].result()

    assert (folder / "train").read_text() == "fullshard.fsdp 2"


def test_a_program_saves_and_loads_its_optimizer(runs: Runs) -> None:
    runs["resume.py"].result()


def test_a_program_scales_its_loss_in_half_precision(runs: Runs, folder: Path) -> None:
    runs["scale.py"].result()

    assert (folder / "scale").read_text().startswith("fullshard.grad.scaler")
