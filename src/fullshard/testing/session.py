"""The launcher of the nursery and the store of the ranks, shared by all pools of a process."""

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
    """The launcher and the store. Hold ``lock`` while using the launcher."""

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
        """Return True if ranks can be started; False if the nursery has ended, or after a fork."""
        return self.process == os.getpid() and self.launcher.usable

    def close(self) -> None:
        """End all ranks and wait until they are gone."""
        if self.process == os.getpid():
            self.launcher.close()


_session: Session | None = None


def current_session() -> Session:
    """The session of this process; a new one if there is none or it is not usable any more."""
    global _session
    if _session is None or not _session.usable:
        close_session()
        _session = Session()
    return _session


@atexit.register
def close_session() -> None:
    """End all ranks of this process and wait until they are gone. The next use starts new ones."""
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
            f"port {port} cannot be used for the ranks' store ({error.strerror}): "
            f"choose another one with {PORT_VARIABLE}, or unset it to use any free port"
        ) from None
    return listener
