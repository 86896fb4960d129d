"""SIGTERM to ``fullshard run``: ranks save in the time they have, and the run can be continued."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.marks import in_long_runs

import fullshard
from fullshard.ports import reserve_port

EXAMPLE = str(Path(__file__).resolve().parents[2] / "examples" / "cluster" / "train.py")
LONGEST = 300.0


@contextlib.contextmanager
def started(output: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher whose output goes into a file; it is killed with the context."""
    with output.open("w") as file:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "fullshard.cli.launcher.run", *words], stdout=file, stderr=file
        )
        try:
            yield launcher
        finally:
            launcher.kill()
            launcher.wait()


def wait_for(output: Path, text: str) -> None:
    deadline = time.monotonic() + LONGEST
    while text not in output.read_text():
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.02)


def losses_in(*outputs: Path) -> list[str]:
    return [
        line
        for output in outputs
        for line in output.read_text().splitlines()
        if re.match(r"step \d+ loss", line)
    ]


def test_a_run_that_was_asked_to_leave_saves_and_goes_on_with_the_same_losses(
    tmp_path: Path,
) -> None:
    whole, before, after = (tmp_path / name for name in ("whole", "before", "after"))
    words = ["--ranks", "2", EXAMPLE, "--steps", "40", "--save-every", "1000"]
    with started(whole, *words, "--folder", str(tmp_path / "other")) as launcher:
        assert launcher.wait(LONGEST) == 0
    words += ["--folder", str(tmp_path / "run")]

    with started(before, *words, "--seconds-per-step", "0.2") as launcher:
        wait_for(before, "step 3 loss")
        launcher.send_signal(signal.SIGTERM)
        asked = time.monotonic()
        assert launcher.wait(LONGEST) == 143, before.read_text()
        assert time.monotonic() - asked < 30
    saved = fullshard.latest(tmp_path / "run")
    assert saved is not None
    assert saved.step == len(losses_in(before)) < 40
    assert "Stopped by SIGTERM; all ranks were ended." in before.read_text()
    assert "failed" not in before.read_text()

    with started(after, *words) as launcher:
        assert launcher.wait(LONGEST) == 0
    assert f"from step {saved.step + 1}" in after.read_text()
    assert losses_in(before, after) == losses_in(whole)


@in_long_runs
def test_ranks_that_a_scheduler_signals_as_well_as_their_launcher_still_save(
    tmp_path: Path,
) -> None:
    output = tmp_path / "output"
    words = ["--ranks", "2", EXAMPLE, "--folder", str(tmp_path / "run"), "--steps", "100000"]
    with started(output, *words, "--seconds-per-step", "0.5") as launcher:
        wait_for(output, "step 2 loss")
        ranks = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        assert len(ranks) == 2
        for process in (*map(int, ranks), launcher.pid):
            os.kill(process, signal.SIGTERM)
        assert launcher.wait(LONGEST) == 143, output.read_text()

    saved = fullshard.latest(tmp_path / "run")
    assert saved is not None
    assert saved.step == len(losses_in(output))


@in_long_runs
def test_when_one_of_two_hosts_is_asked_to_leave_both_leave_and_neither_starts_again(
    tmp_path: Path,
) -> None:
    outputs = [tmp_path / "first", tmp_path / "second"]
    with reserve_port("127.0.0.1") as reserved, contextlib.ExitStack() as stack:
        words = ["--ranks", "1", "--nnodes", "2", "--max-restarts", "3", "--rdzv-backend", "c10d"]
        words += ["--rdzv-endpoint", f"127.0.0.1:{reserved.getsockname()[1]}", EXAMPLE]
        words += ["--folder", str(tmp_path / "run"), "--steps", "100000"]
        words += ["--seconds-per-step", "0.1"]
        launchers = [stack.enter_context(started(output, *words)) for output in outputs]
        deadline = time.monotonic() + LONGEST
        while not losses_in(*outputs):
            assert time.monotonic() < deadline, [output.read_text() for output in outputs]
            time.sleep(0.05)
        launchers[1].send_signal(signal.SIGTERM)
        statuses = [launcher.wait(LONGEST) for launcher in launchers]

    assert statuses == [143, 143], [output.read_text() for output in outputs]
    assert "Stopped by SIGTERM, which a rank was sent; all ranks left in order." in (
        outputs[0].read_text()
    )
    saved = fullshard.latest(tmp_path / "run")
    assert saved is not None
    assert saved.step == len(losses_in(*outputs))


def test_ranks_that_have_not_left_when_the_time_is_up_are_killed_and_named(tmp_path: Path) -> None:
    output, program = tmp_path / "output", tmp_path / "program.py"
    program.write_text(
        "import os, signal, sys, time\n"
        "if os.environ['RANK'] == '1': signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('rank', os.environ['RANK'], 'waits', flush=True)\n"
        "time.sleep(600)\n"
    )
    with started(output, "--ranks", "2", "--shutdown-timeout", "1", str(program)) as launcher:
        wait_for(output, "rank 0 waits")
        wait_for(output, "rank 1 waits")
        launcher.send_signal(signal.SIGTERM)
        asked = time.monotonic()
        assert launcher.wait(LONGEST) == 143
        assert time.monotonic() - asked < 10

    assert "Killed, because they had not ended in time: ranks [1] (--shutdown-timeout" in (
        output.read_text()
    )


@pytest.mark.skipif(sys.platform != "linux", reason="processes end in another way elsewhere")
def test_who_asks_again_later_does_not_wait_for_the_program(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, time\n"
        "from fullshard import StopRequest\n"
        "with StopRequest() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    assert stop.agreed() and stop.exit_status == 143\n"
        "    time.sleep(2.1)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(60)\n"
    )
    assert subprocess.run([sys.executable, program]).returncode == -signal.SIGTERM
