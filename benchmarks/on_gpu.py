"""Everything that needs a GPU: the tests over NCCL, and the benchmarks.

    PYTHONPATH=src python3 benchmarks/on_gpu.py --list
    PYTHONPATH=src python3 benchmarks/on_gpu.py --part speed --folder results --before earlier/src
    PYTHONPATH=src python3 benchmarks/on_gpu.py --only trace faults --seconds 540

A part takes nine minutes at most, so that a machine can be shared. A part's stages run one after
the other, the most important ones first. Each is a process of its own
with a time limit; what it prints is shown when it ends, and kept in the folder beside its JSON and
pictures. No stage begins that would end after ``--seconds``: it gets what is left, if that is at
least half of its limit. With ``--before``, a step of the fullshard in that folder is measured in
turns with this one (``git archive COMMIT src | tar -x -C earlier`` puts one there). Ends with
status 1 if a stage failed, or was not run.
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
#: Words in its output that are counted in its verdict.
TOLD = ("MISS", "not measured", "not run")


@dataclass(frozen=True)
class Stage:
    """A command, the seconds that it may take, and the names of the files that it is told to write.

    ``{folder}`` in the command is where results are kept.
    """

    command: str
    limit: float
    writes_json: bool = True


OVER_NCCL = "tests/over_nccl.py --jobs 6 --log {folder}/nccl.txt"
#: In each part, the stages that the others of it can do without come last.
PARTS: dict[str, dict[str, Stage]] = {
    "speed": {
        "step": Stage(
            "benchmarks/step.py --capture --cases 184M@64 1.34B@8 1.34B@64 llama@8 --steps 3 "
            "--warmup 2 --rounds 8 --seconds 320",
            365,
        ),
        "encoded": Stage(
            "benchmarks/overlap.py --rows fullshard 'fullshard int8' --capture "
            "--bandwidths 100 50 800 --rounds 2 --steps 2 --warmup 2 --seconds 110",
            145,
        ),
    },
    "engine": {
        "nccl-engine": Stage(f"{OVER_NCCL} tests/engine tests/grad --until 290", 330, False),
        "faults": Stage(
            "benchmarks/faults.py --backend nccl --ranks 2 4 8 --limit 45 --seconds 190", 200
        ),
    },
    "models": {
        "nccl-models": Stage(f"{OVER_NCCL} tests/hazards tests/original --until 230", 270, False),
        "nccl-state": Stage(f"{OVER_NCCL} tests/state --until 230", 270, False),
    },
    "sights": {
        "trace": Stage(
            "benchmarks/trace.py --simulate 64 --bandwidth 100 --rounds 20 "
            "--page {folder}/trace.html",
            80,
        ),
        "programs": Stage("tests/compat/fully_shard_side_by_side.py", 120, False),
        "whole-tensors": Stage("benchmarks/whole_tensors.py --rounds 3 --steps 2 --seconds 45", 70),
        "optimizer": Stage("benchmarks/optimizer_step.py --model 1.34B --rounds 10", 30),
        "encoding": Stage("benchmarks/encoding.py --device cuda --mebi 64", 20),
        "profile": Stage("benchmarks/profile_step.py --case 184M@64", 30),
        "nccl-captured": Stage(f"{OVER_NCCL} tests/captured tests/optim", 150, False),
    },
    "apis": {
        "nccl-fully-shard": Stage(f"{OVER_NCCL} tests/fully_shard --until 230", 270, False),
        "overlap": Stage(
            "benchmarks/overlap.py --rounds 2 --steps 3 --warmup 2 --seconds 180", 270
        ),
    },
    "learning": {
        # A run that the limit cuts off goes on from its last checkpoint when the part is run again.
        "learning": Stage(
            "benchmarks/learning.py --device cuda --steps 4000 --jobs 9 --runs {folder}/learning "
            "--set layers=4 width=192 heads=6 sequence=128 batch=32 precision=bfloat16 "
            "--picture {folder}/learning.png",
            540,
        ),
    },
}
STAGES = {name: stage for stages in PARTS.values() for name, stage in stages.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--part", choices=PARTS)
    which.add_argument("--only", nargs="+", choices=STAGES, default=[*STAGES], metavar="STAGE")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all of them")
    parser.add_argument("--folder", type=Path, default=Path("gpu-results"))
    parser.add_argument("--before", type=Path, metavar="SRC", help="another fullshard to measure")
    parser.add_argument("--list", action="store_true", help="show the stages and run none")
    given = parser.parse_args()
    if given.list:
        for part, stages in PARTS.items():
            print(f"{part}: {sum(stage.limit for stage in stages.values()):.0f} s")
            for name, stage in stages.items():
                print(f"  {name:14} {stage.limit:4.0f} s   {stage.command}")
        return 0
    if given.part is not None:
        given.only = [*PARTS[given.part]]
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
    command = [sys.executable, *shlex.split(stage.command.format(folder=given.folder))]
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
    if status != 0:
        return f"ended with status {status}, {seconds}"
    text = log.read_text(errors="replace")
    counts = [(word, text.count(word)) for word in TOLD]
    return ", ".join(["ok", seconds, *(f"{count} x {word}" for word, count in counts if count)])


if __name__ == "__main__":
    sys.exit(main())
