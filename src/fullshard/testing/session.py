"""What all pools of a test process share: the nursery's launcher and the store ranks meet at."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import threading

import torch.distributed as dist

from .errors import RankSetupError
from .launcher import Launcher
from .protocol import LOOPBACK

PORT_VARIABLE = "FULLSHARD_TEST_PORT"


class Session:
    """The launcher and the store. ``lock`` is held by whoever talks to the launcher."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.lock = threading.RLock()
        listener = _listen(_chosen_port())
        self.port: int = listener.getsockname()[1]
        self.launcher = Launcher()
        self._store = dist.TCPStore(
            LOOPBACK,
            self.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    @property
    def usable(self) -> bool:
        """Whether ranks can be started; not after the nursery ended, nor in a forked process."""
        return self.process == os.getpid() and self.launcher.usable

    def close(self) -> None:
        """End all ranks and wait until they are gone."""
        if self.process == os.getpid():
            self.launcher.close()


_session: Session | None = None


def current_session() -> Session:
    """The session of this process; a new one when there is none or it can no longer be used."""
    global _session
    if _session is None or not _session.usable:
        close_session()
        _session = Session()
    return _session


@atexit.register
def close_session() -> None:
    """End every rank of this process and wait until they are gone. The next use starts anew."""
    global _session
    if _session is not None:
        with contextlib.suppress(OSError):
            _session.close()
        _session = None


def _chosen_port() -> int:
    given = os.environ.get(PORT_VARIABLE) or "0"
    if not given.isdecimal() or int(given) > 65535:
        raise RankSetupError(
            f"{PORT_VARIABLE} is {given!r}, expected a port number from 0 to 65535: "
            "correct it, or unset it to use any free port"
        )
    return int(given)


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise RankSetupError(
            f"port {port} cannot be used for the ranks to meet ({error.strerror}): "
            f"choose another one with {PORT_VARIABLE}, or unset it to use any free port"
        ) from None
    return listener
