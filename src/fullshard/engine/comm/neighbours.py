"""The few ranks among those that share parameters between which communication is fast."""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist

from .hosts import hosts_of
from .process_groups import group_among, is_alive

_known: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def neighbours_in(group: Any, asked: bool | int) -> Any | None:
    """The process group of this rank and its neighbours in ``group``; all ranks call this.

    ``asked`` is the number of its ranks; True: those of this host. None if it would contain all
    ranks, or this one alone.
    """
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "secondary_shards takes a process group of torch.distributed, but the ranks that share "
            f"parameters are {group!r} of type {type(group).__name__}"
        )
    # As text, since 1 and True are the same key.
    known, key = _known.setdefault(group, {}), str(asked)
    few = known.get(key)
    if key not in known or (few is not None and not is_alive(few)):
        size = group.size()
        count = _ranks_per_host(group) if asked is True else int(asked)
        if count < 1 or size % count:
            raise ValueError(
                f"secondary_shards={asked} expects a number of ranks that divides the {size} ranks "
                "that share parameters"
            )
        ranks = dist.get_process_group_ranks(group)
        parts = [ranks[first : first + count] for first in range(0, size, count)]
        alone = count in (1, size)
        known[key] = None if alone else group_among(parts, group, "secondary shards")
    return known[key]


def _ranks_per_host(group: Any) -> int:
    hosts = hosts_of(group)
    if hosts.ranks_per_host is None:
        raise ValueError(
            "secondary_shards=True expects hosts with equally many ranks, one host after another, "
            f"but the ranks that share parameters are on hosts {list(hosts.of_ranks)}: pass the "
            "number of neighbouring ranks"
        )
    return hosts.ranks_per_host
