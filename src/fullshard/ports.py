"""Reserving a free TCP port for another process to listen on. Imports nothing of fullshard."""

from __future__ import annotations

import socket

__all__ = ["reserve_port"]


def reserve_port(address: str) -> socket.socket:
    """Bind a socket to a free port, so that the system gives that port to nobody else.

    While the socket is open, another process can listen on the port if it asks for it by number.
    This works on Linux only; elsewhere the open socket blocks that process, too. An empty
    ``address`` means all addresses of this machine.
    """
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # If both sockets set this option, a second one can bind the port while this one only holds it.
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((address, 0))
    return reserved
