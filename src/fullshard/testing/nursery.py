"""The process from which ranks are forked. It imports torch once and must stay single-threaded.

Note [Who ends whom]
The test process and the nursery share a socket. When the test process ends in any way, the nursery
reads end-of-file, kills every rank and the processes that the rank started (each rank leads a
process group of its own), removes the pool's files and exits. When the nursery itself is killed,
the kernel kills its ranks (PR_SET_PDEATHSIG, on Linux). The nursery and its ranks are in a session
of their own, so that Ctrl-C in a terminal reaches only the test process, which then decides.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
from typing import Any

# Modules that a first forward, backward and optimizer step would otherwise import on every rank.
PRELOADED = ("torch", "torch.distributed", "torch._dynamo")
_PR_SET_PDEATHSIG = 1


def serve(socket_handle: int, directory: str, also_preload: list[str]) -> None:
    """Fork ranks on request until the test process closes its end of the socket."""
    for name in (*PRELOADED, *also_preload):
        _preload(name)
    # Forked ranks share the memory of these objects as long as no garbage collector touches them.
    gc.collect()
    gc.freeze()
    Nursery(socket.socket(fileno=socket_handle), directory).run()


def _preload(name: str) -> None:
    try:
        importlib.import_module(name)
    except ImportError:
        # The test process has a pytest that cannot be imported here: it uses the stand-in.
        if name == "pytest":
            from .pytest_stand_in import install

            install()


class Nursery:
    """Forks, kills and reaps ranks.

    Requests and answers are lines of JSON. {"start": true}, sent together with the handle of
    the rank's socket, is answered by {"started": pid}; {"kill": [pid, ...]} is not answered;
    and whenever a rank ended, {"ended": pid, "status": what os.waitpid says} is sent.
    """

    def __init__(self, test_process: socket.socket, directory: str) -> None:
        self._test_process = test_process
        self._directory = directory
        self._unread = b""
        self._ranks: set[int] = set()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)

    def run(self) -> None:
        """Serve requests until the test process has ended, then end all ranks and clean up."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_writer.fileno())
        try:
            while True:
                readable, _, _ = select.select([self._test_process, self._wake_reader], [], [])
                if self._wake_reader in readable:
                    self._wake_reader.recv(4096)
                    self._reap()
                if self._test_process in readable and not self._handle_requests():
                    return
        except OSError:
            return  # the test process has closed its end of the socket
        finally:
            self._end_all()

    def _handle_requests(self) -> bool:
        received, handles, _, _ = socket.recv_fds(self._test_process, 4096, 1)
        if not received:
            return False
        *requests, self._unread = (self._unread + received).split(b"\n")
        for request in map(json.loads, requests):
            if "kill" in request:
                self._kill(request["kill"])
            else:
                self._start(handles.pop())
        return True

    def _start(self, handle: int) -> None:
        rank = os.fork()
        if rank == 0:
            self._become_rank(handle)
        # Both sides set the process group, so that it exists whichever of them runs first.
        with contextlib.suppress(OSError):
            os.setpgid(rank, rank)
        os.close(handle)
        self._ranks.add(rank)
        self._tell({"started": rank})

    def _become_rank(self, handle: int) -> None:
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setpgid(0, 0)
            nursery = os.getppid()
            _die_with_parent()
            for end in (self._test_process, self._wake_reader, self._wake_writer):
                end.close()
            if nursery != 1:
                from .worker import serve_requests

                serve_requests(handle)
                status = 0
        finally:
            os._exit(status)

    def _reap(self) -> None:
        for rank in sorted(self._ranks):
            ended, status = os.waitpid(rank, os.WNOHANG)
            if ended:
                self._ranks.discard(rank)
                _kill_group(rank)
                self._tell({"ended": rank, "status": status})

    def _kill(self, ranks: list[int]) -> None:
        # A process id that is not in the set may belong to another process by now.
        for rank in self._ranks.intersection(ranks):
            _kill_group(rank)

    def _end_all(self) -> None:
        for rank in self._ranks:
            _kill_group(rank)
        for rank in self._ranks:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(rank, 0)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _tell(self, message: dict[str, Any]) -> None:
        self._test_process.sendall(json.dumps(message).encode() + b"\n")


def _kill_group(rank: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(rank, signal.SIGKILL)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
