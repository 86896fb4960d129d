"""Stands between fullshard and torch's process groups: counts bytes, or completes calls at once."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

_GATHERS = (
    "allgather",
    "_allgather_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced",
    "broadcast",
)
_REDUCES = (
    "allreduce",
    "allreduce_coalesced",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced",
    "alltoall_base",
)


@dataclass
class Traffic:
    """Launches, and bytes of the largest side of each: what is gathered, what is reduced."""

    gathered: int = 0
    reduced: int = 0
    launches: list[str] = field(default_factory=list)


@contextlib.contextmanager
def counted_traffic() -> Iterator[Traffic]:
    """Count what this rank hands to collectives."""
    traffic = Traffic()

    def count(name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nbytes = max(_nbytes(value) for value in (*args[1:], *kwargs.values()))
        gathers = name in _GATHERS
        if name == "alltoall_base":
            # Bytes are gathered, numbers reduced. With sizes: two ranks swap halves, and each
            # keeps its own where it is.
            gathers = args[1].dtype == torch.uint8
            nbytes *= 2 if args[3] else 1
        if gathers:
            traffic.gathered += nbytes
        else:
            traffic.reduced += nbytes
        traffic.launches.append(name)
        return call(*args, **kwargs)

    with _replaced(count, (*_GATHERS, *_REDUCES)):
        yield traffic


@dataclass
class Received:
    """Bytes that this rank received, by the size and the ranks of the group that brought them."""

    by_group_size: dict[int, int] = field(default_factory=dict)
    by_ranks: dict[tuple[int, ...], int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.by_group_size.values())


@contextlib.contextmanager
def counted_bytes() -> Iterator[Received]:
    """Count what this rank receives: a rank sends as much, if all do the same.

    A broadcast's root receives nothing; of what else ranks exchange, their own part stays.
    """
    received = Received()

    def count(name: str, call: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
        size, nbytes = group.size(), _nbytes(args[0])
        if name == "broadcast":
            nbytes *= args[1].rootRank != group.rank()
        elif name == "allreduce":
            nbytes = 2 * nbytes * (size - 1) // size
        elif name.startswith(("_allgather", "allgather_into", "all_gather_single")):
            nbytes = nbytes * (size - 1) // size
        elif name in ("_reduce_scatter_base", "reduce_scatter_single"):
            nbytes = nbytes * (size - 1)
        elif name == "alltoall_base":
            nbytes = nbytes if args[2] else nbytes * (size - 1) // size
        else:
            raise NotImplementedError(name)
        found = received.by_group_size
        found[size] = found.get(size, 0) + nbytes
        of_ranks = tuple(dist.distributed_c10d._world.pg_group_ranks.get(group, ()))
        received.by_ranks[of_ranks] = received.by_ranks.get(of_ranks, 0) + nbytes
        return call(group, *args, **kwargs)

    with _replaced(count, (*_GATHERS, *_REDUCES)):
        yield received


@contextlib.contextmanager
def immediate_collectives() -> Iterator[None]:
    """Let collectives be complete when the call that starts them returns."""

    def complete(name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        work = call(*args, **kwargs)
        work.wait()
        return work

    with _replaced(complete, (*_GATHERS, *_REDUCES)):
        yield


@contextlib.contextmanager
def _replaced(replacement: Callable[..., Any], names: tuple[str, ...]) -> Iterator[None]:
    names = tuple(name for name in names if hasattr(dist.ProcessGroup, name))
    # What stands in the class is a descriptor; what it is called by is not.
    originals = {name: dist.ProcessGroup.__dict__[name] for name in names}
    for name in names:
        call = functools.partial(replacement, name, getattr(dist.ProcessGroup, name))
        setattr(dist.ProcessGroup, name, functools.partialmethod(_call, call))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist.ProcessGroup, name, original)


def _call(group: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call(group, *args, **kwargs)


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(_nbytes, value)) if isinstance(value, list | tuple) else 0
