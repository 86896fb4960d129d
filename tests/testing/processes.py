"""Other processes, for tests: running Python in them, and finding what they left behind."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import fullshard

# These run where only the stand-in for pytest is installed, too.
needs_pytest = pytest.mark.skipif(
    importlib.util.find_spec("_pytest") is None, reason="starts pytest itself"
)
_SOURCES = str(Path(fullshard.__file__).resolve().parents[1])
_MARK = "FULLSHARD_TESTS_MARK"


def _mind_control_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass
class MarkedProcess:
    """Python with the given arguments, whose descendants can be found after it ended.

    It imports the same fullshard, and modules in its folder before others.
    """

    arguments: list[str]
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, *self.arguments],
            cwd=self.folder,
            env=os.environ
            | {"PYTHONPATH": f"{self.folder}{os.pathsep}{_SOURCES}"}
            | self.environment
            | {_MARK: self._mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # Tests that were started in the background ignore Ctrl-C, and so would this process.
            preexec_fn=_mind_control_c,
        )

    def finish(self) -> str:
        """Wait for the process to end; returns what it wrote."""
        return self.process.communicate(timeout=60)[0]

    def await_file(self, name: str) -> None:
        """Wait until the process, or one that it started, has made a file of that name."""
        deadline = time.monotonic() + 60
        while not (self.folder / name).exists():
            assert self.process.poll() is None, self.finish()
            assert time.monotonic() < deadline, f"{name} was not made"
            time.sleep(0.02)

    def family(self) -> list[int]:
        """The processes that carry the mark: itself and its descendants."""
        mark = f"{_MARK}={self._mark}".encode()
        return [process for process in _all_processes() if mark in _environment_of(process)]

    def is_all_gone(self) -> bool:
        """Whether nothing of it is left; gives ended processes a moment to disappear."""
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            if not self.family():
                return True
            time.sleep(0.05)
        return False


def run_python(arguments: list[str], folder: Path, **environment: str) -> tuple[int, str]:
    """Run Python to its end; returns the exit status and what it wrote."""
    process = MarkedProcess(arguments, folder, environment)
    output = process.finish()
    return process.process.returncode, output


def _all_processes() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _environment_of(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/environ").read_bytes()
    except OSError:
        return b""
