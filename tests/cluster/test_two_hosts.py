"""``fullshard run`` on two hosts with two ranks each: training, checkpoints, and a cable pulled."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from tests.cluster import program
from tests.cluster.hosts import TwoHosts, two_hosts, why_not
from tests.marks import in_long_runs

_REASON = why_not()
pytestmark = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))

PROGRAM = str(Path(program.__file__).resolve())
PORT = 29400
#: Seconds that ranks take to import torch and to meet, on a machine that does much else.
STARTING = 300.0


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with two_hosts() as built:
        built.limit_bandwidth("1gbit")
        yield built


class Run:
    """``fullshard run`` on both hosts, each with two ranks of ``program.py``."""

    def __init__(
        self,
        hosts: TwoHosts,
        folder: Path,
        options: Callable[[int], list[str]],
        *words: str,
        before: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.outputs = [folder / f"{host.name}.log" for host in hosts]
        self.launchers = []
        for number, (host, output) in enumerate(zip(hosts, self.outputs, strict=True)):
            command = [
                sys.executable,
                "-m",
                "fullshard.cli.launcher.run",
                "--ranks",
                "2",
                "--nnodes",
                "2",
            ]
            with output.open("w") as file:
                self.launchers.append(
                    host.start(
                        [*before, *command, *options(number), *words], stdout=file, stderr=file
                    )
                )

    def said(self) -> list[str]:
        return [output.read_text() for output in self.outputs]

    def wait(self, seconds: float = STARTING) -> list[int]:
        """Exit statuses of both launchers; fails if one has not ended in time."""
        deadline = time.monotonic() + seconds
        try:
            return [p.wait(max(0.1, deadline - time.monotonic())) for p in self.launchers]
        except subprocess.TimeoutExpired:
            pytest.fail(f"a launcher has not ended after {seconds} s: {self.said()}")

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: len(losses_in(self.folder)) >= step, f"step {step}")

    def wait_until(self, happened: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + STARTING
        while not happened():
            ended = [launcher.poll() for launcher in self.launchers]
            assert ended == [None, None], (ended, self.said())
            assert time.monotonic() < deadline, (what, self.said())
            time.sleep(0.05)


def at_a_store(hosts: TwoHosts, **more: object) -> Callable[[int], list[str]]:
    """Options of launchers that meet at a store, all of them the same."""
    place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts.first.address}:{PORT}"]
    return lambda _: [*place, "--rdzv-id", "run", *settings(more)]


def by_number(hosts: TwoHosts, **more: object) -> Callable[[int], list[str]]:
    """Options of launchers that are numbered."""
    place = ["--master-addr", hosts.first.address, "--master-port", str(PORT)]
    return lambda number: ["--node-rank", str(number), *place, *settings(more)]


def settings(more: dict[str, object]) -> list[str]:
    pairs = ",".join(f"{name}={value}" for name, value in more.items())
    return ["--rdzv-conf", pairs] if pairs else []


def losses_in(folder: Path) -> list[tuple[int, float]]:
    file = folder / "losses"
    lines = file.read_text().splitlines() if file.exists() else []
    return [(int(step), float(loss)) for step, loss in (line.split() for line in lines)]


def losses_of_one_process(steps: int) -> list[float]:
    """The same training without ranks, shards or fullshard."""
    model = program.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(1, steps + 1):
        loss = model(program.batch_of(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_losses(folder: Path, steps: int) -> None:
    """All steps are there, and steps that were run again gave the same loss."""
    expected = losses_of_one_process(steps)
    found = losses_in(folder)
    assert {step for step, _ in found} == set(range(1, steps + 1))
    for step, loss in found:
        assert loss == pytest.approx(expected[step - 1], rel=1e-4), step


@pytest.mark.parametrize(
    ("strategy", "meet"),
    [
        ("FULL_SHARD", at_a_store),
        pytest.param("HYBRID_SHARD", by_number, marks=in_long_runs),
    ],
)
def test_two_hosts_train_as_one_process_and_save_what_one_host_loads(
    hosts: TwoHosts,
    tmp_path: Path,
    strategy: str,
    meet: Callable[[TwoHosts], Callable[[int], list[str]]],
) -> None:
    run = Run(hosts, tmp_path, meet(hosts), PROGRAM, str(tmp_path), strategy, "5", "0", "5")

    assert run.wait() == [0, 0], run.said()

    check_losses(tmp_path, 5)
    again = [
        sys.executable,
        "-m",
        "fullshard.cli.launcher.run",
        "--ranks",
        "1",
        PROGRAM,
        str(tmp_path),
    ]
    subprocess.run([*again, "FULL_SHARD", "8"], check=True, timeout=STARTING)
    check_losses(tmp_path, 8)
    assert len(losses_in(tmp_path)) == 8  # it went on, and did not begin again


def test_training_goes_on_when_the_network_is_back_after_five_seconds(
    hosts: TwoHosts, tmp_path: Path
) -> None:
    words = [PROGRAM, str(tmp_path), "FULL_SHARD", "30", "0.1"]
    run = Run(hosts, tmp_path, at_a_store(hosts), *words)
    run.wait_for_step(3)

    hosts.pull_cable()
    time.sleep(5)
    before = len(losses_in(tmp_path))
    hosts.plug_cable()

    assert run.wait() == [0, 0], run.said()
    assert before < 30  # it did stand still
    check_losses(tmp_path, 30)
    assert len(losses_in(tmp_path)) == 30


def test_without_a_network_every_rank_ends_and_the_missing_hosts_are_named(
    hosts: TwoHosts, tmp_path: Path
) -> None:
    words = [PROGRAM, str(tmp_path), "FULL_SHARD", "100000", "0.1"]
    run = Run(hosts, tmp_path, at_a_store(hosts, host_timeout=8), *words)
    run.wait_for_step(3)

    hosts.pull_cable()

    assert run.wait(60) == [1, 1], run.said()
    first, second = run.said()
    assert re.search(r"No word for \d+ s from host-b \(10.231.7.2, ranks 2 to 3\)", first)
    silent = r"10.231.7.1:29400, where the hosts meet, has not answered host-b .* for \d+ s"
    missing = r"nor have the other hosts: host-a \(10.231.7.1, ranks 0 to 1\)"
    assert re.search(f"{silent}, {missing}", second)
    for host in hosts:
        assert processes_on(host.namespace) == []


@in_long_runs
@pytest.mark.parametrize("meet", [at_a_store, by_number])
def test_a_run_with_restarts_goes_on_from_its_checkpoint_when_the_network_is_back(
    hosts: TwoHosts, tmp_path: Path, meet: Callable[..., Callable[[int], list[str]]]
) -> None:
    words = ["--max-restarts", "1", PROGRAM, str(tmp_path), "FULL_SHARD", "40", "0.2", "2"]
    run = Run(hosts, tmp_path, meet(hosts, host_timeout=8), *words)
    run.wait_for_step(5)

    hosts.pull_cable()
    run.wait_until(lambda: all("Starting again" in said for said in run.said()), "restarts")
    steps_before = len(losses_in(tmp_path))
    hosts.plug_cable()

    assert run.wait() == [0, 0], run.said()
    check_losses(tmp_path, 40)
    assert steps_before < 40
    again = losses_in(tmp_path)[steps_before][0]
    assert 1 < again <= steps_before + 1  # not from the beginning


@in_long_runs
def test_a_host_whose_ranks_fail_because_others_did_says_what_failed_there(
    hosts: TwoHosts, tmp_path: Path
) -> None:
    file = tmp_path / "fails.py"
    file.write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "if os.environ['RANK'] == '0': raise ValueError('the cause')\n"
        "dist.all_reduce(torch.ones(3))\n"
    )
    run = Run(hosts, tmp_path, at_a_store(hosts), str(file))

    assert run.wait() == [1, 1], run.said()

    first, second = run.said()
    assert "Rank 0 failed first: ValueError: the cause" in first
    cause = "On host-a (10.231.7.1, ranks 0 to 1): rank 0: ValueError: the cause"
    assert cause in second.splitlines()


@in_long_runs
def test_a_folder_that_each_host_has_for_itself_makes_a_save_fail_on_all_of_them(
    hosts: TwoHosts, tmp_path: Path
) -> None:
    folder = tmp_path / "not shared"
    folder.mkdir()
    words = [PROGRAM, str(folder), "FULL_SHARD", "1", "0", "1"]
    # The same path on both hosts, with a file system of its own behind it on each, which ends with
    # its host: checkpoints in it are listed before.
    alone = 'mount -t tmpfs none "$0" && "$@"; status=$?; find "$0" -name "step-*"; exit $status'
    run = Run(hosts, tmp_path, at_a_store(hosts), *words, before=["sh", "-c", alone, str(folder)])

    assert run.wait() == [1, 1], run.said()

    for said in run.said():
        assert "step-00000001 could not be written. On rank 2: FileNotFoundError" in said
        assert str(folder / "checkpoints" / "step-00000001") not in said.splitlines()


def processes_on(namespace: str) -> list[int]:
    said = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
    return [int(word) for word in said.stdout.split()]
