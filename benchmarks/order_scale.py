"""What the order check asks of the store with thousands of ranks, and of the backend with dozens.

    python benchmarks/order_scale.py [--ranks 64 256 1024 4096] [--real-ranks 2 4 8 16]

First a real TCPStore, and a client of it for every rank: threads of a few processes, each with its
own connection, table of operations and inquiry, as a rank has them, and with a mailbox per process.
What ranks say over their own backend in the first step (a broadcast of eight bytes per new
operation) returns at once here. So it is measured afterwards, on real ranks over gloo: a first step
of 100 units, of which nothing happens but the agreement.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fullshard.engine.comm.agreements import agreement_for
from fullshard.engine.comm.mailbox import Address, own_mailbox
from fullshard.engine.comm.order_check import Agreement, RanksDisagreeError

UNITS = 100
SLOW = 10.0


class Counted:
    """A client of the store that counts its requests."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.requests = 0

    def clone(self) -> Any:
        raise RuntimeError("Every rank has a connection of its own here")

    def __getattr__(self, name: str) -> Any:
        act = getattr(self._store, name)

        def counted(*given: Any) -> Any:
            self.requests += 1
            return act(*given)

        return counted


class NotYet:
    """A collective that completes when it is told to."""

    def __init__(self) -> None:
        self._done = threading.Event()

    def complete(self) -> None:
        self._done.set()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        if not self._done.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("Timed out")


class SameProgram:
    """A data plane on which every rank announces what this one is about to do."""

    is_possible = True
    connects_ranks = True

    def __init__(self) -> None:
        self.messages = 0

    def of_first(self, value: int, wait: Any) -> int:
        self.messages += 1
        return value

    def is_true_for_all(self, value: bool, wait: Any) -> bool:
        self.messages += 1
        return value


def settle_step(agreement: Agreement) -> None:
    """All operations of a step: a forward and a backward of 100 units."""
    agreement.check(("forward", "(root)", 0), True)
    for verbs in (("gather", "run"), ("gather", "reduce")):
        for unit in range(UNITS):
            for verb in verbs:
                agreement.check((verb, f"layers.{unit}", 1000 + unit), False)


class Rank:
    """A rank, as far as the order check is concerned."""

    def __init__(self, port: int, number: int, ranks: int) -> None:
        self.store = Counted(dist.TCPStore("127.0.0.1", port, is_master=False))
        self.number = number
        self.agreement = Agreement(self.store, number, ranks)
        # As without a launcher: whoever waits asks the first rank's process before its store.
        self.agreement.inquiry.store_ends_with_first = True
        self.plane: Any = SameProgram()
        self.agreement._announcements = self.plane  # type: ignore[assignment]
        self.address = own_mailbox("127.0.0.1").open_for(self.agreement)
        self.collective = NotYet()
        self.seconds = 0.0

    def first_step(self) -> None:
        settle_step(self.agreement)

    def known_steps(self) -> None:
        for _ in range(3):
            settle_step(self.agreement)

    def evaluate(self) -> None:
        """A pass that nobody expects: all ranks meet at the store."""
        self.agreement.check(("evaluation", "(root)", 0), True)

    def wait_for_slow(self) -> None:
        if self.number == 0:
            time.sleep(SLOW)
        else:
            threading.Timer(SLOW, self.collective.complete).start()
            self.agreement.wait(self.collective)

    def disagree(self) -> None:
        """Rank 1 is about to do something else; all others wait for it."""
        settle, message = self.agreement.check, ""
        try:
            if self.number == 1:
                settle(("gather", "layers.7", 1), False)
            settle(("evaluation", "(root)", 0), False)
            self.agreement.wait(NotYet())
        except RanksDisagreeError as error:
            message = str(error)
        assert "rank 1: gather of unit 'layers.7'" in message, message


PHASES = ("first_step", "known_steps", "evaluate", "wait_for_slow", "disagree")


def serve(port: int, numbers: list[int], ranks: int, pipe: Any) -> None:
    """Be some of the ranks: one thread each, for every phase that is asked for."""
    threading.stack_size(256 * 1024)
    members = [Rank(port, number, ranks) for number in numbers]
    pipe.send([member.address.packed() for member in members])
    addresses = [Address.unpacked(record) for record in pipe.recv()]
    for member in members:
        member.agreement.inquiry.mailboxes = addresses
    while (phase := pipe.recv()) is not None:
        before = [member.store.requests for member in members]
        if phase == "disagree":
            # The others follow what is expected, and wait for the collective.
            for member in members:
                member.agreement.order.advance(("evaluation", "(root)", 0), False)
                member.agreement.order.advance(("evaluation", "(root)", 0), True)
        errors: list[BaseException] = []

        def act(member: Rank, phase: str = phase, errors: list[BaseException] = errors) -> None:
            began = time.perf_counter()
            try:
                getattr(member, phase)()
            except BaseException as error:
                errors.append(error)
            member.seconds = time.perf_counter() - began

        began = time.process_time()
        threads = [threading.Thread(target=act, args=(member,)) for member in members]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        requests = [m.store.requests - b for m, b in zip(members, before, strict=True)]
        seconds = [member.seconds for member in members]
        pipe.send((seconds, requests, time.process_time() - began, list(map(repr, errors[:2]))))
    os._exit(0)


def measure(ranks: int, processes: int) -> dict[str, Any]:
    """All phases with so many ranks."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("spawn")
    parts = [list(range(ranks))[part::processes] for part in range(processes)]
    pipes, started = [], []
    for numbers in parts:
        own, other = context.Pipe()
        process = context.Process(
            target=serve, args=(server.port, numbers, ranks, other), daemon=True
        )
        process.start()
        pipes.append(own)
        started.append(process)
    addresses: list[bytes] = [b""] * ranks
    for numbers, pipe in zip(parts, pipes, strict=True):
        for number, record in zip(numbers, pipe.recv(), strict=True):
            addresses[number] = record
    for pipe in pipes:
        pipe.send(addresses)
    row: dict[str, Any] = {"ranks": ranks}
    for phase in PHASES:
        began = time.perf_counter()
        for pipe in pipes:
            pipe.send(phase)
        found = [pipe.recv() for pipe in pipes]
        problems = [problem for *_, problems in found for problem in problems]
        if problems:
            raise RuntimeError(f"{phase} with {ranks} ranks: {problems}")
        requests = [count for _, counts, _, _ in found for count in counts]
        row[phase] = {
            "seconds": time.perf_counter() - began,
            "median_seconds": statistics.median(s for seconds, *_ in found for s in seconds),
            "cpu_per_rank": sum(cpu for *_, cpu, _ in found) / ranks,
            "requests": sum(requests),
            "most_requests": max(requests),
            "median_requests": statistics.median(requests),
        }
    for pipe in pipes:
        pipe.send(None)
    for process in started:
        process.join()
    return row


def show(row: dict[str, Any]) -> str:
    first, known, meet, slow, fault = (row[phase] for phase in PHASES)
    cells = [
        f"{row['ranks']:,}",
        f"{first['requests']}, {1e3 * first['cpu_per_rank']:.0f} ms",
        str(known["requests"]),
        f"{meet['seconds']:.2f} s, {meet['requests'] / row['ranks']:.1f}",
        f"{slow['requests']:,}, {slow['median_requests']:.0f}",
        f"{fault['seconds']:.1f} s, {fault['requests']:,}, {fault['median_requests']:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


HEADER = (
    "ranks",
    "first step: requests, processor time per rank",
    "steady: requests",
    "all meet: time, requests per rank",
    f"one rank slow for {SLOW:.0f} s: requests, per rank",
    "disagreement: all told after, requests, per rank",
)


# -- real ranks --------------------------------------------------------------------------------


def agree_on_first_step(rank: int, ranks: int, folder: str, repeats: int) -> None:
    """Time first steps of groups that know nothing, and steps that they know."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks
    )
    first: list[float] = []
    known: list[float] = []
    for _ in range(repeats):
        group = dist.new_group()
        agreement = agreement_for(group)
        assert isinstance(agreement, Agreement)
        for times in (first, known):
            dist.barrier()
            began = time.perf_counter()
            settle_step(agreement)
            times.append(time.perf_counter() - began)
    if rank == 0:
        found = {"ranks": ranks, "first": statistics.median(first), "known": min(known)}
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure_real(ranks: int, repeats: int = 5) -> dict[str, float]:
    """Seconds that agreeing takes in a first step on so many ranks, and in a known one."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(agree_on_first_step, args=(ranks, folder, repeats), nprocs=ranks)
        found: dict[str, float] = json.loads(Path(folder, "found.json").read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--real-ranks", type=int, nargs="*", default=[2, 4, 8, 16])
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    real: list[dict[str, float]] = []
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}", flush=True)
    for ranks in given.ranks:
        rows.append(measure(ranks, min(given.processes, ranks)))
        print(show(rows[-1]), flush=True)
    print(
        "\n| real ranks over gloo | agreement in the first step | in a known step |\n|---|---|---|"
    )
    for ranks in given.real_ranks:
        real.append(measure_real(ranks))
        first, known = (1e3 * real[-1][name] for name in ("first", "known"))
        print(f"| {ranks} | {first:.0f} ms | {known:.2f} ms |", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps({"clients": rows, "real": real}, indent=2) + "\n")


if __name__ == "__main__":
    main()
