"""Leaving a run in order: a signal asks for it, and all ranks do it after the same step."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

__all__ = ["StopRequest"]


class StopRequest:
    """Inside the context, signals to leave are remembered, and end nothing; a second one does.

    They are Ctrl-C, SIGTERM, and a terminal that closes.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

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

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        signal.signal(number, signal.SIG_DFL)
