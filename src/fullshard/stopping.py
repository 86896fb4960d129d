"""Lets a training end cleanly when a scheduler requests it. Knows nothing of models or shards."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

__all__ = ["StopRequest"]

#: Seconds in which a signal that comes again is the same request: schedulers send it to ranks as
#: well as to their launcher, which passes it on.
_SAME_REQUEST = 2.0


class StopRequest:
    """Remembers that the process was asked to leave, so that the program can save first.

    Inside the context, Ctrl-C, SIGTERM and a terminal that closes (SIGHUP) end nothing.
    :meth:`agreed` tells all ranks after the same step that one of them was asked. Whoever asks
    again, more than two seconds later, ends the process at once.

    Leave with :attr:`exit_status`: ``fullshard run`` takes it for a stop that was asked for, not
    for a failure, and ends with the same status on every host.

    >>> with StopRequest() as stop:
    ...     for step in range(1, 4):
    ...         ...  # train
    ...         if stop.agreed():
    ...             ...  # fullshard.save(folder, model, optimizer, step=step)
    ...             raise SystemExit(stop.exit_status)
    Ellipsis
    Ellipsis
    Ellipsis
    """

    def __init__(self) -> None:
        #: The signal that this rank received; once ranks have agreed, the same on all of them.
        self.signal: signal.Signals | None = None
        self._asked = 0.0

    def __enter__(self) -> StopRequest:
        names = ("SIGINT", "SIGTERM", "SIGHUP")
        signals = [signal.Signals[name] for name in names if hasattr(signal, name)]
        # Under nohup a terminal may close.
        signals = [number for number in signals if signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._remember) for number in signals}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def exit_status(self) -> int:
        """128 plus the signal's number, such as 143 for SIGTERM; 0 if there was no signal."""
        return 128 + self.signal if self.signal is not None else 0

    def agreed(self, group: dist.ProcessGroup | None = None) -> bool:
        """True if any rank was asked to stop. All ranks of ``group`` have to call this.

        This takes one all-reduce of a number, which waits for the step; without a process group,
        none.
        """
        if dist.is_available() and dist.is_initialized():
            number = torch.tensor(int(self.signal or 0), device=_device_of(group))
            dist.all_reduce(number, dist.ReduceOp.MAX, group=group)
            self.signal = signal.Signals(int(number)) if number else None
        return self.signal is not None

    def _remember(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is not None and self._asked and now - self._asked > _SAME_REQUEST:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif not self._asked:
            self.signal, self._asked = signal.Signals(number), now


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """The device of tensors for the collectives of ``group``."""
    group = group or dist.group.WORLD
    assert group is not None
    if any(device.type == "cpu" for device in group._device_types):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
