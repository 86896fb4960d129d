"""The example for Slurm on a cluster of two nodes: it trains, is preempted, and goes on."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cluster.hosts import why_not
from tests.cluster.slurm import COMMANDS, Slurm, slurm
from tests.marks import in_long_runs

import fullshard

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "cluster"
_MISSING = [name for name in COMMANDS if shutil.which(name) is None]
_REASON = f"Slurm is not installed: no {', '.join(_MISSING)}" if _MISSING else why_not()
pytestmark = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))


def wait_until(happened: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + 300
    while not happened():
        said = log.read_text() if log.exists() else "nothing"
        assert time.monotonic() < deadline, said
        time.sleep(0.3)


def losses_in(log: Path) -> dict[int, str]:
    said = log.read_text() if log.exists() else ""
    return {int(step): loss for step, loss in re.findall(r"^step (\d+) loss (\S+)$", said, re.M)}


@in_long_runs
def test_a_job_on_two_nodes_that_slurm_signals_saves_is_requeued_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = Path(sys.executable).parent
    if not (scripts / "fullshard").exists():
        pytest.skip(f"the fullshard command is not installed in {scripts}")
    monkeypatch.setenv("PATH", str(scripts), prepend=":")
    folder, log = tmp_path / "run", tmp_path / "job.log"
    with slurm(tmp_path) as cluster:
        job = submit(cluster, folder, log)
        wait_until(lambda: len(losses_in(log)) >= 3, log)

        cluster.command("scancel", "--signal=TERM", job)

        wait_until(lambda: cluster.state(job) == "PENDING", log)
        saved = fullshard.latest(folder)
        assert saved is not None
        assert saved.step == len(losses_in(log)) < 30
        assert f"saved step {saved.step}, leaving after SIGTERM" in log.read_text()
        # Slurm waits for two minutes. At once is too early: nodes still refuse the job's old key.
        cluster.command("scontrol", "update", f"JobId={job}", "StartTime=now+5")
        wait_until(lambda: cluster.state(job) == "COMPLETED", log)

    said = log.read_text()
    assert f"4 ranks, from step {saved.step + 1}" in said
    assert sorted(losses_in(log)) == list(range(1, 31))
    assert said.count(" loss ") == 30  # none of them twice
    assert "failed" not in said


def submit(cluster: Slurm, folder: Path, log: Path) -> str:
    options = ["--steps", "30", "--seconds-per-step", "0.2", "--save-every", "1000"]
    said = cluster.command(
        "sbatch",
        f"--output={log}",
        str(EXAMPLES / "slurm.sbatch"),
        *options,
        FOLDER=str(folder),
        PROGRAM=str(EXAMPLES / "train.py"),
        RANKS_PER_NODE="2",
    )
    return said.split()[-1]
