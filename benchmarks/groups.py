"""Process groups in which one process plays a rank of many: collectives that cost nothing
(``Instant``) or as much time as a given network would need (``Delayed``).

Every implementation that is compared goes through the same group, so that what the group itself
costs the host (a Python call and a counter) is the same for all. Neither group moves data: a
gathered buffer holds what its memory held before. So that matrices hold numbers like weights, as
in training, and not zeros (which a GPU multiplies with less power, hence faster), ``fill`` has
gathers write such numbers in a step that is not timed; the next steps use the same blocks of
memory, which keep them until the allocator gives them back.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

#: Who asks a group for its backend's name to learn what it can do gets NCCL's.
BACKEND = "instant_nccl"

#: Bytes that are copied at once where a copy plays a collective: some milliseconds' worth.
_PACKET = 2**28

#: Up to how many bytes what ranks tell each other is facts about themselves, not parameters.
_FACTS = 2**16


class PresentStore(dist.Store):
    """A store in which all other ranks have always said already what this one says.

    fullshard counts ranks in, in the store of its group, before it does something new. Here the
    count is complete at once, and so the order check stays on, with what it costs.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._values: dict[str, bytes] = {}

    def add(self, key: str, amount: int) -> int:
        return self._size

    def set(self, key: str, value: Any) -> None:
        self._values[key] = value if isinstance(value, bytes) else str(value).encode()

    def get(self, key: str) -> bytes:
        return self._values[self._said_as(key)]

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._said_as(key) in self._values for key in keys)

    def _said_as(self, key: str) -> str:
        """The key under which this rank, the first, says what another says under ``key``."""
        said, _, rank = key.rpartition("/")
        return f"{said}/0" if rank.isdigit() and key not in self._values else key

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        if not self.check(keys):
            raise RuntimeError(f"timeout: nobody will set {keys}")

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    # The name under which torch looks for it when another store is put in front of this one.
    deleteKey = delete_key


class Done(Work):
    """A collective that is over."""

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(None)
        return future


class Instant(dist.ProcessGroup):
    """Rank 0 of ``size``; collectives return at once and do nothing."""

    def __init__(self, size: int) -> None:
        super().__init__(0, size)  # type: ignore[call-arg]
        self.calls = 0
        self.fill = False
        #: Up to how many bytes all ranks say what this one says.
        self.facts_limit = _FACTS
        self._done = Done()
        #: Torch keeps only its own half of the store.
        self.store = PresentStore(size)

    def getBackendName(self) -> str:
        return BACKEND

    # A group in Python has nowhere else to keep these.
    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def pg_name(self) -> str:
        return self.group_name

    def _launch(self, wholes: Sequence[torch.Tensor], times: float = 1.0) -> Work:
        """Start a collective on tensors of which each rank holds or gets an equal part.

        ``times`` is how often a rank receives the other ranks' parts.
        """
        self.calls += 1
        return self._done

    def _gathered(self, outputs: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor]) -> None:
        if self.fill:
            for output, piece in zip(outputs, pieces, strict=True):
                if output.is_floating_point():
                    output.normal_(std=0.02)
                elif output.dtype is torch.uint8 and output.numel() == self.size() * piece.numel():
                    # Encoded numbers: all ranks send what this one sends.
                    output.view(self.size(), -1).copy_(piece.clone().view(-1))

    def _reduced(self, outputs: Sequence[torch.Tensor]) -> None:
        if self.fill:
            for output in outputs:
                output.normal_(std=1e-3)

    # -- what implementations call; torch 2.13 renamed half of it, so both names are here ----------

    def all_gather_single(self, output: torch.Tensor, piece: Any, *_: Any, **__: Any) -> Work:
        self._gathered([output], [piece])
        return self._launch([output])

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], pieces: Any, *_: Any, **__: Any
    ) -> Work:
        self._gathered(outputs, pieces)
        return self._launch(outputs)

    def reduce_scatter_single(
        self, output: torch.Tensor, full: torch.Tensor, *_: Any, **__: Any
    ) -> Work:
        self._reduced([output])
        return self._launch([full])

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor], *_: Any, **__: Any
    ) -> Work:
        self._reduced(outputs)
        return self._launch(fulls)

    def allreduce(self, tensors: Sequence[torch.Tensor], *_: Any, **__: Any) -> Work:
        return self._launch(tensors, times=2)

    def allgather(
        self,
        outputs: Sequence[Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        *_: Any,
        **__: Any,
    ) -> Work:
        for each, given in zip(outputs, inputs, strict=True):
            if given.nbytes <= self.facts_limit and not given.is_floating_point():
                # Pickled objects, or their sizes: all ranks say what this one says.
                for output in each:
                    output.copy_(given)
        return self._launch([tensor for each in outputs for tensor in each])

    def broadcast(self, tensors: Sequence[torch.Tensor], *_: Any, **__: Any) -> Work:
        return self._launch(tensors)

    def alltoall_base(
        self,
        output: torch.Tensor,
        sent: torch.Tensor,
        sizes: Sequence[int] = (),
        *_: Any,
        **__: Any,
    ) -> Work:
        if self.fill and output.numel() == sent.numel():
            # Encoded gradients, or pieces of tensors: others send what this rank sends.
            output.copy_(sent)
        elif self.fill and output.nbytes % 4 == 0:
            self._reduced([output.view(torch.uint8).view(torch.float32)])
        keeps_own = bool(sizes) and sizes[self.rank()] == 0
        # An output without room for what a rank keeps where it is comes from others altogether.
        return self._launch([output], times=self.size() / (self.size() - 1) if keeps_own else 1.0)

    def barrier(self, *_: Any, **__: Any) -> Work:
        return self._launch([])

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    allreduce_coalesced = allreduce


@dataclasses.dataclass(frozen=True)
class Network:
    """What a collective costs: a latency, and the bytes that a rank receives over a bandwidth."""

    gigabytes_per_second: float
    latency_ms: float = 0.02

    def milliseconds(self, received: int) -> float:
        return self.latency_ms + received / self.gigabytes_per_second / 1e6


class Delayed(Instant):
    """An :class:`Instant` group whose collectives take the time that ``network`` would.

    Like NCCL's, they run one after the other on a stream of the group's own, behind what the
    current stream has been given, and ``wait`` orders the current stream behind them. On a CPU
    ``wait`` blocks until the time is over. ``network`` may be set to None: no delay.
    """

    def __init__(self, size: int, network: Network | None, device: torch.device) -> None:
        super().__init__(size)
        self.network = network
        #: Of each collective of the traced steps, something that tells its milliseconds.
        self.trace: list[Callable[[], float]] | None = None
        self._line = _DeviceLine(device) if device.type == "cuda" else _HostLine()

    @property
    def pace(self) -> float:
        """Bytes copied in a millisecond where a copy plays a collective, as this process timed it.

        To be compared with each other, processes have to use the same.
        """
        return self._line.bytes_per_ms

    @pace.setter
    def pace(self, bytes_per_ms: float) -> None:
        self._line.bytes_per_ms = bytes_per_ms

    def _launch(self, wholes: Sequence[torch.Tensor], times: float = 1.0) -> Work:
        self.calls += 1
        if self.network is None:
            return self._done
        from_others = times * (self.size() - 1) / self.size()
        received = int(from_others * sum(tensor.nbytes for tensor in wholes))
        return self._line.launch(self.network.milliseconds(received), self.trace)


class _HostLine:
    """Collectives on a CPU, as times at which they are over."""

    #: Nothing is copied.
    bytes_per_ms = 0.0

    def __init__(self) -> None:
        self._free_at = 0.0

    def launch(self, milliseconds: float, trace: list[Callable[[], float]] | None) -> Work:
        self._free_at = max(self._free_at, time.perf_counter()) + milliseconds / 1e3
        if trace is not None:
            trace.append(lambda: milliseconds)
        return _Until(self._free_at)


class _Until(Done):
    def __init__(self, due: float) -> None:
        super().__init__()
        self._due = due

    def is_completed(self) -> bool:
        return time.perf_counter() >= self._due

    def wait(self, timeout: Any = None) -> bool:
        time.sleep(max(0.0, self._due - time.perf_counter()))
        return True


class _DeviceLine:
    """Collectives on a GPU, as copies to the host that take as long, on a stream of their own.

    Copies have an engine of their own, so that the network takes nothing from what computes. A
    kernel that sleeps occupies a part of one multiprocessor, and matrix products, which are spread
    evenly over all of them, wait for their slowest part.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._source = torch.zeros(_PACKET, dtype=torch.uint8, device=device)
        self._target = torch.zeros(_PACKET, dtype=torch.uint8, pin_memory=True)
        self.bytes_per_ms = self._calibrate()

    def launch(self, milliseconds: float, trace: list[Callable[[], float]] | None) -> Work:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        captured = torch.cuda.is_current_stream_capturing()
        # The events of a graph tell no times: it is taken to keep to the network.
        timed = trace is not None and not captured
        begun = torch.cuda.Event(enable_timing=timed)
        over = torch.cuda.Event(enable_timing=timed)
        with self._stream:
            begun.record(self._stream)
            self._send(int(milliseconds * self.bytes_per_ms))
            over.record(self._stream)
        if trace is not None:
            trace.append(lambda: begun.elapsed_time(over) if timed else milliseconds)
        return _Behind(over, self._device)

    def _send(self, left: int) -> None:
        while left > 0:
            size = min(left, _PACKET)
            self._target[:size].copy_(self._source[:size], non_blocking=True)
            left -= size

    def _calibrate(self) -> float:
        """Bytes that are copied in a millisecond."""
        rates = []
        for _ in range(5):
            begun, over = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with self._stream:
                begun.record(self._stream)
                self._send(_PACKET)
                over.record(self._stream)
            torch.cuda.synchronize(self._device)
            rates.append(_PACKET / begun.elapsed_time(over))
        return sorted(rates)[2]


class _Behind(Done):
    def __init__(self, over: torch.cuda.Event, device: torch.device) -> None:
        super().__init__()
        self._over = over
        self._device = device

    def is_completed(self) -> bool:
        return self._over.query()

    def wait(self, timeout: Any = None) -> bool:
        torch.cuda.current_stream(self._device).wait_event(self._over)
        return True


_made: collections.deque[dist.ProcessGroup] = collections.deque(maxlen=1)


def _hand_over(*_: Any) -> dist.ProcessGroup:
    return _made[0]


dist.Backend.register_backend(BACKEND, _hand_over, devices=["cpu", "cuda"])


def install(group: Instant) -> None:
    """Make ``group`` the default process group of this process."""
    _made.append(group)
    dist.init_process_group(BACKEND, store=group.store, rank=0, world_size=group.size())


def group_of_one(rank: int) -> dist.ProcessGroup:
    """A group of this rank alone, beside the default group."""
    _made.append(Instant(1))
    return dist.new_group([rank], backend=BACKEND)


def install_alone(device: torch.device) -> None:
    """A real default group, NCCL or gloo, in which this process is the only rank."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
