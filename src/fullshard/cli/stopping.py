"""Leaving a run in order: a signal asks for it, and all ranks do it after the same step."""

from __future__ import annotations

import signal
from types import FrameType

__all__ = ["StopRequest"]


class StopRequest:
    """Remembers Ctrl-C and SIGTERM instead of ending the process. A second one ends it."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        signal.signal(number, signal.SIG_DFL)
