"""``fullshard train`` as users start it: real processes, real signals."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fullshard
from fullshard.cli.run_folder import RunFolder

if not Path("/proc/self/environ").exists():
    pytest.skip("ranks are found through /proc", allow_module_level=True)

TINY = "--device cpu --layers 1 --heads 1 --width 8 --sequence 16 --batch 4 --ranks 2 --log-every 1"
LONGEST = 240


@contextlib.contextmanager
def started(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """The command, in ``folder``; ended when the context is left."""
    command = [sys.executable, "-m", "fullshard.cli.main", "train", "--name", "run", *words]
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(LONGEST)


def environment() -> dict[str, str]:
    """Without what a launcher around the tests may have set."""
    ours = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return {**ours, "PYTHONPATH": str(Path(fullshard.__file__).parents[1])}


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Return when the run in ``folder`` has made ``step``."""
    end = time.monotonic() + LONGEST
    while last_step(folder) < step:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "the run does not get on"
        time.sleep(0.02)


def last_step(folder: Path) -> int:
    metrics = RunFolder(folder / "runs" / "run").read_metrics()
    return metrics[-1]["step"] if metrics else 0


def process_of_rank(launcher: int, rank: int) -> int:
    """The process that the launcher started for ``rank``."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            variables = (folder / "environ").read_bytes().split(b"\0")
            if parent == launcher and f"RANK={rank}".encode() in variables:
                return int(folder.name)
    raise LookupError(rank)


def checkpoint_of(folder: Path) -> Any:
    found = fullshard.latest(folder / "runs" / "run" / "checkpoints")
    assert found is not None
    return found


def test_ctrl_c_saves_and_leaves(tmp_path: Path) -> None:
    with started(tmp_path, *TINY.split(), "--steps", "1000000", "--save-every", "0") as process:
        wait_for_step(tmp_path, 3, process)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=LONGEST)

    assert process.returncode == 130
    (step,) = re.findall(r"Stopped after step (\d+); it is saved", output)
    assert checkpoint_of(tmp_path).step == int(step)
    assert "fullshard train --resume --name run" in output
    assert "Traceback" not in output


def test_a_killed_rank_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    with started(tmp_path, *TINY.split(), "--steps", "1000000", "--save-every", "2") as process:
        wait_for_step(tmp_path, 5, process)
        os.kill(process_of_rank(process.pid, 1), signal.SIGKILL)
        output, _ = process.communicate(timeout=LONGEST)

    assert process.returncode == 128 + signal.SIGKILL
    assert "Rank 1 failed first: killed by SIGKILL" in output
    assert checkpoint_of(tmp_path).step >= 4


def test_with_restarts_a_run_goes_on_by_itself_after_a_rank_was_killed(tmp_path: Path) -> None:
    options = [*TINY.split(), "--steps", "80", "--save-every", "10", "--max-restarts", "1"]
    with started(tmp_path, *options) as process:
        wait_for_step(tmp_path, 12, process)
        os.kill(process_of_rank(process.pid, 1), signal.SIGKILL)
        output, _ = process.communicate(timeout=LONGEST)

    assert process.returncode == 0, output
    resumed = re.findall(r"resuming +after step (\d+)", output)
    assert len(resumed) == 1
    assert "Rank 1 failed first: killed by SIGKILL" in output
    assert "Traceback" not in output
    assert int(resumed[0]) >= 10
    metrics = RunFolder(tmp_path / "runs" / "run").read_metrics()
    assert [line["step"] for line in metrics] == [*range(1, 81)]


def test_the_same_command_runs_under_torchrun(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", "-m", "fullshard.cli.main", "train"]

    done = subprocess.run(
        [*command, "--steps", "4", *TINY.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment(),
        timeout=LONGEST,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 4/4") == 1, done.stdout
    assert (tmp_path / "runs" / "run-1" / "loss.png").exists()


def test_two_machines_train_together(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    options = [*TINY.replace("--ranks 2", "--ranks 1").split(), "--steps", "4"]
    meeting = ["--nodes", "2", "--rendezvous", place]

    with (
        started(tmp_path, *options, *meeting) as first,
        started(tmp_path, *options, *meeting) as second,
    ):
        outputs = [machine.communicate(timeout=LONGEST)[0] for machine in (first, second)]

    assert (first.returncode, second.returncode) == (0, 0), outputs
    assert sum(output.count("step 4/4") for output in outputs) == 1
    assert sum(output.count("ranks     2 (CPU)") for output in outputs) == 1
