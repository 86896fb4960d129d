"""How much communication a step does not hide behind compute: fullshard against torch's FSDP1 and
FSDP2, at several bandwidths, beside the ideal schedule.

    PYTHONPATH=src python3 benchmarks/overlap.py --case 9.9B@64 --json overlap.json

One process plays a rank over a process group whose collectives take the time of a network of the
given bandwidth (groups.py), on a stream of their own. "compute ms" is the same row's step with
collectives that cost nothing, "communication ms" what all of a step's collectives took together in
the steps that were timed, "ideal ms" the larger of the two. "exposed ms" is the step less the
compute of the fastest row: that is what the device computes, and what a row's host takes longer is
not. "ends ms" are the gathers of the root and the first unit and the reduces of the same two, which
nothing is there to hide: no schedule of these units is faster than "reachable ms", the compute and
the ends, or the communication if that is more. Rows take turns, round by round. With --capture,
each row is measured as one CUDA graph as well (docs/capture.md), captured anew for each bandwidth.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gpt
import groups
import torch
from bars import show_table, show_verdicts
from rows import CapturedTraining, Setting, Training
from time_limit import TimeLimit
from workers import Worker

ROWS = ["FSDP1", "FSDP2", "fullshard"]
#: Rows that are measured if they are asked for.
ENCODED = ["fullshard int8 gather", "fullshard int8"]
COLUMNS = [
    "step ms",
    "compute ms",
    "communication ms",
    "ends ms",
    "ideal ms",
    "reachable ms",
    "exposed ms",
    "x ideal",
    "x reachable",
]
#: A difference below this part of a step is noise.
NOISE = 0.005
#: How the rows of captured steps are called.
CAPTURED = " captured"


class Contestant:
    """One row in this process, over a network that can be changed."""

    def __init__(self, row: str, case: str, device: str, compute: str, latency_us: float) -> None:
        name, ranks = case.split("@")
        size = gpt.SIZES[name]
        self.device = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
        self.latency_us = latency_us
        self.group = groups.Delayed(int(ranks), None, self.device)
        groups.install(self.group)
        model, batch = gpt.build(size, self.device), gpt.tokens(size, self.device)
        setting = Setting(gpt.Block, getattr(torch, compute))
        captures = row.endswith(CAPTURED)
        kind = row.removesuffix(CAPTURED)
        training = Training(kind, model, batch, setting, counts_on_device=captures)
        self.training = CapturedTraining(training) if captures else training

    def warm_up(self, steps: int) -> dict[str, Any]:
        self.group.fill = True
        for _ in range(steps):
            self.training.step()
        if isinstance(self.training, CapturedTraining):
            # So that the graphs' own buffers are filled.
            self.training.capture()
        self.group.fill = False
        self.rest()
        return {}

    def pace(self, bytes_per_ms: float | None) -> dict[str, float]:
        """What a millisecond of the network is in this process; or make it what is given."""
        if bytes_per_ms is not None:
            self.group.pace = bytes_per_ms
        return {"pace": self.group.pace}

    def turn(self, bandwidth: float | None, steps: int) -> dict[str, float]:
        """Milliseconds per step, and of its collectives, at a bandwidth; None: they are free."""
        self.group.network = self._network(bandwidth)
        traces: list[list[Callable[[], float]]] = [[] for _ in range(steps)]
        if isinstance(self.training, CapturedTraining):
            # A graph has the network of its capture; all its steps are the one that was captured.
            self.group.trace = traces[0]
            self.training.capture()
            self.group.trace = None
            traces = [traces[0]] * steps
            of_replays: list[Any] = [None] * steps
        else:
            of_replays = [*traces]
        # Memory that comes from the device anew is filled; a graph kept its own.
        self.group.fill = isinstance(self.training, Training)
        self.training.step()
        self.group.fill = False
        self._synchronize()
        started = time.perf_counter()
        for self.group.trace in of_replays:
            self.training.step()
        self._synchronize()
        elapsed = time.perf_counter() - started
        self.group.trace = None
        of_steps = [[duration() for duration in trace] for trace in traces]
        self.rest()
        return {
            "step ms": 1e3 * elapsed / steps,
            "communication ms": sum(map(sum, of_steps)) / steps,
            "collectives": sum(map(len, of_steps)) / steps,
            "ends ms": sum(sum(times[:2]) + sum(times[-2:]) for times in of_steps) / steps,
        }

    def rest(self) -> None:
        """Leave the device's memory to the other rows."""
        self._synchronize()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _network(self, bandwidth: float | None) -> groups.Network | None:
        return None if bandwidth is None else groups.Network(bandwidth, self.latency_us / 1e3)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def measure(given: argparse.Namespace) -> dict[str, Any]:
    limit = TimeLimit(given.seconds, 1)
    arguments = (given.case, given.device, given.compute, given.latency)
    names = [*given.rows, *(row + CAPTURED for row in given.rows if given.capture)]
    workers = {row: Worker(Contestant, row, *arguments) for row in names}
    skipped: dict[str, str] = {}

    def ask(row: str, method: str, *question: Any) -> dict[str, Any]:
        if row in skipped:
            return {}
        answer = workers[row].ask(method, *question)
        if "skipped" in answer:
            skipped[row] = answer["skipped"]
            return {}
        return answer

    pace = None
    for row in workers:
        ask(row, "warm_up", given.warmup)
        pace = ask(row, "pace", pace).get("pace", pace)
    networks: list[float | None] = [None, *given.bandwidths]
    turns: dict[tuple[str, float | None], list[dict[str, float]]] = {}
    for _ in limit.rounds(given.rounds):
        for network in networks:
            for row in workers:
                answer = ask(row, "turn", network, given.steps)
                turns.setdefault((row, network), []).append(answer)
    for worker in workers.values():
        worker.close()
    measured = {key: _medians(of_key) for key, of_key in turns.items() if key[0] not in skipped}
    compute = {row: values["step ms"] for (row, network), values in measured.items() if not network}
    tables = {
        network: {
            row: _values(measured[row, network], compute[row], _least(compute, row))
            for row in compute
        }
        for network in given.bandwidths
    }
    return {
        "case": given.case,
        "latency us": given.latency,
        "bandwidths": {
            str(network): {"rows": table, "bars": judge(table) + judge_encoded(network, table)}
            for network, table in tables.items()
        },
        "skipped": skipped,
    }


def _medians(turns: Sequence[dict[str, float]]) -> dict[str, float]:
    return {column: statistics.median(turn[column] for turn in turns) for column in turns[0]}


def _values(measured: dict[str, float], compute: float, least: float) -> dict[str, float]:
    step, communication = measured["step ms"], measured["communication ms"]
    ideal = max(compute, communication)
    reachable = max(compute + measured["ends ms"], communication)
    return {
        **measured,
        "compute ms": compute,
        "ideal ms": ideal,
        "reachable ms": reachable,
        "exposed ms": step - least,
        "x ideal": step / ideal,
        "x reachable": step / reachable,
    }


def _least(compute: dict[str, float], row: str) -> float:
    """The compute of the fastest row, of captured ones or of eager ones."""
    captured = row.endswith(CAPTURED)
    return min(ms for other, ms in compute.items() if other.endswith(CAPTURED) == captured)


def judge(table: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """fullshard is within 5 % of its ideal, and never more exposed than a peer, or captured so."""
    return [*_judge(table, "fullshard"), *_judge(table, "fullshard" + CAPTURED)]


def _judge(table: dict[str, dict[str, float]], our_row: str) -> list[dict[str, Any]]:
    ours = table.get(our_row)
    if ours is None:
        return []
    verdicts = [_verdict(our_row, "step ms", "its ideal", ours["x ideal"], 1.05)]
    for row, theirs in table.items():
        if row.removesuffix(CAPTURED) in ENCODED:
            continue
        if row != our_row and row.endswith(CAPTURED) == our_row.endswith(CAPTURED):
            noise = NOISE * ours["step ms"]
            ratio = (ours["exposed ms"] - noise) / max(theirs["exposed ms"], noise)
            verdicts.append(_verdict(our_row, "exposed ms", row, ratio, 1.0))
    return verdicts


def judge_encoded(bandwidth: float, table: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """With 8 bits a step is much faster over slow networks, and hardly slower over fast ones."""
    row, plain = ENCODED[-1], "fullshard"
    limit = 0.60 if 10 <= bandwidth <= 100 else 1.06 if bandwidth >= 800 else None
    if limit is None or row not in table or plain not in table:
        return []
    ratio = table[row]["step ms"] / table[plain]["step ms"]
    return [_verdict(row, "step ms", plain, ratio, limit)]


def _verdict(our_row: str, column: str, against: str, ratio: float, limit: float) -> dict[str, Any]:
    return {
        "row": our_row,
        "column": column,
        "against": against,
        "ratio": ratio,
        "limit": limit,
        "pass": ratio <= limit,
    }


def show(result: dict[str, Any]) -> None:
    print(f"{result['case']}, latency {result['latency us']:g} us")
    for network, part in result["bandwidths"].items():
        print(f"\n{network} GB/s")
        if part["rows"]:
            show_table(COLUMNS, part["rows"])
        show_verdicts(part["bars"])
    for row, reason in result["skipped"].items():
        print(f"{row}: not measured: {reason}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    bandwidths = [800.0, 400.0, 200.0, 100.0, 50.0] if cuda else [0.05, 0.005]
    parser.add_argument("--case", default="9.9B@64" if cuda else "toy@8", metavar="MODEL@RANKS")
    parser.add_argument("--bandwidths", type=float, nargs="+", default=bandwidths, help="in GB/s")
    parser.add_argument("--latency", type=float, default=20.0, help="of a collective, in us")
    parser.add_argument("--rows", nargs="+", choices=[*ROWS, *ENCODED], default=ROWS)
    parser.add_argument("--capture", action="store_true", help="also measure captured steps")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    parser.add_argument("--compute", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each row")
    parser.add_argument("--steps", type=int, default=5, help="timed steps in a turn")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="begin no round after so many"
    )
    given = parser.parse_args()
    result = measure(given)
    show(result)
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
