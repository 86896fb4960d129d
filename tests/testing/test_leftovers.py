"""No process and no file is left behind, however the run ends."""

import os
import signal
import sys
from pathlib import Path

import pytest
from tests.marks import in_long_runs
from tests.testing.processes import MarkedProcess, needs_pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

CONFTEST = 'pytest_plugins = ["fullshard.testing.pytest_plugin"]\n'
QUICK = """
from fullshard.testing import ranks

@ranks(3)
def test_quick() -> None: pass
"""
ENDLESS = """
import time
import torch.distributed as dist
from fullshard.testing import ranks, run_on_ranks

@ranks(3)
def test_endless() -> None:
    dist.barrier()
    open("asleep", "w").close()
    time.sleep(600)

if __name__ == "__main__":
    run_on_ranks(2, int)
    test_endless()
"""
PYTEST = ["-m", "pytest", "-q", "-s", "-p", "no:cacheprovider"]


def start(folder: Path, test: str, arguments: list[str]) -> MarkedProcess:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(test)
    return MarkedProcess([*arguments, "test_it.py"], folder, {"TMPDIR": str(folder)})


def leftover_files(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith("fullshard-ranks-")]


@in_long_runs
@needs_pytest
def test_nothing_is_left_after_an_ordinary_run(tmp_path: Path) -> None:
    session = start(tmp_path, QUICK, PYTEST)

    assert "1 passed" in session.finish()
    assert session.is_all_gone()
    assert leftover_files(tmp_path) == []


def test_nothing_is_left_after_control_c(tmp_path: Path) -> None:
    session = start(tmp_path, ENDLESS, [])
    session.await_file("asleep")
    assert len(session.family()) == 1 + 1 + 2 + 3  # itself, the nursery, two pools

    session.process.send_signal(signal.SIGINT)

    assert "KeyboardInterrupt" in session.finish()
    assert session.is_all_gone()
    assert leftover_files(tmp_path) == []


@in_long_runs
@needs_pytest
def test_nothing_is_left_after_control_c_in_pytest(tmp_path: Path) -> None:
    session = start(tmp_path, ENDLESS, PYTEST)
    session.await_file("asleep")

    session.process.send_signal(signal.SIGINT)

    output = session.finish()
    assert "KeyboardInterrupt" in output
    assert session.is_all_gone()
    assert leftover_files(tmp_path) == []


def test_nothing_is_left_after_the_test_process_is_killed(tmp_path: Path) -> None:
    signals = (signal.SIGKILL, signal.SIGTERM)
    folders = [tmp_path / number.name for number in signals]
    for folder in folders:
        folder.mkdir()
    sessions = [start(folder, ENDLESS, []) for folder in folders]

    for session, number in zip(sessions, signals, strict=True):
        session.await_file("asleep")
        session.process.send_signal(number)

    for session, folder in zip(sessions, folders, strict=True):
        session.finish()
        assert session.is_all_gone()
        assert leftover_files(folder) == []
