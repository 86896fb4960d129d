"""The test process's view of one rank: its process, its connection and its files."""

from __future__ import annotations

import contextlib
import os
import pickle
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from .launcher import START_TIMEOUT, Launcher
from .protocol import Assignment, Ready
from .report import without_noise
from .stacks import await_stack, read_stack


class RankEnded(Exception):
    """The rank's process ended. ``status`` is as of os.waitpid, None when it is unknown."""

    def __init__(self, status: int | None) -> None:
        super().__init__(status)
        self.status = status


class RankProcess:
    """A started rank. Call ``join`` once, after all ranks of a pool have been started."""

    def __init__(self, launcher: Launcher, assignment: Assignment) -> None:
        self.rank = assignment.rank
        self._launcher = launcher
        self._output_file: Path = assignment.output_file
        self._stack_file: Path = assignment.stack_file
        self.process, self.connection = launcher.start_rank()
        self.send(pickle.dumps(assignment))

    def join(self) -> str | None:
        """Wait until the rank has joined the process group; returns an error message or None."""
        if not wait([self.connection], START_TIMEOUT):
            return f"it did not join the process group within {START_TIMEOUT:.0f} s"
        try:
            ready: Ready = self.receive()
        except RankEnded:
            return "its process ended while it was joining the process group"
        return ready.error

    def send(self, message: bytes) -> None:
        """Send a pickled message. If the rank is dead, it is lost, and ``receive`` raises."""
        with contextlib.suppress(OSError):
            self.connection.send_bytes(message)

    def receive(self) -> Any:
        """The rank's next message; raises RankEnded if there will be none."""
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            raise RankEnded(self._launcher.await_end(self.process)) from None

    def receive_if_any(self) -> Any:
        """The rank's next message, None while it runs; raises RankEnded if there is none."""
        # In this order, the end of the rank is noticed only after all its messages are read.
        status = self._launcher.ended(self.process)
        if self.connection.poll():
            return self.receive()
        if status is not None:
            raise RankEnded(status)
        return None

    def output(self) -> str:
        """The rank's stdout and stderr since the current run began."""
        if not os.path.getsize(self._output_file):
            return ""
        return without_noise(self._output_file.read_text(errors="replace"))

    def stack_now(self) -> str:
        """The stack of the rank; call ``request_stacks`` first."""
        return await_stack(self._stack_file)

    def stack_at_end(self) -> str:
        """The stack of the rank when its process ended, if it could still write it."""
        return read_stack(self._stack_file)

    def discard(self) -> None:
        """Close the connection and remove the files, when the process has ended."""
        self.connection.close()
        for file in (self._output_file, self._stack_file):
            file.unlink(missing_ok=True)


def connections(ranks: list[RankProcess]) -> list[Connection]:
    """The connections on which messages from the ranks arrive."""
    return [rank.connection for rank in ranks]
