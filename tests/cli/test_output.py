"""A training goes on, and ends well, whatever becomes of the output that tells of it."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.marks import in_long_runs

import fullshard
from fullshard.cli.trainer.run_folder import RunFolder

TINY = "--device cpu --layers 1 --heads 1 --width 8 --sequence 16 --batch 4 --ranks 2 --log-every 1"
STEPS = 12
LONGEST = 240

#: What standard output is, for as long as the context lasts: a file descriptor.
Destination = Callable[[], contextlib.AbstractContextManager[int]]


def train(folder: Path, stdout: int, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command, in ``folder``, on text that is not ASCII."""
    (folder / "donnée").mkdir()
    (folder / "donnée" / "a.txt").write_text("où ça va très bien, à l'été prochain " * 9)
    ours = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment = {**ours, "PYTHONPATH": str(Path(fullshard.__file__).parents[1]), **variables}
    command = [sys.executable, "-m", "fullshard.cli.main", "train", "--name", "run", *TINY.split()]
    return subprocess.run(
        [*command, "--steps", str(STEPS), "--data", "donnée"],
        cwd=folder,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        timeout=LONGEST,
        start_new_session=True,
    )


def assert_complete(folder: Path, ended: subprocess.CompletedProcess[str]) -> None:
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    run = RunFolder(folder / "runs" / "run")
    assert [metrics["step"] for metrics in run.read_metrics()] == [*range(1, STEPS + 1)]
    saved = fullshard.latest(run.checkpoints)
    assert saved is not None
    assert saved.step == STEPS
    assert run.sample.exists()


@contextlib.contextmanager
def pipe_that_is_read_once() -> Iterator[int]:
    """As ``| head -1``: its reader leaves after the first line."""
    reader, writer = os.pipe()

    def read_once() -> None:
        os.read(reader, 1)
        os.close(reader)

    thread = threading.Thread(target=read_once)
    thread.start()
    try:
        yield writer
    finally:
        os.close(writer)
        thread.join()


@contextlib.contextmanager
def terminal_that_closes() -> Iterator[int]:
    """A terminal that is gone after the first letter, without a signal that would say so."""
    master, terminal = pty.openpty()

    def read_once() -> None:
        os.read(master, 1)
        os.close(master)

    thread = threading.Thread(target=read_once)
    thread.start()
    try:
        yield terminal
    finally:
        os.close(terminal)
        thread.join()


@contextlib.contextmanager
def device_that_is_full() -> Iterator[int]:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        yield full
    finally:
        os.close(full)


@pytest.mark.parametrize(
    "output",
    [
        pipe_that_is_read_once,
        pytest.param(terminal_that_closes, marks=in_long_runs),
        pytest.param(device_that_is_full, marks=in_long_runs),
    ],
)
def test_output_that_cannot_be_written_ends_no_training(
    output: Destination, tmp_path: Path
) -> None:
    if output is device_that_is_full and not Path("/dev/full").exists():
        pytest.skip("needs a device that is always full")

    with output() as stdout:
        ended = train(tmp_path, stdout)

    assert_complete(tmp_path, ended)


@contextlib.contextmanager
def recorded_terminal(heard: list[bytes]) -> Iterator[int]:
    """A terminal; what was written to it is in ``heard`` afterwards."""
    master, terminal = pty.openpty()

    def read_all() -> None:
        with contextlib.suppress(OSError):  # the end, on Linux
            while part := os.read(master, 4096):
                heard.append(part)

    thread = threading.Thread(target=read_all)
    thread.start()
    try:
        yield terminal
    finally:
        os.close(terminal)
        thread.join()
        os.close(master)


def test_an_ascii_terminal_shows_what_it_can_of_a_training(tmp_path: Path) -> None:
    heard: list[bytes] = []

    with recorded_terminal(heard) as terminal:
        ended = train(
            tmp_path, terminal, LC_ALL="C", PYTHONIOENCODING="ascii", TERM="xterm", COLUMNS="80"
        )

    assert_complete(tmp_path, ended)
    output = b"".join(heard)
    assert output.isascii()
    assert b"data      donn?e (1 file, " in output
    assert f"{STEPS}/{STEPS} ".encode() in output


@in_long_runs
def test_a_terminal_that_cannot_draw_a_bar_has_lines(tmp_path: Path) -> None:
    heard: list[bytes] = []

    with recorded_terminal(heard) as terminal:
        ended = train(tmp_path, terminal, TERM="dumb")

    assert_complete(tmp_path, ended)
    lines = b"".join(heard).decode().splitlines()
    assert [line for line in lines if line.startswith(f"step  1/{STEPS}  loss ")]
    assert not [line for line in lines if "\x1b" in line]


@in_long_runs
def test_no_output_at_all_ends_no_training(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fullshard.cli.main", "train", "--name", "run", *TINY.split()]
    environment = {**os.environ, "PYTHONPATH": str(Path(fullshard.__file__).parents[1])}

    status = subprocess.call(
        ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command, "--steps", "3"],
        cwd=tmp_path,
        env=environment,
        timeout=LONGEST,
    )

    assert status == 0
    assert (tmp_path / "runs" / "run" / "sample.txt").exists()
