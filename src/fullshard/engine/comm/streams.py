"""Streams and events of an accelerator, and their no-op counterparts on a host.

The engine uses three streams: *compute* (the user's current stream), *gather* and *reduce*. On a
CPU they are one and the same and nearly everything here is a no-op.

Note: memory and streams
    Full buffers are allocated on the gather stream. When compute is done with one, its block may
    serve the next gather, which must then wait for that compute. With prefetching that is fine:
    gather(u+1) is given out before compute(u) and waits for compute(u-1). Without, it is given
    out after compute(u); were u's block handed out at once, it would wait for compute(u) and
    nothing would overlap. So there a block is given back one unit late: gather(u+1) writes where
    unit u-1 was. Either way two blocks serve all units, the host never blocks, and when it runs
    ahead it asks for no more: that is what ``limit_all_gathers`` promises. Without the limit the
    allocator holds a block back until compute has passed it, and no gather waits.

    Reduce buffers are allocated on the compute stream and freed there, after compute has waited for
    the reduce that read them; but the first of a backward is left to the allocator as soon as it is
    being reduced, because the activations of nearly all units are still there. A reduce that is one
    collective has a stream of its own in the backend (NCCL's stream); the reduce stream here is for
    those that consist of several steps.

Note: captured passes
    In a CUDA graph's capture a stream may wait only for what was captured with it, and afterwards
    nothing may wait for what was. So a captured pass, or backward, begins with both other streams
    ordered behind compute and no event of before, and ends with compute behind both and no event
    left. Within it everything is ordered as always. Blocks that ``record_stream`` marks could not
    be used again before the capture ends; there, memory is given back as with
    ``limit_all_gathers``, which orders streams instead: the host of a graph runs ahead of nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

import torch

from .blocks import lasting_zeros, teach_allocator


class Releasable(Protocol):
    """A buffer that can give its memory back."""

    @property
    def flat(self) -> torch.Tensor: ...

    @property
    def release(self) -> Callable[[], object]: ...


class HostStreams:
    """One stream: everything happens in the order it is written down."""

    #: Whether work handed to a stream may still be running when the call returns.
    runs_ahead = False
    #: Whether the pass that runs, or ran last, is captured in a graph.
    capturing = False
    #: Whether that capture broke: nothing that it was given will run, or can be waited for.
    capture_is_lost = False
    _nothing = contextlib.nullcontext()

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cpu":
            teach_allocator()

    def __reduce__(self) -> Any:
        """Copies of what uses the streams of a device use the same ones."""
        return streams_for, (self._device,)

    def on_gather(self) -> contextlib.AbstractContextManager[Any]:
        """Work inside the context goes to the gather stream."""
        return self._nothing

    def on_reduce(self) -> contextlib.AbstractContextManager[Any]:
        """Work inside the context goes to the reduce stream."""
        return self._nothing

    def gather_may_write(self) -> None:
        """Order the gather stream behind the compute that last used the memory it will get."""

    def gather_after_compute(self) -> None:
        """Order the gather stream behind everything compute has been given (an optimizer step)."""

    def note_compute(self) -> Any:
        """An event behind everything that compute has been given."""
        return None

    def gather_after(self, event: Any) -> None:
        """Order the gather stream behind an event, and not behind all of compute."""

    def aside(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Work inside the context goes to a stream of the user's, in order with the current one."""
        return self._nothing

    def compute_after_gather(self) -> None:
        """Order compute behind everything the gather stream has been given."""

    def reduce_after_compute(self) -> None:
        """Order the reduce stream behind everything compute has been given."""

    def compute_after_reduces(self) -> None:
        """Order compute behind everything the reduce stream has been given."""

    def release_after_reduces(self, buffer: Releasable) -> None:
        """Release what the reduce stream reads, for whoever asks for memory when it has.

        In a capture this is left to who releases it after the reduce.
        """
        buffer.release()

    def host_after_gathers(self) -> None:
        """Block the host until the gather stream is empty (parameters that rest on the host)."""

    def rest_on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` in host memory, from where the device can fetch it while it computes."""
        return tensor.to("cpu")

    def copy_to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory that the current stream fills; the host must wait for it."""
        return tensor.to("cpu")

    def host_after_reduces(self) -> None:
        """Block the host until the reduce stream is empty (gradients that rest on the host)."""

    def lasting_zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for what stays through all of a training, filled with zeros."""
        return torch.zeros(numel, dtype=dtype, device=self._device)

    def give_back(self, buffers: Sequence[Releasable], late: bool, limited: bool) -> None:
        """Release one unit's buffers as soon as compute is done with them."""
        for buffer in buffers:
            buffer.release()

    def take_again(self, buffers: Sequence[Releasable]) -> None:
        """Cancel a release that is still owed, because the buffers are about to be refilled."""

    def settle(self) -> None:
        """Carry out every release that is still owed."""

    def begin_pass(self) -> None:
        """A pass begins, which may be captured in a graph: see the note."""

    def begin_backward(self) -> None:
        """A backward begins; raises if it is captured, and its forward was not, or vice versa."""

    def end_pass(self) -> None:
        """A pass, or a backward, has ended: a captured one leaves nothing on other streams."""

    def lose_capture(self) -> None:
        """A captured pass raised: order nothing until the next one begins."""

    def number(self) -> int | None:
        """The number of the user's current stream."""
        return None


class AcceleratorStreams(HostStreams):
    """Three streams of one accelerator, ordered by events."""

    runs_ahead = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        module = torch.get_device_module(device)
        self._current_stream: Callable[[torch.device], Any] = module.current_stream
        self.number = self._current_number = _stream_number(device)  # type: ignore[method-assign]
        self._is_capturing: Callable[[], bool] = getattr(
            module, "is_current_stream_capturing", _never
        )
        self._known: tuple[int | None, Any] = (None, None)
        # High priority: communication should start the moment its input is ready.
        self._gather = module.Stream(device, priority=-1)
        self._reduce = module.Stream(device, priority=-1)
        # Not a method, which would be one more call for every group of parameters.
        stats = getattr(module, "memory_stats_as_nested_dict", None)
        if stats is not None:
            self.lasting_zeros = functools.partial(  # type: ignore[method-assign]
                lasting_zeros, device, functools.partial(stats, device)
            )
        self._owed: tuple[Sequence[Releasable], Any] | None = None
        self._reusable_after: Any = None
        # Events are used again, which takes half as long as new ones: what was made to wait for one
        # waits for what it said then. One is enough for streams that are ordered at once; what a
        # gather will wait for later may have to be kept beside what it waits for now.
        self._make_event: Callable[[], Any] = module.Event
        self._make_events()

    def _make_events(self) -> None:
        self._event = self._make_event()
        self._kept_events = [self._make_event(), self._make_event()]

    def begin_pass(self) -> None:
        capturing = self._is_capturing()
        if capturing or self.capturing:
            self._forget_events()
            self.capturing = capturing
        if capturing:
            self._fork()

    def begin_backward(self) -> None:
        capturing = self._is_capturing()
        if capturing is not self.capturing:
            inside, outside = ("backward", "forward") if capturing else ("forward", "backward")
            raise RuntimeError(
                f"A {inside} is captured in a CUDA graph and its {outside} is not: capture both, "
                "or the whole step"
            )
        if capturing:
            self._fork()

    def _fork(self) -> None:
        compute = self._compute()
        self._order(self._gather, compute)
        self._order(self._reduce, compute)

    def end_pass(self) -> None:
        self.settle()
        if self.capturing:
            self._reusable_after = None
            compute = self._compute()
            self._order(compute, self._gather)
            self._order(compute, self._reduce)

    def lose_capture(self) -> None:
        if self.capturing:
            self.capture_is_lost = True
            self._reusable_after = None
            self._event = _NO_EVENT
            self._kept_events = [_NO_EVENT, _NO_EVENT]

    def _forget_events(self) -> None:
        """Let nothing be ordered behind what another graph captured, or no graph did."""
        self.settle()
        self._reusable_after = None
        self.capture_is_lost = False
        self._make_events()

    def on_gather(self) -> contextlib.AbstractContextManager[Any]:
        return self._gather

    def on_reduce(self) -> contextlib.AbstractContextManager[Any]:
        return self._reduce

    def _compute(self) -> Any:
        """The user's current stream. To ask for its number costs a tenth of asking for it."""
        number = self._current_number()
        known, stream = self._known
        if number is None or number != known:
            stream = self._current_stream(self._device)
            self._known = (number, stream)
        return stream

    def _order(self, behind: Any, ahead: Any) -> None:
        """Let ``behind`` wait for what ``ahead`` has been given so far."""
        self._event.record(ahead)
        self._event.wait(behind)

    def gather_may_write(self) -> None:
        if self._reusable_after is not None:
            self._reusable_after.wait(self._gather)
            self._reusable_after = None

    def gather_after_compute(self) -> None:
        if self.capture_is_lost and not self._is_capturing():
            self.begin_pass()
        self._order(self._gather, self._compute())

    def note_compute(self) -> Any:
        return self._compute().record_event()

    def gather_after(self, event: Any) -> None:
        self._gather.wait_event(event)

    @contextlib.contextmanager
    def aside(self, stream: Any) -> Generator[None, None, None]:
        current = self._current_stream(self._device)
        stream.wait_stream(current)
        with stream:
            yield
        current.wait_stream(stream)

    def compute_after_gather(self) -> None:
        self._order(self._compute(), self._gather)

    def reduce_after_compute(self) -> None:
        self._order(self._reduce, self._compute())

    def compute_after_reduces(self) -> None:
        self._order(self._compute(), self._reduce)

    def release_after_reduces(self, buffer: Releasable) -> None:
        if not self.capturing:
            buffer.flat.record_stream(self._reduce)
            buffer.release()

    def host_after_gathers(self) -> None:
        self._gather.synchronize()

    def rest_on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("cpu").pin_memory()

    def copy_to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def host_after_reduces(self) -> None:
        self._reduce.synchronize()

    def give_back(self, buffers: Sequence[Releasable], late: bool, limited: bool) -> None:
        compute = self._compute()
        if not (limited or self.capturing):
            for buffer in buffers:
                buffer.flat.record_stream(compute)
                buffer.release()
            return
        self.settle()
        one, other = self._kept_events
        event = other if self._reusable_after is one else one
        event.record(compute)
        if late:
            self._owed = (buffers, event)
        else:
            self._release(buffers, event)

    def take_again(self, buffers: Sequence[Releasable]) -> None:
        if self._owed is not None and self._owed[0] and self._owed[0][0] in buffers:
            self._reusable_after = self._owed[1]
            self._owed = None

    def settle(self) -> None:
        if self._owed is not None:
            owed, self._owed = self._owed, None
            self._release(*owed)

    def _release(self, buffers: Sequence[Releasable], after: Any) -> None:
        self._reusable_after = after
        for buffer in buffers:
            buffer.release()


class _NoEvent:
    """Stands in for events of a capture that broke."""

    def record(self, stream: Any) -> None:
        """Nothing that is given to the stream will run."""

    def wait(self, stream: Any) -> None:
        """There is nothing to wait for."""


_NO_EVENT = _NoEvent()


def _never() -> bool:
    return False


def _stream_number(device: torch.device) -> Callable[[], int | None]:
    """A function that returns the current stream's number, or None where torch cannot tell."""
    ask = getattr(torch._C, f"_{device.type}_getCurrentRawStream", None)
    if ask is None or device.index is None:
        return lambda: None
    return functools.partial(ask, device.index)


_streams: dict[torch.device, HostStreams] = {}


def devices_in_use() -> list[torch.device]:
    """The devices on which units compute, or have computed."""
    return [*_streams]


def streams_for(device: torch.device) -> HostStreams:
    """The streams of ``device``; all units on a device share them."""
    streams = _streams.get(device)
    if streams is None:
        on_host = device.type in ("cpu", "meta")
        streams = _streams[device] = HostStreams(device) if on_host else AcceleratorStreams(device)
    return streams
