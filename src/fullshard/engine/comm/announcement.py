"""Small messages over a process group's own backend, by which ranks learn an order of operations.

Beside ``collectives.py`` the only file that calls a group's collectives.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .pending_work import PendingWork

#: Seconds between two looks at a collective that the host does not wait for by itself.
_SHORTEST, _LONGEST = 2e-5, 2e-3


class Announcements:
    """What the first rank of a group tells all others, and what all tell each other.

    The first rank's word goes down a tree of ranks: its cost grows with the logarithm of their
    number, and the store is not asked.
    """

    def __init__(self, group: Any, wait: Callable[[Any], None]) -> None:
        self._group = group
        self._size: int = group.size()
        kinds = {device.type for device in group._device_types}
        self._kind = "cpu" if "cpu" in kinds else next(iter(kinds), "cpu")
        self._wait_on_host = wait
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0
        self._least = dist.AllreduceOptions()
        self._least.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)

    @property
    def is_possible(self) -> bool:
        """Whether the host can wait for the device now: not while a graph is being captured."""
        return self._kind != "cuda" or not torch.cuda.is_current_stream_capturing()

    def of_first(self, value: int) -> int:
        """The first rank's ``value``."""
        tensor = torch.tensor([value], dtype=torch.int64, device=self._kind)
        alias = tensor.detach()
        self._finish(self._group.broadcast([alias], self._options), alias)
        return int(tensor.item())

    def is_true_for_all(self, value: bool) -> bool:
        """Whether ``value`` is true on every rank."""
        tensor = torch.tensor([int(value)], dtype=torch.int64, device=self._kind)
        alias = tensor.detach()
        self._finish(self._group.allreduce([alias], self._least), alias)
        return bool(tensor.item())

    def of_all(self, record: bytes) -> list[bytes]:
        """Every rank's ``record``; all have the same length."""
        own = torch.frombuffer(bytearray(record), dtype=torch.uint8).to(self._kind)
        received = own.new_empty(self._size * own.numel())
        alias, piece = received.detach(), own.detach()
        if hasattr(self._group, "all_gather_single"):
            work = self._group.all_gather_single(alias, piece)
        else:
            work = self._group._allgather_base(alias, piece)
        self._finish(work, alias, piece)
        content = bytes(received.tolist())
        return [content[at : at + len(record)] for at in range(0, len(content), len(record))]

    def _finish(self, work: Any, *tensors: torch.Tensor) -> None:
        if self._kind == "cpu":
            started = PendingWork(work, tensors)
            # Nothing but what is waited for may hold the work: see ``pending_work.py``.
            del work, tensors
            self._wait_on_host(started.work)
            started.finish()
        else:
            self._wait_on_host(_OnDevice(work))


class _OnDevice:
    """A collective of the device, for which the host waits as it does over gloo."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def is_completed(self) -> bool:
        completed: bool = self._work.is_completed()
        return completed

    def wait(self, timeout: Any = None) -> None:
        deadline = time.monotonic() + timeout.total_seconds() if timeout is not None else None
        pause = _SHORTEST
        while not self._work.is_completed():
            if deadline is not None and time.monotonic() > deadline:
                raise RuntimeError("Timed out: the collective is still under way")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        self._work.wait()
