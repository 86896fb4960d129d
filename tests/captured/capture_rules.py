"""Streams and events that follow CUDA's rules of stream capture, for tests without a GPU.

What CUDA says of a capture: a stream that waits for an event of the capture becomes a part of it; a
captured stream may wait for no event of before, and no stream for one of a capture that is over;
when the capture ends, its first stream must have waited for all work of the others. Work is every
operation of torch's that runs while a stream is the current one, and every collective.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class BrokeCapture(RuntimeError):
    """What CUDA would refuse, with its own words."""


class Capture:
    is_over = False

    def __init__(self) -> None:
        self.streams: dict[RuledStream, None] = {}


class RuledStream:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.number = len(machine.streams)
        machine.streams.append(self)
        self.capture: Capture | None = None
        #: How much work each stream had been given, as far as this one has waited for it.
        self.seen: dict[RuledStream, int] = {self: 0}

    def work(self) -> None:
        self.seen[self] += 1

    def __enter__(self) -> RuledStream:
        self._machine.stack.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        self._machine.stack.pop()

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, other: RuledStream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        if self.capture is not None:
            raise BrokeCapture("operation not permitted when stream is capturing")


class Event:
    def __init__(self) -> None:
        self._capture: Capture | None = None
        self._seen: dict[RuledStream, int] = {}

    def record(self, stream: RuledStream) -> None:
        self._capture, self._seen = stream.capture, dict(stream.seen)

    def wait(self, stream: RuledStream) -> None:
        if not self._seen:
            return
        mine = self._capture
        if mine is None and stream.capture is not None:
            raise BrokeCapture("dependency created on uncaptured work in another stream")
        if mine is not None and mine.is_over:
            raise BrokeCapture("operation not permitted on an event of a capture that is over")
        if mine is not None and stream.capture not in (None, mine):
            raise BrokeCapture("operation would result in a merge of two independent captures")
        if mine is not None:
            stream.capture = mine
            mine.streams[stream] = None
        for other, count in self._seen.items():
            stream.seen[other] = max(count, stream.seen.get(other, 0))


class Machine:
    """Stands in for ``torch.cuda``, as far as the engine's streams ask it."""

    def __init__(self) -> None:
        self.streams: list[RuledStream] = []
        self.stack = [RuledStream(self)]

    def Stream(self, device: Any = None, priority: int = 0) -> RuledStream:
        return RuledStream(self)

    Event = Event

    def current_stream(self, device: Any = None) -> RuledStream:
        return self.stack[-1]

    def is_current_stream_capturing(self) -> bool:
        return self.stack[-1].capture is not None

    @contextlib.contextmanager
    def graph(self) -> Generator[None, None, None]:
        """Stands in for ``torch.cuda.graph``, which begins with a ``synchronize()``."""
        stream = RuledStream(self)
        for other in self.streams:
            for one in self.streams:
                one.seen[other] = other.seen[other]
        capture = stream.capture = Capture()
        capture.streams[stream] = None
        try:
            with stream:
                yield
            for other in capture.streams:
                if stream.seen.get(other, 0) < other.seen[other]:
                    raise BrokeCapture(f"unjoined work on stream {other.number}")
        finally:
            capture.is_over = True
            for other in capture.streams:
                other.capture = None


class Working(TorchDispatchMode):
    """Counts every operation as work of the current stream."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self._machine.stack[-1].work()
        return function(*args, **(kwargs or {}))


class Done:
    def __init__(self, machine: Machine, over: Event) -> None:
        self._machine, self._over = machine, over

    def wait(self) -> bool:
        self._over.wait(self._machine.stack[-1])
        return True


class Ranks:
    """A process group whose collectives run on a stream of their own, as NCCL's do."""

    def __init__(self, machine: Machine, size: int = 2) -> None:
        self._machine, self._size = machine, size
        self._stream = RuledStream(machine)

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._size

    def _collective(self, *_: Any) -> Done:
        self._stream.wait_stream(self._machine.stack[-1])
        self._stream.work()
        return Done(self._machine, self._stream.record_event())

    allreduce = _collective
    _allgather_base = _reduce_scatter_base = all_gather_single = reduce_scatter_single = _collective
