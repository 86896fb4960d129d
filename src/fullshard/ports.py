"""A port that is chosen now, for another process to listen on later. Knows nothing of fullshard."""

from __future__ import annotations

import socket

__all__ = ["reserve_port"]


def reserve_port(address: str) -> socket.socket:
    """A free port that nobody else is given while the socket is open, for others to listen on.

    Only on Linux: elsewhere the socket keeps away who asks for its port by number, too. An empty
    ``address`` stands for all of this machine's.
    """
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # With this option on both sides, a second socket may be bound while this one is idle.
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((address, 0))
    return reserved
