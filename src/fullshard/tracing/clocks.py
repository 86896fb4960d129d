"""Marks in time: numbers on a host, events on an accelerator.

A mark costs as little as possible while steps run; it is converted to a time when they are over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ..engine.comm.pending_work import PendingWork

#: Nanoseconds on the host's clock, or an event on a stream of the device.
Mark = Any


class Clock(Protocol):
    """Makes marks in the order of compute, and converts them to times."""

    #: Whether marks are on the device, which runs behind the host.
    runs_ahead: bool

    @property
    def mark(self) -> Callable[[], Mark]:
        """A mark on the current stream."""
        ...

    def mark_after(self, works: Sequence[Any], told: Callable[[Mark], object]) -> None:
        """Call ``told`` with a mark of when the last of the collectives has ended."""
        ...

    def settle(self) -> None:
        """Return when all marks can be resolved."""
        ...

    def seconds(self, mark: Mark) -> float:
        """The time of a mark, in seconds on the host's clock."""
        ...


class HostClock:
    """The clock of a host that computes itself."""

    runs_ahead = False
    mark = staticmethod(time.perf_counter_ns)

    def mark_after(self, works: Sequence[Any], told: Callable[[Mark], object]) -> None:
        """As above. The backend reports when a collective has ended, if it can."""
        _tell_when_done(works, told)

    def settle(self) -> None:
        """A host's marks are numbers already."""

    def seconds(self, mark: Mark) -> float:
        return float(mark) * 1e-9


class DeviceClock:
    """Events on the streams of an accelerator.

    The end of a collective is found on a stream that waits for it and does nothing else.
    """

    runs_ahead = True

    def __init__(self, device: torch.device) -> None:
        module = torch.get_device_module(device)
        self._event = module.Event
        self._aside = module.Stream(device)
        self._synchronize: Callable[[torch.device], None] = module.synchronize
        self._device = device
        self._synchronize(device)
        self._first = self.mark()
        self._synchronize(device)
        self._first_seconds = time.perf_counter()

    def mark(self) -> Mark:
        event = self._event(enable_timing=True)
        event.record()
        return event

    def mark_after(self, works: Sequence[Any], told: Callable[[Mark], object]) -> None:
        if any(isinstance(work, PendingWork) for work in works):
            # Over gloo it is the host that waits, also for tensors of a device.
            _tell_when_done(works, told)
            return
        with self._aside:
            for work in works:
                work.wait()
            told(self.mark())

    def settle(self) -> None:
        self._synchronize(self._device)

    def seconds(self, mark: Mark) -> float:
        if isinstance(mark, int):
            return mark * 1e-9
        elapsed: float = self._first.elapsed_time(mark)
        return self._first_seconds + elapsed * 1e-3


def clock_for(device: torch.device) -> Clock:
    """The clock of what computes on ``device``."""
    return HostClock() if device.type in ("cpu", "meta") else DeviceClock(device)


def _tell_when_done(works: Sequence[Any], told: Callable[[Mark], object]) -> None:
    for work in works:
        future = _future_of(work)
        if future is not None:
            future.add_done_callback(lambda _: told(time.perf_counter_ns()))


def _future_of(work: Any) -> Any:
    """The backend's report of when a collective has ended; None if it has none."""
    try:
        return getattr(work, "work", work).get_future()
    except (AttributeError, RuntimeError):
        return None
