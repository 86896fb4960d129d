"""The time that a program may take, shared by its parts, which measure rounds while it lasts."""

from __future__ import annotations

import time
from collections.abc import Iterator


class TimeLimit:
    """``seconds`` from now on for equal parts; what one of them leaves is there for the next."""

    def __init__(self, seconds: float, parts: int) -> None:
        self._began = time.monotonic()
        self._seconds = seconds
        self._parts = parts
        self._begun = 0

    def rounds(self, count: int) -> Iterator[int]:
        """The rounds of the next part: at least one, and no more when its time is up."""
        self._begun += 1
        until = self._began + self._seconds * self._begun / self._parts
        for index in range(count):
            if index and time.monotonic() > until:
                print(f"({index} of {count} rounds: the time was up)")
                return
            yield index
