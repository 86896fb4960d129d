"""Everything that needs a GPU, in one command: the tests over NCCL, and the benchmarks.

    PYTHONPATH=src python3 benchmarks/on_gpu.py --list
    PYTHONPATH=src python3 benchmarks/on_gpu.py --only capture step --seconds 540 --folder results

Stages run one after the other, each as a process of its own with a time limit; what it prints is
shown when it ends, and kept in the folder beside its JSON. Where time is short, ``--only`` chooses,
in the order given, and no stage begins that would end after ``--seconds``: it gets what is left, if
that is at least half of its limit. With ``--before``, a step of the fullshard in that folder is
measured in turns with this one. Ends with status 1 if a stage failed, or was not run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Lines of a stage's output that are shown; its file has all of them.
SHOWN = 40


@dataclass(frozen=True)
class Stage:
    """A command, the seconds that it may take, and whether it is told where to put JSON."""

    command: str
    limit: float
    writes_json: bool = True


STAGES = {
    "nccl-engine": Stage("tests/over_nccl.py tests/engine tests/grad", 560, False),
    "nccl-models": Stage("tests/over_nccl.py tests/hazards tests/original", 560, False),
    "nccl-state": Stage("tests/over_nccl.py tests/state tests/fully_shard", 560, False),
    "nccl-captured": Stage("tests/over_nccl.py tests/captured tests/optim", 560, False),
    "faults": Stage("benchmarks/faults.py --backend nccl --ranks 2 4 8 --seconds 540", 560),
    "step": Stage(
        "benchmarks/step.py --rows bare FSDP2 fullshard --rounds 12 --steps 3 --warmup 2 "
        "--cases 1.34B@8 1.34B@64 184M@64",
        300,
    ),
    "fully-shard": Stage(
        "benchmarks/step.py --rows bare FSDP2 fullshard 'fullshard fully_shard' --rounds 8 "
        "--steps 3 --warmup 2 --cases 1.34B@8 1.34B@64 184M@64",
        400,
    ),
    "capture": Stage("benchmarks/step.py --capture --rounds 8 --steps 3", 500),
    "overlap": Stage("benchmarks/overlap.py --rounds 3 --steps 4 --warmup 2", 400),
    "overlap-capture": Stage("benchmarks/overlap.py --capture --rounds 2 --steps 4", 500),
    "encoded": Stage(
        "benchmarks/overlap.py --rows fullshard 'fullshard int8' --bandwidths 800 100 50 "
        "--rounds 2 --steps 4 --warmup 2",
        400,
    ),
    "encoding": Stage("benchmarks/encoding.py --device cuda --mebi 64", 120),
    "whole-tensors": Stage("benchmarks/whole_tensors.py --rounds 6 --steps 3", 400),
    "optimizer": Stage("benchmarks/optimizer_step.py --model 1.34B --rounds 10", 120),
    "trace": Stage("benchmarks/trace.py --ranks 1", 200),
    "nccl-tracing": Stage("tests/over_nccl.py tests/tracing", 300, False),
    "profile": Stage("benchmarks/profile_step.py --case 184M@64", 120),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=STAGES, default=[*STAGES], metavar="STAGE")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all of them")
    parser.add_argument("--folder", type=Path, default=Path("gpu-results"))
    parser.add_argument("--before", type=Path, metavar="SRC", help="another fullshard to measure")
    parser.add_argument("--list", action="store_true", help="show the stages and run none")
    given = parser.parse_args()
    if given.list:
        for name, stage in STAGES.items():
            print(f"{name:16} {stage.limit:4.0f} s   {stage.command}")
        return 0
    given.folder = given.folder.resolve()
    given.folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    verdicts = {}
    for name in given.only:
        left = given.seconds - (time.monotonic() - began)
        limit = min(STAGES[name].limit, left)
        if limit < STAGES[name].limit / 2:
            verdicts[name] = "not run: the time was up"
            continue
        verdicts[name] = _run(name, limit, given)
        print(f"=== {name}: {verdicts[name]}", flush=True)
    print("\n" + "\n".join(f"{name:16} {verdict}" for name, verdict in verdicts.items()))
    return 0 if all(verdict.startswith("ok") for verdict in verdicts.values()) else 1


def _run(name: str, limit: float, given: argparse.Namespace) -> str:
    """Run a stage; says how it ended."""
    stage = STAGES[name]
    command = [sys.executable, *shlex.split(stage.command)]
    if stage.writes_json:
        command += ["--json", str(given.folder / f"{name}.json")]
    if name == "step" and given.before is not None:
        command += ["--before", str(given.before.resolve())]
    log = given.folder / f"{name}.log"
    started = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        with contextlib.suppress(ProcessLookupError):
            # What it started, too: processes of rows, ranks.
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    print("\n".join(log.read_text(errors="replace").splitlines()[-SHOWN:]), flush=True)
    seconds = f"{time.monotonic() - started:.0f} s"
    if status is None:
        return f"ran into its limit after {seconds}"
    return f"ok, {seconds}" if status == 0 else f"ended with status {status}, {seconds}"


if __name__ == "__main__":
    sys.exit(main())
