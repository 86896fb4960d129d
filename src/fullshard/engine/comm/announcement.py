"""Small messages over a process group's own backend, by which ranks learn an order of operations.

Beside ``collectives.py`` the only file that calls a group's collectives. It calls its backend's, so
that whoever counts what a model sends does not count these.
"""

from __future__ import annotations

import contextlib
import pickle
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from .pending_work import PendingWork

#: Seconds between two looks at a collective that the host does not wait for by itself.
_SHORTEST, _LONGEST = 2e-5, 2e-3
#: What waits for a work, and looks around for other ranks meanwhile.
Wait = Callable[[Any], None]


class Announcements:
    """Messages of a group's first rank to all others, and of all ranks to each other.

    The first rank's word goes down a tree of ranks: its cost grows with the logarithm of their
    number, and the store is not asked. The group is held weakly.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group = weakref.ref(group)
        self._size: int = group.size()
        self._device = device
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0
        self._least = dist.AllreduceOptions()
        self._least.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        #: Whether the first collective also connects the ranks, in which none of them can look
        #: around: over gloo they are connected when they make the group.
        self.connects_ranks = device.type != "cpu"

    @property
    def is_possible(self) -> bool:
        """True if the host can wait for the device now: not while a graph is being captured."""
        return self._device.type != "cuda" or not torch.cuda.is_current_stream_capturing()

    def of_first(self, value: int, wait: Wait) -> int:
        """The first rank's ``value``."""
        tensor = self._number(value)
        alias = tensor.detach()
        self._finish(self._backend.broadcast([alias], self._options), wait, alias)
        return int(tensor.item())

    def is_true_for_all(self, value: bool, wait: Wait) -> bool:
        """True if ``value`` is true on every rank."""
        tensor = self._number(value)
        alias = tensor.detach()
        self._finish(self._backend.allreduce([alias], self._least), wait, alias)
        return bool(tensor.item())

    def of_all(self, record: bytes, wait: Wait) -> list[bytes]:
        """Every rank's ``record``; all have the same length."""
        own = torch.frombuffer(bytearray(record), dtype=torch.uint8).to(self._device)
        received = own.new_empty(self._size * own.numel())
        alias, piece = received.detach(), own.detach()
        # Not kept in a variable: nothing but what is waited for may hold the work.
        self._finish(self._backend._allgather_base(alias, piece), wait, alias, piece)
        content = _content_of(received)
        return [content[at : at + len(record)] for at in range(0, len(content), len(record))]

    def objects_of_all(self, value: Any, wait: Wait) -> list[Any]:
        """Every rank's ``value``. For small facts: they are pickled."""
        packed = pickle.dumps(value)
        sizes = [int.from_bytes(size) for size in self.of_all(len(packed).to_bytes(8), wait)]
        records = self.of_all(packed.ljust(max(sizes), b"\0"), wait)
        return [pickle.loads(record) for record in records]

    def object_of_first(self, value: Any, wait: Wait) -> Any:
        """The first rank's ``value``. For small facts: it is pickled."""
        packed = pickle.dumps(value)
        size = self.of_first(len(packed), wait)
        # Of the other ranks only the length counts.
        content = bytearray(packed[:size].ljust(size, b"\0"))
        tensor = torch.frombuffer(content, dtype=torch.uint8).to(self._device)
        alias = tensor.detach()
        self._finish(self._backend.broadcast([alias], self._options), wait, alias)
        return pickle.loads(_content_of(tensor))

    @property
    def _backend(self) -> Any:
        # Not kept: it would keep the group's connections and threads alive.
        group = self._group()
        assert group is not None
        return group._get_backend(self._device)

    def _number(self, value: int) -> torch.Tensor:
        return torch.tensor([int(value)], dtype=torch.int64, device=self._device)

    def _finish(self, work: Any, wait: Wait, *tensors: torch.Tensor) -> None:
        if self._device.type == "cpu":
            started = PendingWork(work, tensors)
            del work, tensors
            wait(started.work)
            started.finish()
        else:
            wait(_OnDevice(work, self._device))


def _content_of(tensor: torch.Tensor) -> bytes:
    content = bytearray(tensor.numel())
    torch.frombuffer(content, dtype=torch.uint8).copy_(tensor)
    return bytes(content)


def announcements_of(group: Any) -> Announcements | None:
    """Announcements over ``group``; None if its backend is not one of torch's.

    Where the group has several backends, over that of the host.
    """
    devices = sorted(group._device_types, key=lambda device: device.type != "cpu")
    for device in devices:
        # A process group that is written in Python has no backend.
        with contextlib.suppress(RuntimeError):
            if isinstance(group._get_backend(device), Backend):
                return Announcements(group, device)
    return None


class _OnDevice:
    """A collective of the device, for which the host waits as it does over gloo.

    The host waits for an event behind the collective. It does not ask the collective, which says
    that it is complete when it has failed, too.
    """

    def __init__(self, work: Any, device: torch.device) -> None:
        work.wait()
        self._event = torch.get_device_module(device).Event()
        self._event.record()

    def is_completed(self) -> bool:
        completed: bool = self._event.query()
        return completed

    def wait(self, timeout: Any = None) -> None:
        deadline = time.monotonic() + timeout.total_seconds() if timeout is not None else None
        pause = _SHORTEST
        while not self.is_completed():
            if deadline is not None and time.monotonic() > deadline:
                raise RuntimeError("Timed out: the collective is still under way")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
