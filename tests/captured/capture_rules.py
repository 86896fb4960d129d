"""Streams and events that follow CUDA's rules of stream capture, for tests without a GPU.

What CUDA says of a capture: a stream that waits for an event of the capture becomes a part of it; a
captured stream may wait for no event of before, and no stream for one of a capture that is over;
when the capture ends, its first stream must have waited for all work of the others. Work is every
operation of torch's that runs while a stream is the current one, and every collective. In a capture
the host may ask for no value.

Beside that, in captures and outside: what one stream writes, another may read or write only if it
has waited for that; and the allocator gives freed memory to the stream that it was allocated on,
which must have waited for what the others did with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class BrokeCapture(RuntimeError):
    """What CUDA would refuse, with its own words."""


class Raced(RuntimeError):
    """What CUDA would let happen, and nobody would notice but by wrong numbers."""


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


Moments = dict[RuledStream, int]


class Block:
    """The memory of one storage: who has used it when."""

    def __init__(self, owner: RuledStream | None) -> None:
        #: The stream that it was allocated on, and the capture, each of which has memory of its
        #: own; None where that was not seen.
        self.owner = owner
        self.capture = owner.capture if owner is not None else None
        self.reads: Moments = {}
        self.writes: Moments = {}
        #: The streams that ``record_stream`` named, and what they had seen when it was freed: the
        #: allocator waits for them before it gives the memory to anyone.
        self.recorded: set[RuledStream] = set()
        self.awaited: Moments = {}

    @property
    def uses(self) -> Iterable[tuple[RuledStream, int]]:
        return [*self.reads.items(), *self.writes.items()]


class Memory:
    """All memory, by storage, and blocks that their owners may give to what is allocated next."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        self._freed: list[Block] = []

    def note(
        self, stream: RuledStream, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]
    ) -> None:
        """``stream`` has just done work on these tensors."""
        for tensor in read:
            block = self._of(tensor)
            _check(stream, block.writes.items(), "reads what it has not waited for")
            block.reads[stream] = stream.seen[stream]
        for tensor in written:
            block = self._of(tensor)
            _check(stream, block.uses, "writes to what others use")
            block.writes[stream] = stream.seen[stream]

    def allocate(self, stream: RuledStream, storage: torch.UntypedStorage) -> None:
        source = (stream, stream.capture)
        for block in [block for block in self._freed if (block.owner, block.capture) == source]:
            others = [use for use in block.uses if use[1] > block.awaited.get(use[0], 0)]
            _check(stream, others, "is given memory that others use")
            self._freed.remove(block)
        self._blocks[storage._cdata] = Block(stream)

    def make(self, tensor: torch.Tensor) -> None:
        """A new tensor, of whose past nothing is known: its memory is left to the allocator."""
        self._blocks[tensor.untyped_storage()._cdata] = Block(None)

    def free(self, storage: torch.UntypedStorage) -> None:
        block = self._blocks.pop(storage._cdata, None)
        if block is not None:
            for stream in block.recorded:
                for other, moment in stream.seen.items():
                    block.awaited[other] = max(moment, block.awaited.get(other, 0))
            self._freed.append(block)

    def record(self, tensor: torch.Tensor, stream: RuledStream) -> None:
        self._of(tensor).recorded.add(stream)

    def _of(self, tensor: torch.Tensor) -> Block:
        return self._blocks.setdefault(tensor.untyped_storage()._cdata, Block(None))


def _check(stream: RuledStream, uses: Iterable[tuple[RuledStream, int]], told: str) -> None:
    for other, moment in uses:
        if stream.seen.get(other, 0) < moment:
            raise Raced(f"stream {stream.number} {told} on stream {other.number}")


class Machine:
    """Stands in for ``torch.cuda``, as far as the engine's streams ask it."""

    def __init__(self) -> None:
        self.streams: list[RuledStream] = []
        self.memory = Memory()
        self.stack = [RuledStream(self)]

    @contextlib.contextmanager
    def watched_memory(self) -> Generator[None, None, None]:
        """See what buffers do to their storages, which is no operation."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            if size and not storage.nbytes():
                self.memory.allocate(self.stack[-1], storage)
            elif not size and storage.nbytes():
                self.memory.free(storage)
            return resize(storage, size)

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

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
                # The current stream replays it at once.
                self.stack[-1].seen[other] = other.seen[other]


class Working(TorchDispatchMode):
    """Counts every operation as work of the current stream, on its tensors."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        stream, kwargs = self._machine.stack[-1], kwargs or {}
        if stream.capture is not None and function in _ASKS_FOR_VALUES:
            raise BrokeCapture("operation not permitted when stream is capturing")
        stream.work()
        result = function(*args, **kwargs)
        if not function.is_view:
            written = _written(function, args, kwargs)
            given = _tensors((args, kwargs))
            known = {id(tensor) for tensor in written}
            read = [tensor for tensor in given if id(tensor) not in known]
            storages = {tensor.untyped_storage()._cdata for tensor in given}
            for made in _tensors(result):
                if made.untyped_storage()._cdata not in storages:
                    self._machine.memory.make(made)
                    written.append(made)
            self._machine.memory.note(stream, read, written)
        return result


_ASKS_FOR_VALUES = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _written(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that an operation writes to, by its schema."""
    found: list[torch.Tensor] = []
    for position, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += _tensors(value)
    return found


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

    def _collective(self, outputs: Any, inputs: Any = (), *_: Any) -> Done:
        self._stream.wait_stream(self._machine.stack[-1])
        self._stream.work()
        self._machine.memory.note(self._stream, _tensors(inputs), _tensors(outputs))
        return Done(self._machine, self._stream.record_event())

    allreduce = alltoall_base = _collective
    _allgather_base = _reduce_scatter_base = all_gather_single = reduce_scatter_single = _collective
    allgather_into_tensor_coalesced = all_gather_single_coalesced = _collective
