"""The test process's handle of its nursery: starting it, requesting ranks, closing it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from .errors import RankSetupError

START_TIMEOUT = 120.0
_CLOSE_TIMEOUT = 10.0
_BOOT = (
    "import json, sys; options = json.loads(sys.argv[1]); sys.path[:] = options['import_path']; "
    "from fullshard.testing.nursery import serve; "
    "serve(options['socket'], options['directory'], options['preload'])"
)
_WORTH_PRELOADING = ("numpy", "pytest", "hypothesis")
# Threads of a math library would not survive the fork, so none are started.
_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class Launcher:
    """Starts a nursery at once, and waits for it only when the first rank is requested."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="fullshard-ranks-"))
        self._socket, theirs = socket.socketpair()
        self._was_asked = False
        self._unread = b""
        self._started: list[int] = []
        self._ended: dict[int, int] = {}
        options = {
            "import_path": [os.path.abspath(entry) for entry in sys.path],
            "socket": theirs.fileno(),
            "directory": str(self.directory),
            "preload": [name for name in _WORTH_PRELOADING if name in sys.modules],
        }
        self._log = self.directory / "nursery.log"
        with theirs, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(options)],
                env=os.environ | _ONE_THREAD,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def fileno(self) -> int:
        """A file descriptor that becomes readable when a rank has ended; see ``ended``."""
        return self._socket.fileno()

    def start_rank(self) -> tuple[int, Connection]:
        """Fork a new rank; returns its process id and the connection to it."""
        self._was_asked = True
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._socket, [b'{"start": true}\n'], [theirs.fileno()])
                self._read_until(lambda: bool(self._started), START_TIMEOUT)
            except BaseException as error:
                # A late answer must not be mistaken for the answer to the next request.
                ours.close()
                reason = self._why_unusable()
                self.close()
                if isinstance(error, OSError):
                    raise RankSetupError(reason) from error
                raise
        return self._started.pop(), Connection(ours.detach())

    def kill_ranks(self, processes: list[int]) -> None:
        """Kill ranks and the processes that they started, and wait until they are gone."""
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps({"kill": processes}).encode() + b"\n")
            self._read_until(lambda: self._ended.keys() >= set(processes), _CLOSE_TIMEOUT)

    def ended(self, process: int) -> int | None:
        """The status of a rank that has ended, as from os.waitpid; None while it runs."""
        with contextlib.suppress(OSError):
            self._read_for(0.0)
        return self._ended.get(process)

    def await_end(self, process: int) -> int | None:
        """Wait for a rank that is ending, and return its status; None if it stays unknown."""
        with contextlib.suppress(OSError):
            self._read_until(lambda: process in self._ended, _CLOSE_TIMEOUT)
        return self._ended.get(process)

    @property
    def usable(self) -> bool:
        """Return True if the nursery is running and can start ranks."""
        return self._socket.fileno() >= 0 and self._process.poll() is None

    def close(self) -> None:
        """End the nursery and all its ranks, and wait until they are gone."""
        self._socket.close()
        if not self._was_asked:
            # It may still be importing torch, and it has no ranks to end.
            self._process.kill()
        try:
            self._process.wait(_CLOSE_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _read_until(self, satisfied: Callable[[], bool], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not satisfied():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            self._read_for(remaining)

    def _read_for(self, seconds: float) -> None:
        readable, _, _ = select.select([self._socket], [], [], seconds)
        if not readable:
            return
        received = self._socket.recv(65536)
        if not received:
            raise ConnectionResetError
        *messages, self._unread = (self._unread + received).split(b"\n")
        for message in map(json.loads, messages):
            if "started" in message:
                self._started.append(message["started"])
                # The system reuses process ids after a while.
                self._ended.pop(message["started"], None)
            else:
                self._ended[message["ended"]] = message["status"]

    def _why_unusable(self) -> str:
        log = self._log.read_text(errors="replace") if self._log.exists() else ""
        last_line = (log.strip().splitlines() or ["it left no message"])[-1]
        return (
            "the process that starts the ranks ended or did not answer "
            f"(exit status {self._process.poll()}): {last_line}"
        )
