"""Launchers of a run watch each other, so that each knows which hosts are alive.

Note: how hosts watch each other
    Ranks that wait for a host which has lost its power or its network wait for as long as TCP
    retries, a quarter of an hour. So every launcher increments a counter of its own in the store at
    which the launchers met. The first launcher reads all counters and writes which of them have not
    changed for too long; the others read only that. Traffic is linear in the number of hosts, and a
    host that is cut off notices that the store does not answer. A host is lost after
    ``host_timeout`` seconds, one of the options of ``--rdzv-conf``; then the attempt has failed, as
    if a rank had.

    When ranks fail, launchers tell each other why: on most hosts, ranks fail because others did.
"""

from __future__ import annotations

import atexit
import json
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed import PrefixStore

from .several_machines import PatientRendezvous

__all__ = ["Host", "HostWatch", "HostsLost", "watch_of"]

#: How often a launcher counts and looks, in the seconds after which a host is lost.
_LOOKS = 10
#: Seconds that may pass between two looks of a launcher that was not stopped meanwhile.
_SECONDS_BETWEEN_LOOKS = 5.0
#: Seconds for which a launcher whose ranks failed waits for word from others whose ranks failed.
_SECONDS_TO_HEAR = 2.0
#: How many hosts tell of their failures, and how many are named.
_TELL = 8


class HostsLost(Exception):
    """Other hosts of the run cannot be reached any more; the message names them."""


@dataclass(frozen=True)
class Host:
    """A host of the run: its name and address, and which ranks run on it."""

    name: str
    address: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        address = f"{self.address}, " if self.address not in ("", self.name) else ""
        return f"{self.name} ({address}{_numbered(self.ranks)})"


class HostWatch:
    """Watches the other hosts of one attempt, from a thread of its own."""

    def __init__(self, store: Any, place: int, places: int, host: Host, meeting: str, limit: float):
        self.host = host
        self._place, self._places = place, places
        self._meeting = meeting
        self._limit = limit
        self._hosts: list[Host] = []
        now = time.monotonic()
        #: When the store last answered, when each host last counted, and when someone last looked.
        self._answered = now
        self._counted: dict[int, tuple[bytes, float]] = {}
        self._looked = now
        self._missing: dict[int, float] = {}
        self._failures: list[str] = []
        self._tell: str | None = None
        self._told = threading.Event()
        self._woken = threading.Event()
        self._ended = False
        self._thread = threading.Thread(
            target=self._watch, args=(store,), name="hosts", daemon=True
        )
        self._thread.start()
        # Not as a bound method, which would keep the watch for as long as the process lives.
        atexit.register(_end_at_exit, weakref.ref(self))

    def lost(self) -> str | None:
        """Which hosts are lost, in words. Called again and again."""
        now = time.monotonic()
        paused = now - self._looked > max(self._limit / 2, _SECONDS_BETWEEN_LOOKS)
        self._looked = now
        if paused:  # this process was stopped, and the others could not be heard
            self._answered = now
        silent = now - self._answered
        if silent > self._limit:
            others = [host for place, host in enumerate(self._hosts) if place != self._place]
            named = f", nor have the other hosts: {_listed(others)}" if others else ""
            return (
                f"{self._meeting}, where the hosts meet, has not answered {self.host} for "
                f"{silent:.0f} s{named}"
            )
        if self._missing:
            missing = [self._named(place) for place in sorted(self._missing)]
            return f"No word for {max(self._missing.values()):.0f} s from {_listed(missing)}"
        return None

    def failures_elsewhere(self, own: str) -> list[str]:
        """Report failures here to the other launchers; returns their reports, a line each."""
        self._tell = own
        self._woken.set()
        self._told.wait(_SECONDS_TO_HEAR + 1.0)
        return [line for line in self._failures if not line.startswith(f"On {self.host}: ")]

    def end(self) -> None:
        """Watch no longer."""
        self._ended = True
        self._woken.set()

    def end_at_exit(self) -> None:
        """Return when the thread is out of the store, or hangs there.

        When the interpreter ends, it ends its threads. To end one inside of torch's C++ code is to
        abort the process.
        """
        self.end()
        self._thread.join(_SECONDS_TO_HEAR)

    def _named(self, place: int) -> str:
        return str(self._hosts[place]) if place < len(self._hosts) else f"host {place}"

    # The methods below run in the thread, which may hang in the store.

    def _watch(self, store: Any) -> None:
        try:
            # A connection of its own: others may wait in theirs for something to come.
            store = store.clone()
            store.set(f"host/{self._place}", json.dumps(asdict(self.host)))
            count = 0
            while not self._ended:
                count += 1
                store.set(f"count/{self._place}", str(count))
                if self._place == 0:
                    self._look_at_all(store)
                else:
                    self._read_findings(store)
                self._answered = time.monotonic()
                if self._tell is not None and not self._told.is_set():
                    self._exchange_failures(store, self._tell)
                self._woken.wait(min(2.0, self._limit / _LOOKS))
                self._woken.clear()
        except Exception:
            # The store is gone: report that nothing answers from now on.
            self._told.set()

    def _look_at_all(self, store: Any) -> None:
        now = time.monotonic()
        if not self._hosts and store.check([f"host/{place}" for place in range(self._places)]):
            values = store.multi_get([f"host/{place}" for place in range(self._places)])
            hosts = [json.loads(value) for value in values]
            self._hosts = [Host(h["name"], h["address"], tuple(h["ranks"])) for h in hosts]
            store.set("hosts", json.dumps(hosts))
        keys = [f"count/{place}" for place in range(self._places)]
        if store.check(keys):
            counts = store.multi_get(keys)
        else:
            counts = [store.get(key) if store.check([key]) else b"" for key in keys]
        waited = now - self._answered  # if the store was slow, all hosts were kept from counting
        for place, count in enumerate(counts):
            before = self._counted.get(place)
            if before is None or before[0] != count or waited > self._limit / 2:
                self._counted[place] = (count, now)
        quiet = {place: now - since for place, (_, since) in self._counted.items()}
        self._missing = {p: seconds for p, seconds in quiet.items() if seconds > self._limit}
        findings = {"at": now, "missing": {str(p): s for p, s in self._missing.items()}}
        store.set("findings", json.dumps(findings))

    def _read_findings(self, store: Any) -> None:
        if not self._hosts and store.check(["hosts"]):
            hosts = json.loads(store.get("hosts"))
            self._hosts = [Host(h["name"], h["address"], tuple(h["ranks"])) for h in hosts]
        findings = store.get("findings") if store.check(["findings"]) else b""
        now = time.monotonic()
        before = self._counted.get(0)
        if before is None or before[0] != findings or now - self._answered > self._limit / 2:
            self._counted[0] = (findings, now)
        missing = json.loads(findings)["missing"] if findings else {}
        self._missing = {int(place): seconds for place, seconds in missing.items()}
        quiet = now - self._counted[0][1]
        if quiet > self._limit:
            self._missing[0] = quiet

    def _exchange_failures(self, store: Any, own: str) -> None:
        if store.add("failed", 1) <= _TELL:
            store.append("failures", f"On {self.host}: {own}\n")
        deadline = time.monotonic() + _SECONDS_TO_HEAR
        while store.add("failed", 0) < self._places and time.monotonic() < deadline:
            time.sleep(0.05)
        if store.check(["failures"]):
            self._failures = store.get("failures").decode().splitlines()
        self._told.set()


def _end_at_exit(reference: weakref.ref[HostWatch]) -> None:
    watch = reference()
    if watch is not None:
        watch.end_at_exit()


#: The watch of each attempt, by the launcher's object for its ranks.
_watches: weakref.WeakKeyDictionary[Any, HostWatch] = weakref.WeakKeyDictionary()


def watch_of(agent: Any, ranks: Any) -> HostWatch | None:
    """The watch of an attempt, which begins at the first call; None for one host.

    ``agent`` and ``ranks`` are the launcher's own.
    """
    if ranks is None:
        return None
    if ranks in _watches:
        return _watches[ranks]
    group = agent._worker_group
    spec = group.spec
    meeting = spec.rdzv_handler
    if group.group_world_size < 2 or not isinstance(meeting, PatientRendezvous):
        return None
    for other in _watches.values():
        other.end()
    prefix = "fullshard/hosts"
    if meeting.get_backend() == "static":  # one store for all attempts
        prefix += f"/{spec.max_restarts - agent._remaining_restarts}"
    numbers = tuple(worker.global_rank for worker in group.workers)
    host = Host(socket.gethostname(), spec.local_addr or "", numbers)
    watch = _watches[ranks] = HostWatch(
        PrefixStore(prefix, group.store),
        group.group_rank,
        group.group_world_size,
        host,
        meeting.endpoint,
        meeting.host_timeout,
    )
    return watch


def _listed(hosts: Sequence[object]) -> str:
    named = [str(host) for host in hosts[:_TELL]]
    if len(hosts) > _TELL:
        named.append(f"{len(hosts) - _TELL} more")
    return ", ".join(named)


def _numbered(ranks: tuple[int, ...]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
