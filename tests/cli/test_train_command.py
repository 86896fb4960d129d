"""``fullshard train`` as users start it: real processes, real signals.

Every process imports torch first, which is most of the time here. So what can be seen in one run is
seen in one, and the launcher is the process of the tests where none is to be signalled.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed.run
from tests.marks import in_long_runs

import fullshard
from fullshard.cli.main import main
from fullshard.cli.trainer.run_folder import RunFolder
from fullshard.ports import reserve_port

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


def wait_for_step(folder: Path, step: int, goes_on: Callable[[], bool]) -> None:
    """Return when the run in ``folder`` has made ``step``."""
    end = time.monotonic() + LONGEST
    while last_step(folder) < step:
        assert goes_on(), "the run has ended"
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


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, for ranks that this process starts."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    return tmp_path


def test_with_restarts_a_run_goes_on_by_itself_after_a_rank_was_killed(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    options = [*TINY.split(), "--steps", "80", "--save-every", "10", "--max-restarts", "1"]
    monkeypatch.setattr(sys, "argv", ["fullshard", "train", "--name", "run", *options])

    ended = threading.Event()

    def kill() -> None:
        wait_for_step(here, 12, lambda: not ended.is_set())
        os.kill(process_of_rank(os.getpid(), 1), signal.SIGKILL)

    with ThreadPoolExecutor(1) as other_thread:
        killed = other_thread.submit(kill)
        with pytest.raises(SystemExit) as left:
            main()
        ended.set()
        killed.result()

    output, errors = capfd.readouterr()
    assert left.value.code == 0, errors
    resumed = re.findall(r"resuming +after step (\d+)", output)
    assert len(resumed) == 1
    assert "Rank 1 failed first: killed by SIGKILL" in errors
    assert "Traceback" not in errors
    assert int(resumed[0]) >= 10
    metrics = RunFolder(here / "runs" / "run").read_metrics()
    assert [line["step"] for line in metrics] == [*range(1, 81)]


@in_long_runs
def test_with_restarts_a_run_goes_on_from_the_newest_checkpoint_that_is_whole(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    options = [*TINY.split(), "--steps", "60", "--save-every", "5", "--max-restarts", "1"]
    monkeypatch.setattr(sys, "argv", ["fullshard", "train", "--name", "run", *options])
    checkpoints = here / "runs" / "run" / "checkpoints"
    ended = threading.Event()

    def damage_and_kill() -> Path:
        wait_for_step(here, 12, lambda: not ended.is_set())
        victim = process_of_rank(os.getpid(), 1)
        # Then no further checkpoint becomes whole.
        os.kill(victim, signal.SIGSTOP)
        time.sleep(0.5)
        newest = fullshard.latest(checkpoints)
        assert newest is not None
        data = max(newest.path.glob("*.bin"), key=lambda file: file.stat().st_size)
        data.write_bytes(bytes(data.stat().st_size))
        os.kill(victim, signal.SIGKILL)
        return data

    with ThreadPoolExecutor(1) as other_thread:
        killed = other_thread.submit(damage_and_kill)
        with pytest.raises(SystemExit) as left:
            main()
        ended.set()
        damaged = killed.result()

    output, errors = capfd.readouterr()
    assert left.value.code == 0, errors
    assert output.count("\nskipped   ") == 1
    assert f"\nskipped   {damaged.relative_to(here)} is damaged" in output
    step = int(damaged.parent.name.removeprefix("step-"))
    assert re.findall(r"resuming +after step (\d+)", output) == [str(step - 5)]
    assert "Warning" not in errors
    # It is there with what is in it, though its step was saved again, and others since.
    assert set(damaged.read_bytes()) == {0}
    metrics = RunFolder(here / "runs" / "run").read_metrics()
    assert [line["step"] for line in metrics] == [*range(1, 61)]


@in_long_runs
def test_a_finished_run_says_so_and_is_extended_when_asked(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def train(*words: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["fullshard", "train", *words])
        with pytest.raises(SystemExit) as left:
            main()
        return left.value.code, *capfd.readouterr()

    train("--name", "run", "--steps", "4", "--warmup", "1", *TINY.split())

    again = train("--resume")
    backwards = train("--resume", "--steps", "2")
    longer = train("--resume", "--steps", "8")

    finished = "runs/run is finished, at step 4 of 4: there is nothing to do. "
    hint = "To train it further, pass more steps: fullshard train --resume --name run --steps 8\n"
    assert again == (0, finished + hint, "")
    assert backwards[:2] == (2, "")
    assert backwards[2].startswith("fullshard: runs/run is already at step 4, past --steps 2")
    assert longer[0] == 0, longer
    # Of 3 steps down from 0.003 to a tenth of it, none is left; of 7, 4 are done.
    assert (
        "rate      up from 0.0003 to 0.00135: the cosine schedule now ends at step 8" in longer[1]
    )
    assert [metrics["step"] for metrics in RunFolder(here / "runs/run").read_metrics()] == [
        *range(1, 9)
    ]


def test_the_same_command_runs_under_torchrun(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["--standalone", "--nproc-per-node", "2", "-m", "fullshard.cli.main", "train"]

    torch.distributed.run.main([*command, "--steps", "4", *TINY.split()])

    assert capfd.readouterr().out.count("step 4/4") == 1
    assert (here / "runs" / "run-1" / "loss.png").exists()


def test_two_machines_train_together_until_ctrl_c_and_save(tmp_path: Path) -> None:
    options = [*TINY.replace("--ranks 2", "--ranks 1").split(), "--steps", "1000000"]
    options += ["--save-every", "0", "--nodes", "2"]

    with reserve_port("127.0.0.1") as reserved, contextlib.ExitStack() as stack:
        options += ["--rendezvous", f"127.0.0.1:{reserved.getsockname()[1]}"]
        first, second = (stack.enter_context(started(tmp_path, *options)) for _ in range(2))
        machines = (first, second)
        wait_for_step(tmp_path, 3, lambda: first.poll() is None)
        for machine in machines:
            machine.send_signal(signal.SIGINT)
        outputs = [machine.communicate(timeout=LONGEST)[0] for machine in machines]

    assert [machine.returncode for machine in machines] == [130, 130], outputs
    output = "".join(outputs)
    assert output.count("ranks     2 (CPU)") == 1
    (step,) = re.findall(r"Stopped after step (\d+), which is saved", output)
    saved = fullshard.latest(tmp_path / "runs" / "run" / "checkpoints")
    assert saved is not None
    assert saved.step == int(step)
    assert "fullshard train --resume --name run" in output
    assert "Traceback" not in output
