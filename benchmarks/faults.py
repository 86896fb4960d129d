"""What every rank says, and when, after one rank does something wrong.

    python benchmarks/faults.py --backend nccl --limit 50 --seconds 150 --json faults.json

For each fault, number of ranks and way of starting them, a small model is trained on real ranks by
``faulty_training.py``; several cases run at the same time. Times are seconds after the fault. Over
NCCL, ranks share the machine's GPUs.
"""

from __future__ import annotations

import argparse
import atexit
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("faulty_training.py")
NURSERY = Path(__file__).with_name("fault_nursery.py")
FAULTS = {
    "skip": "skips a unit",
    "exception": "raises an exception",
    "kill": "is killed (kill -9)",
    "hang": "hangs in user code",
    "stop": "is stopped, and continued",
    "leave": "leaves the training loop",
    "exit": "calls sys.exit(0)",
    "quit": "calls os._exit(1)",
}
#: Where in a step it does.
PLACES = {
    "loop": "",
    "forward": ", in forward",
    "backward": ", in backward",
    "optimizer": ", in the optimizer",
    "evaluation": ", in evaluation",
    "save": ", as a checkpoint is begun",
    "write": ", as a checkpoint is written",
}
MODELS = ("wrapper", "fully_shard", "hybrid")
#: Who starts the ranks, and with which command.
LAUNCHERS = {
    "none": (),
    "fullshard": ("-m", "fullshard", "run", "--ranks"),
    "torchrun": ("-m", "torch.distributed.run", "--nproc-per-node"),
}
#: Lines of standard error that name an error: of Python's, of c10d's log, or of the C++ runtime's.
_ERROR = re.compile(
    r"^(?:\[rank\d+\]: ?)?(?:\w+\.)*(\w+(?:Error|Exception): .*)$"
    r"|^(\[rank\d+\]:\[[EF]\d+.*|terminate called.*)$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Outcome:
    """What became of one rank."""

    rank: int
    #: Seconds from the fault to an error, to the end of the process, and to the first warning.
    told: float | None
    ended: float | None
    warned: float | None
    first_error: str
    warning: str
    steps: int
    status: int | None


@dataclass(frozen=True)
class Case:
    fault: str
    backend: str
    ranks: int
    launcher: str
    rank_at_fault: int
    leave_at_once: bool = False
    where: str = "loop"
    #: The step in which it happens: 0 is the first one.
    step: int = 3
    model: str = "wrapper"
    sums_losses: bool = False
    destroys_group: bool = False
    seconds: float = 20.0
    #: Seconds after which ranks are killed that have not ended.
    limit: float = 60.0


def run(case: Case, keep_logs: Path | None = None) -> list[Outcome]:
    """Train with a fault; what became of each rank."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if case.launcher != "none":
            logs = [folder / "launcher.log"] * case.ranks
            ends = [_run_with_launcher(case, folder)] * case.ranks
        else:
            logs = [folder / f"rank{rank}.log" for rank in range(case.ranks)]
            ends = _run_ranks(case, folder, logs)
        if keep_logs is not None:
            _keep(logs, keep_logs, case)
        return _outcomes(case, folder, ends, logs)


def _keep(logs: list[Path], folder: Path, case: Case) -> None:
    at_fault = case.rank_at_fault % case.ranks
    name = f"{case.fault}-{case.where}-{case.step}-{case.model}"
    name += f"-{case.ranks}-{at_fault}-{case.launcher}.log"
    parts = [f"== {log.name}\n{log.read_text(errors='replace')}" for log in dict.fromkeys(logs)]
    (folder / name).write_text("\n".join(parts))


def _arguments(case: Case, folder: Path) -> list[str]:
    words = [str(PROGRAM), "--folder", str(folder), "--fault", case.fault]
    words += ["--rank-at-fault", str(case.rank_at_fault), "--backend", case.backend]
    words += ["--seconds", str(case.seconds), "--where", case.where, "--model", case.model]
    words += ["--fault-step", str(case.step)]
    words += ["--leave-at-once"] * case.leave_at_once
    words += ["--sums-losses"] * case.sums_losses
    return words + ["--destroys-group"] * case.destroys_group


def _run_ranks(case: Case, folder: Path, logs: list[Path]) -> list[tuple[float, int | None]]:
    """Run ranks that nobody watches; when and how each ended."""
    port = _free_port()
    ranks = []
    for rank, log in enumerate(logs):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(case.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        arguments = _arguments(case, folder)
        ranks.append({"environment": environment, "log": str(log), "arguments": arguments})
    nursery = _nursery()
    assert nursery.stdin is not None
    assert nursery.stdout is not None
    nursery.stdin.write(json.dumps({"ranks": ranks, "limit": case.limit}) + "\n")
    nursery.stdin.flush()
    return [(ended, status) for ended, status in json.loads(nursery.stdout.readline())]


#: A nursery per thread that runs cases.
_own = threading.local()


def _nursery() -> subprocess.Popen[str]:
    if not hasattr(_own, "nursery"):
        _own.nursery = subprocess.Popen(
            [sys.executable, str(NURSERY)],
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        # It ends when nothing is left to read.
        atexit.register(_own.nursery.communicate)
    nursery: subprocess.Popen[str] = _own.nursery
    return nursery


def _run_with_launcher(case: Case, folder: Path) -> tuple[float, int | None]:
    command = [sys.executable, *LAUNCHERS[case.launcher], str(case.ranks)]
    with (folder / "launcher.log").open("wb") as output:
        process = subprocess.Popen(
            [*command, *_arguments(case, folder)], env=_environment(), stdout=output, stderr=output
        )
        try:
            status: int | None = process.wait(case.limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            status = None
    return time.time(), status


def _environment() -> dict[str, str]:
    kept = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **kept}


def _outcomes(
    case: Case, folder: Path, ends: list[tuple[float, int | None]], logs: list[Path]
) -> list[Outcome]:
    diaries: list[dict[str, Any]] = []
    for rank in range(case.ranks):
        file = folder / f"rank{rank}.json"
        diaries.append(json.loads(file.read_text()) if file.exists() else {})
    fault_at = next((d["fault_at"] for d in diaries if "fault_at" in d), None)
    if fault_at is None:
        raise RuntimeError(f"No fault happened in {case}:\n{logs[0].read_text()[-3000:]}")
    outcomes = []
    for rank, diary in enumerate(diaries):
        ended, status = ends[rank]
        warned = diary.get("warned_at")
        outcomes.append(
            Outcome(
                rank=rank,
                told=diary["ended_at"] - fault_at if "error" in diary else None,
                ended=None if status is None else ended - fault_at,
                warned=None if warned is None else warned - fault_at,
                first_error=_first_error(case, diary, logs[rank]),
                warning=diary.get("warned", ""),
                steps=diary.get("steps", 0),
                status=status,
            )
        )
    return outcomes


def _first_error(case: Case, diary: dict[str, Any], log: Path) -> str:
    """What a user reads first: from the rank's own output where it has one."""
    if case.launcher != "none":
        said: str = diary.get("error", "")
        return said.partition("\n")[0]
    found = _ERROR.search(log.read_text(errors="replace"))
    return (found.group(1) or found.group(2)) if found else ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# -- the table ---------------------------------------------------------------------------------

HEADER = (
    *("a rank …", "which", "launcher", "others warned, by", "others raise, by"),
    *("all ended after s", "its own first error", "the others' first error"),
)


def describe(case: Case, outcomes: list[Outcome]) -> list[str]:
    """The cells of a row of the table."""
    at_fault = case.rank_at_fault % case.ranks
    others = [outcome for outcome in outcomes if outcome.rank != at_fault]
    ends = [outcome.ended for outcome in outcomes]
    went_on = all(outcome.status == 0 and not outcome.first_error for outcome in outcomes)
    last = "not all" if None in ends else f"{max(end or 0.0 for end in ends):.1f}"
    errors = [outcome.told for outcome in others if outcome.told is not None]
    warned = [outcome.warned for outcome in others if outcome.warned is not None]
    told = f"{len(warned)} of {len(others)}, {max(warned):.1f} s" if warned else "no"
    return [
        FAULTS[case.fault] + PLACES[case.where] + _details(case),
        f"{at_fault} of {case.ranks}",
        case.launcher,
        told,
        f"{len(errors)} of {len(others)}, {max(errors):.1f} s" if errors else "no",
        "went on" if went_on else last,
        *_errors(outcomes, at_fault),
    ]


def _details(case: Case) -> str:
    details = {
        "in the first step": case.step == 0,
        "fully_shard": case.model == "fully_shard",
        "HYBRID_SHARD": case.model == "hybrid",
        "which sums losses": case.sums_losses,
        "which destroys its group": case.destroys_group,
        "others leave at once": case.leave_at_once,
    }
    return "".join(f", {words}" for words, applies in details.items() if applies)


def _errors(outcomes: list[Outcome], at_fault: int) -> list[str]:
    """First errors, of the rank at fault and of the others, each with the ranks that saw it."""
    cells = []
    for chosen in ([at_fault], [o.rank for o in outcomes if o.rank != at_fault]):
        said: dict[str, list[int]] = {}
        for rank in chosen:
            said.setdefault(_short(outcomes[rank].first_error), []).append(rank)
        cells.append("; ".join(f"{ranks}: {text}" for text, ranks in said.items()))
    return cells


def _short(error: str) -> str:
    if not error:
        return "none"
    error = re.sub(r"rank \d+ waits", "rank … waits", error)
    return error if len(error) <= 170 else error[:170] + "…"


class _Places:
    """How many ranks may run at the same time. A case that needs more than all runs alone."""

    def __init__(self, count: int) -> None:
        self._count = self._free = count
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, wanted: int) -> Iterator[None]:
        wanted = min(wanted, self._count)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= wanted)
            self._free -= wanted
        try:
            yield
        finally:
            with self._changed:
                self._free += wanted
                self._changed.notify_all()


def choose_cases(given: argparse.Namespace) -> list[Case]:
    """All combinations; over NCCL, where ranks take long to start, with one rank at fault each."""
    cases = []
    ways = itertools.product(given.faults, given.where, given.model, given.ranks, given.launcher)
    for fault, where, model, ranks, launcher in ways:
        at_fault = given.at_fault or ["first", "last"]
        if given.at_fault is None and given.backend == "nccl":
            # The first rank provides the store.
            at_fault = ["first"] if ranks == min(given.ranks) else ["last"]
        for name in at_fault:
            rank = {"first": 0, "last": -1}[name]
            case = Case(fault, given.backend, ranks, launcher, rank, limit=given.limit)
            options = ("step", "sums_losses", "destroys_group")
            more = {name: getattr(given, name) for name in options}
            cases.append(replace(case, where=where, model=model, **more))
    return cases


def run_all(
    cases: list[Case],
    at_a_time: int,
    seconds: float,
    note: Callable[[Case, list[Outcome]], None],
    keep_logs: Path | None = None,
) -> None:
    """Run cases beside each other; none is begun that might take longer than ``seconds`` allow."""
    places, deadline = _Places(at_a_time), time.monotonic() + seconds

    def act(case: Case) -> None:
        with places.taken(case.ranks):
            if time.monotonic() + case.limit > deadline:
                return
            try:
                note(case, run(case, keep_logs))
            except RuntimeError as error:
                print(error, file=sys.stderr, flush=True)

    # The longest first: the others fit in beside them.
    order = sorted(cases, key=lambda case: (case.fault not in ("hang", "stop"), -case.ranks))
    with ThreadPoolExecutor(max(1, at_a_time // min(case.ranks for case in cases))) as pool:
        list(pool.map(act, order))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--launcher", nargs="+", choices=LAUNCHERS, default=["none"])
    parser.add_argument("--where", nargs="+", choices=PLACES, default=["loop"])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["wrapper"])
    parser.add_argument("--step", type=int, default=3, help="of the fault, from 0")
    parser.add_argument("--sums-losses", action="store_true", help="by a collective of their own")
    parser.add_argument("--destroys-group", action="store_true", help="however training ends")
    parser.add_argument("--at-fault", nargs="+", choices=("first", "last"))
    parser.add_argument("--at-a-time", type=int, default=24, help="ranks at the same time")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for a case")
    parser.add_argument("--seconds", type=float, default=3600.0, help="seconds for all of them")
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    parser.add_argument("--logs", type=Path, help="keep what ranks printed in this folder")
    given = parser.parse_args()
    began, results, lock = time.monotonic(), {}, threading.Lock()
    cases = choose_cases(given)
    if given.logs is not None:
        given.logs.mkdir(parents=True, exist_ok=True)

    def note(case: Case, outcomes: list[Outcome]) -> None:
        with lock:
            results[case] = outcomes
            # At once: whoever runs this may have little time.
            print(row(case, results), flush=True)
            if given.json is not None:
                content = [
                    {"case": asdict(case), "outcomes": [asdict(outcome) for outcome in outcomes]}
                    for case, outcomes in results.items()
                ]
                given.json.write_text(json.dumps(content, indent=2) + "\n")

    run_all(cases, given.at_a_time, given.seconds, note, given.logs)
    print(f"\n| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
    for case in cases:
        print(row(case, results))
    print(f"\n{len(results)} of {len(cases)} cases in {time.monotonic() - began:.0f} s")


def row(case: Case, results: dict[Case, list[Outcome]]) -> str:
    """A row of the table."""
    if case not in results:
        return f"| {FAULTS[case.fault]} | of {case.ranks} | not run |"
    return f"| {' | '.join(describe(case, results[case]))} |"


if __name__ == "__main__":
    main()
