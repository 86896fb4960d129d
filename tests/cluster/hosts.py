"""Two hosts on one machine: network namespaces that are joined by a cable which can be pulled.

Each host has an interface, an address and a name of its own, and no way to anything but the other
host. Building them takes root, and a kernel that permits network namespaces.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

#: Each pair of hosts in this process has names of its own. Addresses need not differ between pairs,
#: because no pair can reach another.
_numbers = itertools.count()
_NETWORK = "10.231.7"
#: The interface has the same name on both hosts, and is not one that anything would choose first.
INTERFACE = "cable"
#: Namespaces carry the number of the process that made them, which may have been killed since.
_NAME = re.compile(r"fs(\d+)n\d+[ab]")
#: What is started ends when this process does, however it ends.
_WITH_THIS_PROCESS = ("setpriv", "--pdeathsig", "KILL")


@dataclass
class Host:
    """One of the two hosts. ``name`` is what ``hostname`` says on it; nothing resolves it."""

    name: str
    address: str
    namespace: str
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(
        self, words: Sequence[str], environment: dict[str, str] | None = None, **options: object
    ) -> subprocess.Popen[str]:
        """Start a command on this host. It is killed with the host, if it still runs then."""
        # With no name server to ask: one that cannot be reached is waited for.
        prepare = 'hostname "$0" && mount --bind /dev/null /etc/resolv.conf && exec "$@"'
        named = ["unshare", "--uts", "sh", "-c", prepare, self.name]
        process: subprocess.Popen[str] = subprocess.Popen(
            [*_WITH_THIS_PROCESS, "ip", "netns", "exec", self.namespace, *named, *words],
            env={**os.environ, **(environment or {})},
            text=True,
            **options,  # type: ignore[call-overload]
        )
        self.processes.append(process)
        return process

    def run(self, *words: str) -> None:
        """Run a command that configures this host."""
        _run("ip", "netns", "exec", self.namespace, *words)


@dataclass
class TwoHosts:
    """Two hosts and the cable between them."""

    first: Host
    second: Host

    def __iter__(self) -> Iterator[Host]:
        return iter((self.first, self.second))

    def pull_cable(self) -> None:
        """Take the second host's interface down; the first one's loses its carrier."""
        self.second.run("ip", "link", "set", INTERFACE, "down")

    def plug_cable(self) -> None:
        """Bring the interface up again."""
        self.second.run("ip", "link", "set", INTERFACE, "up")

    def limit_bandwidth(self, rate: str) -> None:
        """Let no more than ``rate``, such as "1gbit", through the cable in each direction."""
        for host in self:
            shape = ["tbf", "rate", rate, "burst", "256kb", "latency", "100ms"]
            host.run("tc", "qdisc", "replace", "dev", INTERFACE, "root", *shape)


@contextlib.contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Two hosts, which end with the context, and whatever runs on them with them."""
    mark = f"fs{os.getpid()}n{next(_numbers)}"
    hosts = TwoHosts(
        Host("host-a", f"{_NETWORK}.1", f"{mark}a"), Host("host-b", f"{_NETWORK}.2", f"{mark}b")
    )
    _remove_what_others_left()
    try:
        for host in hosts:
            _run("ip", "netns", "add", host.namespace)
            host.run("ip", "link", "set", "lo", "up")
        ends = [
            word
            for host, keyword in zip(hosts, ("", "peer"), strict=True)
            for word in (keyword, "name", INTERFACE, "netns", host.namespace)
            if word
        ]
        _run("ip", "link", "add", *ends[:4], "type", "veth", *ends[4:])
        for host in hosts:
            host.run("ip", "address", "add", f"{host.address}/24", "dev", INTERFACE)
            host.run("ip", "link", "set", INTERFACE, "up")
        yield hosts
    finally:
        for host in hosts:
            _remove(host)


def why_not() -> str | None:
    """Why hosts cannot be built here; None where they can."""
    missing = [name for name in ("ip", "tc", "unshare", "setpriv") if shutil.which(name) is None]
    if missing:
        return f"two hosts on one machine need the commands {', '.join(missing)}"
    if os.geteuid() != 0:
        return "two hosts on one machine need root, for network namespaces"
    try:
        with two_hosts() as hosts:
            hosts.limit_bandwidth("1gbit")
    except subprocess.CalledProcessError as error:
        said = str(error.stderr).strip()
        return f"this machine permits no network namespaces: {' '.join(error.cmd)}: {said}"
    return None


def _remove_what_others_left() -> None:
    """Remove the hosts of processes that were killed before they could."""
    folder = Path("/run/netns")
    for file in folder.iterdir() if folder.exists() else []:
        found = _NAME.fullmatch(file.name)
        if found is not None and not Path(f"/proc/{found[1]}").exists():
            _remove(Host("", "", file.name))


def _remove(host: Host) -> None:
    """Kill what runs on ``host``, and delete it. Says nothing where it was not built."""
    for process in _processes_on(host):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    for started in host.processes:
        started.kill()
        started.wait()
    deadline = time.monotonic() + 10
    while _processes_on(host) and time.monotonic() < deadline:
        time.sleep(0.05)
    subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True)


def _processes_on(host: Host) -> list[int]:
    if not Path("/run/netns", host.namespace).exists():
        return []
    said = subprocess.run(
        ["ip", "netns", "pids", host.namespace], capture_output=True, text=True
    ).stdout
    return [int(word) for word in said.split()]


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=30)
