"""What the processes of a run listen on, and what strangers can do there."""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist
from tests.marks import in_long_runs

from fullshard.cli.launcher.launch import launch
from fullshard.ports import reserve_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sockets are found through /proc")

#: Opens what a program may open, says so, and waits until it is looked at.
STAY = """
import os, time
import torch, torch.distributed as dist
from pathlib import Path
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
one = torch.ones(())
for group in (None, dist.new_group([0, 1]), init_device_mesh("cpu", (2,)).get_group()):
    dist.all_reduce(one, group=group)
assert one == 8
reports = Path(os.environ["REPORTS"])
(reports / f"here-{os.environ['RANK']}").write_text(str(os.getpid()))
while not (reports / "leave").exists():
    time.sleep(0.01)
dist.destroy_process_group()
"""
#: Joins a group in each way that programs do, and again when it has left it.
JOIN = """
import os, sys, time
import torch, torch.distributed as dist
from datetime import timedelta
from pathlib import Path

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
soon = timedelta(seconds=30)
ways = [
    dict(),
    dict(init_method="env://"),
    dict(init_method=f"tcp://{place}", rank=rank, world_size=ranks),
    dict(init_method=f"tcp://localhost:{sys.argv[1]}", rank=rank, world_size=ranks),
]
for number, way in enumerate([*ways, *ways]):
    dist.init_process_group("gloo", timeout=soon, **way)
    one = torch.ones(())
    dist.all_reduce(one)
    assert one == ranks
    # Who leaves before the others have seen it connect makes them fail.
    dist.barrier()
    dist.destroy_process_group()
    # Who joins before rank 0 has left finds its old store.
    left = f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{number}-"
    Path(os.environ["REPORTS"], f"{left}{rank}").touch()
    while not all(Path(os.environ["REPORTS"], f"{left}{r}").exists() for r in range(ranks)):
        time.sleep(0.01)
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), ranks, rank == 0)
store.add("count", 1)
while rank == 0 and store.add("count", 0) < ranks:  # it hosts the store
    time.sleep(0.01)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(3)
"""


class Listener(NamedTuple):
    """An address and a port at which a process takes connections."""

    address: str
    port: int


def listeners(process: int) -> set[Listener]:
    """Where ``process`` listens, by what the kernel says."""
    sockets = set()
    for file in Path(f"/proc/{process}/fd").iterdir():
        try:
            sockets.add(os.readlink(file))
        except FileNotFoundError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                number, port = words[1].split(":")
                # Each four bytes are a number in this machine's order.
                parts = [number[i : i + 8] for i in range(0, len(number), 8)]
                packed = b"".join(int(p, 16).to_bytes(4, sys.byteorder) for p in parts)
                address = ip_address(packed)
                if isinstance(address, IPv6Address) and address.ipv4_mapped:
                    address = address.ipv4_mapped
                found.add(Listener(str(address), int(port, 16)))
    return found


def other_addresses() -> list[str]:
    """Addresses of this machine at which who listens on the loopback address does not."""
    # On the loopback interface itself, and so there where the machine has no other.
    found = ["127.0.0.2"]
    for family, elsewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as towards:
            towards.connect((elsewhere, 9))  # sends nothing
            found.append(towards.getsockname()[0])
    return found


def is_refused(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=5).close()
    except ConnectionRefusedError:
        return True
    return False


def check_that_strangers_are_refused(processes: list[int]) -> None:
    found = {process: listeners(process) for process in processes}
    exposed = {p: at for p, at in found.items() if any(a != "127.0.0.1" for a, _ in at)}
    assert exposed == {}
    for _, port in set().union(*found.values()):
        for address in other_addresses():
            assert is_refused(address, port), f"{address}:{port} takes connections"


def wait_for(*files: Path) -> None:
    deadline = time.monotonic() + 120
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline, "ranks did not come up"
        time.sleep(0.05)


@contextlib.contextmanager
def started(
    *words: str, module: str = "fullshard.cli.launcher.run"
) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-m", module, *words])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REPORTS", str(tmp_path))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def script(folder: Path, text: str) -> str:
    file = folder / "program.py"
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize(
    "options",
    [
        [],
        pytest.param(["--standalone"], marks=in_long_runs),
        ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{socket.gethostname()}:0"],
        pytest.param(
            ["--master-addr", socket.gethostname(), "--master-port", "0"], marks=in_long_runs
        ),
    ],
    ids=" ".join,
)
def test_from_another_address_nothing_of_a_run_on_one_machine_can_be_reached(
    reports: Path, options: list[str]
) -> None:
    files = [reports / f"here-{rank}" for rank in range(2)]

    with started("--ranks", "2", *options, script(reports, STAY)) as launcher:
        wait_for(*files)
        ranks = [int(file.read_text()) for file in files]
        check_that_strangers_are_refused([launcher.pid, *ranks])
        assert listeners(launcher.pid) == set()
        assert all(listeners(rank) for rank in ranks)  # or the test looks in the wrong place
        (reports / "leave").touch()
        assert launcher.wait(60) == 0


def test_from_another_address_nothing_of_a_training_can_be_reached(reports: Path) -> None:
    pytest.importorskip("typer")
    words = ["train", "--device", "cpu", "--ranks", "2", "--steps", "100000", "--model", "tiny"]
    (reports / "text").mkdir()
    (reports / "text" / "a.txt").write_text("To be, or not to be. " * 2000)

    with started(*words, "--data", "text", module="fullshard.cli.main") as launcher:
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
        deadline = time.monotonic() + 120
        while len(ranks := [int(c) for c in children.read_text().split()]) < 2 or not all(
            listeners(rank) for rank in ranks
        ):
            assert time.monotonic() < deadline, "ranks did not come up"
            time.sleep(0.05)
        check_that_strangers_are_refused([launcher.pid, *ranks])
        assert listeners(launcher.pid) == set()


@pytest.mark.parametrize("backend", [pytest.param("c10d", marks=in_long_runs), "static"])
def test_launchers_that_meet_at_an_address_listen_only_there(reports: Path, backend: str) -> None:
    files = [reports / f"here-{rank}" for rank in range(2)]
    program = script(reports, STAY)
    with reserve_port("") as reserved:
        port = str(reserved.getsockname()[1])
        options = ["--ranks", "1", "--nnodes", "2"]
        if backend == "c10d":
            options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        else:
            options += ["--master-addr", "127.0.0.1", "--master-port", port]

        with (
            started(*options, "--node-rank", "0", program) as first,
            started(*options, "--node-rank", "1", program) as second,
        ):
            wait_for(*files)
            ranks = [int(file.read_text()) for file in files]
            check_that_strangers_are_refused([first.pid, second.pid, *ranks])
            assert listeners(first.pid) | listeners(second.pid) == {
                Listener("127.0.0.1", int(port))
            }
            (reports / "leave").touch()
            assert (first.wait(60), second.wait(60)) == (0, 0)


class Intruder:
    """An object whose pickle, when it is loaded, leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.mark,)


def test_a_pickle_that_a_stranger_puts_into_the_store_of_the_launchers_is_not_loaded(
    reports: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mark = reports / "loaded"
    planted = base64.b64encode(pickle.dumps(Intruder(mark))).decode()
    with reserve_port("") as reserved:
        port: int = reserved.getsockname()[1]
        options = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "meeting"]
        options += ["--rdzv-endpoint", f"127.0.0.1:{port}"]

        with started("--ranks", "1", *options, script(reports, STAY)) as launcher:
            soon = timedelta(seconds=60)
            store = dist.TCPStore("127.0.0.1", port, timeout=soon, wait_for_workers=False)
            deadline = time.monotonic() + 60
            while launcher.poll() is None:
                assert time.monotonic() < deadline, "the launcher took no notice"
                try:
                    store.set("torch.rendezvous.meeting", planted)
                except dist.DistError:
                    break  # it has ended, and the store with it
                time.sleep(0.05)
            assert launcher.wait(60) == 1

    assert not mark.exists()
    said = capfd.readouterr().err.splitlines()
    (line,) = [
        line
        for line in said
        if line.startswith("fullshard: the rendezvous of the launchers failed")
    ]
    assert "holds a pickle with pathlib.Path.touch in it" in line


@in_long_runs
def test_programs_join_a_group_in_every_way_and_again_also_when_they_are_restarted(
    reports: Path,
) -> None:
    with reserve_port("") as reserved:
        another_port = str(reserved.getsockname()[1])

        program = [script(reports, JOIN), another_port]
        assert launch(2, ["--max-restarts", "1"], program) == 0


def test_ranks_of_one_machine_meet_at_the_port_that_was_asked_for(
    reports: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = script(
        reports, "import os; print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])"
    )

    assert launch(1, ["--master-port", "23456"], [program]) == 0
    assert launch(1, ["--master-addr", "127.0.0.3", "--master-port", "23456"], [program]) == 0
    assert launch(1, ["--local-addr", "127.0.0.4"], [program]) == 0

    first, second, third = capfd.readouterr().out.splitlines()
    assert first == "127.0.0.1 23456"
    assert second == "127.0.0.3 23456"
    assert third.startswith("127.0.0.4 ")


def test_interfaces_that_the_user_chose_are_left_alone(
    reports: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    names = "os.environ.get('GLOO_SOCKET_IFNAME'), os.environ.get('NCCL_SOCKET_IFNAME')"
    program = script(reports, f"import os; print({names})")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")

    assert launch(1, [], [program]) == 0

    assert capfd.readouterr().out == "lo ib0\n"
