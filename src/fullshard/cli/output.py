"""Standard output that never raises, so that training continues when output is lost.

Terminals close, pipes lose their reader (``fullshard train | head``), disks fill up, and an ASCII
terminal cannot show every character that a model writes.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys

__all__ = ["Output", "discard_output"]


class Output(io.TextIOBase):
    """The standard output of the process at the time of construction.

    Characters that its encoding does not have are replaced by question marks. After the first write
    that fails, all further output is discarded.
    """

    def __init__(self) -> None:
        self._stream = sys.stdout
        self._is_lost = sys.stdout is None

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._stream, "encoding", None) or "utf-8"

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        try:
            return not self._is_lost and self._stream.isatty()
        except (OSError, ValueError):
            return False

    def write(self, text: str) -> int:
        if not self._is_lost:
            try:
                self._write(text)
            except (OSError, ValueError) as problem:
                self._give_up(problem)
        return len(text)

    def flush(self) -> None:
        if not self._is_lost:
            try:
                self._stream.flush()
            except (OSError, ValueError) as problem:
                self._give_up(problem)

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            self._stream.write(text.encode(self.encoding, "replace").decode(self.encoding))

    def _give_up(self, problem: Exception) -> None:
        self._is_lost = True
        with contextlib.suppress(OSError, ValueError):
            discard_output()
        # A reader that closed the pipe did so on purpose.
        if sys.stderr is not None and not isinstance(problem, BrokenPipeError):
            with contextlib.suppress(OSError, ValueError):
                reason = getattr(problem, "strerror", None) or problem
                print(
                    f"fullshard: cannot write to standard output: {reason}; training continues",
                    file=sys.stderr,
                    flush=True,
                )


def discard_output() -> None:
    """Redirect standard output to the null device, so that Python can flush it when it exits."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, sys.stdout.fileno())
    finally:
        os.close(nowhere)
