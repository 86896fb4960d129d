"""Programs for torch's fully_shard, each run twice: on torch's own, and under ``fullshard run``.

    python3 -m tests.compat.fully_shard_side_by_side

prints the losses of both, and ends with status 1 if any differ by more than one part in ten
thousand, or a program fails. Where there is a GPU the ranks share it, over NCCL.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = ROOT / "examples" / "clients"
ON_ONE_GPU = ROOT / "tests" / "compat" / "each_rank_a_host.py"
PROGRAMS = ("fully_shard_train", "accelerate_fully_shard", "trainer_fully_shard")
#: How each of the two launches a program on two ranks.
LAUNCHERS = {
    "torch": ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
    "fullshard": ["fullshard", "run", "--ranks", "2"],
}
#: Relative; both add the same numbers up, on a GPU maybe in another order.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Outcome:
    """What a program printed of its losses, or how it ended."""

    losses: tuple[float, ...]
    error: str
    seconds: float


def outcome(program: str, launcher: str, *, limit: float = 110) -> Outcome:
    """Run a program and read its losses."""
    command = [sys.executable, "-m", *LAUNCHERS[launcher]]
    if torch.cuda.is_available():
        command.append(str(ON_ONE_GPU))
    command.append(str(CLIENTS / f"{program}.py"))
    started = time.monotonic()
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired as late:
        told = late.stderr.decode() if isinstance(late.stderr, bytes) else late.stderr or ""
        return Outcome((), f"not over after {limit:.0f} s\n{told}", limit)
    seconds = time.monotonic() - started
    if run.returncode != 0:
        return Outcome((), run.stderr or run.stdout, seconds)
    lists = re.findall(r"^losses \[(.*?)\]", run.stdout, re.MULTILINE)
    losses = tuple(float(loss) for each in lists for loss in each.split(","))
    return Outcome(losses, "" if losses else "no losses printed\n" + run.stdout, seconds)


def difference(one: Outcome, other: Outcome) -> float:
    """The largest relative difference of losses; infinite where there are none to compare."""
    if one.error or other.error or len(one.losses) != len(other.losses):
        return float("inf")
    pairs = zip(one.losses, other.losses, strict=True)
    return max(abs(a - b) / max(abs(a), 1e-12) for a, b in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", nargs="*", default=PROGRAMS, help="by default all")
    parser.add_argument(
        "--together",
        type=int,
        default=6 if torch.cuda.is_available() else 1,
        help="how many runs at a time",
    )
    given = parser.parse_args()
    cases = [(program, launcher) for program in given.programs for launcher in LAUNCHERS]
    with ThreadPoolExecutor(given.together) as pool:
        found = dict(zip(cases, pool.map(lambda case: outcome(*case), cases), strict=True))
    failed = False
    for program in given.programs:
        theirs, ours = found[program, "torch"], found[program, "fullshard"]
        apart = difference(theirs, ours)
        passed = apart <= TOLERANCE
        failed = failed or not passed
        print(f"{'PASSED' if passed else 'FAILED'}  {program}: losses {apart:.1e} apart")
        for launcher, each in (("torch", theirs), ("fullshard", ours)):
            print(f"    {launcher:9}  {each.seconds:5.1f} s  {list(each.losses)}")
            if each.error:
                print("        " + "\n        ".join(each.error.splitlines()[-30:]))
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
