"""The hosts of a process group's ranks, and each rank's relays on other hosts.

``Hosts`` is pure; ``hosts_of`` exchanges host names through the group's store when its first
collective runs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

#: The environment variable that names a rank's host, for networks in which the name is not enough.
HOST_VARIABLE = "FULLSHARD_HOST_ID"


@dataclass(frozen=True)
class Hosts:
    """The host of each rank of a group, as a number.

    Note: who speaks for whom
        What a host has to send to another one crosses the network once: to one rank there, its
        *relay* on that host, which passes it on to the others. In the other direction the relay
        adds up what the ranks of its host send to a rank elsewhere, and sends the sum. A rank's
        relays have its own position among the ranks of their host (or, if that host has fewer
        ranks, the position modulo their number), so that all ranks of a host carry about as much.
        On its own host a rank is its own relay::

                     host 0            host 1
                     0   1   2         3   4
            relays of rank 0:   0 on host 0, 3 on host 1
            relays of rank 1:   1 on host 0, 4 on host 1
            relays of rank 2:   2 on host 0, 3 on host 1
            relays of rank 4:   1 on host 0, 4 on host 1
    """

    of_ranks: tuple[int, ...]

    @classmethod
    def named(cls, names: Sequence[str]) -> Hosts:
        """The hosts of ranks that are on hosts of these names, in order of rank."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return cls(tuple(numbers[name] for name in names))

    @property
    def spread(self) -> bool:
        """Return True if there are several hosts, and several ranks on one of them."""
        return 1 < self.count < len(self.of_ranks)

    @functools.cached_property
    def count(self) -> int:
        return len(set(self.of_ranks))

    @functools.cached_property
    def ranks_per_host(self) -> int | None:
        """The number of ranks on each host; None if they differ, or are not one host after another.

        Ranks of host 0 come first then, those of host 1 next, and so on.
        """
        size, each = len(self.of_ranks), self.of_ranks.count(self.of_ranks[0])
        in_order = self.of_ranks == tuple([rank // each for rank in range(size)])
        return each if in_order and size % each == 0 else None

    @functools.cached_property
    def _ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks on each host."""
        found: list[list[int]] = [[] for _ in range(self.count)]
        for rank, host in enumerate(self.of_ranks):
            found[host].append(rank)
        return tuple(map(tuple, found))

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """The ranks on the host of ``rank``, including itself."""
        return self._ranks[self.of_ranks[rank]]

    def relay(self, rank: int, host: int) -> int:
        """The rank on ``host`` that receives, adds up, and passes on for ``rank``."""
        there = self._ranks[host]
        return there[self.neighbours(rank).index(rank) % len(there)]

    def relays(self, rank: int) -> tuple[int, ...]:
        """The relays of ``rank`` on all other hosts, in order of rank."""
        own = self.of_ranks[rank]
        return tuple(sorted(self.relay(rank, h) for h in range(self.count) if h != own))

    def relayed(self, rank: int) -> tuple[int, ...]:
        """The ranks of other hosts for which ``rank`` is the relay, in order of rank."""
        own = self.of_ranks[rank]
        return tuple(
            other
            for other, host in enumerate(self.of_ranks)
            if host != own and self.relay(other, own) == rank
        )


def name_of_this_host() -> str:
    """A name that the processes which share this host's network have in common, and no others."""
    return os.environ.get(HOST_VARIABLE) or " ".join(facts_of_this_host())


def facts_of_this_host() -> list[str]:
    """Facts that are equal for all processes that share this host's network, and no others."""
    facts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        # Hosts may have the same name, and the numbers below are the same on most.
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        # Containers of one machine reach each other through a network.
        facts.append(os.readlink("/proc/self/ns/net"))
    return facts


def hosts_of(group: Any) -> Hosts:
    """The hosts of the ranks of ``group``, which all call this. One host, if it has no store."""
    _, store = dist.distributed_c10d._world.pg_map.get(group, (None, None))
    size = group.size()
    if store is None or size <= 2:
        return Hosts((0,) * size)
    key = "fullshard/host/{}".format
    store.set(key(group.rank()), name_of_this_host())
    keys = list(map(key, range(size)))
    store.wait(keys)
    return Hosts.named([name.decode() for name in map(store.get, keys)])
