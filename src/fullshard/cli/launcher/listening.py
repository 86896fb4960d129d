"""Restricting the stores that torch hosts to the address that they were given.

The server of a ``TCPStore`` listens on every interface of the machine, whatever its address is, and
has no authentication: anyone who can connect can read and write every key. But it also accepts a
socket that is listening already. So ``TCPStore`` is replaced in the modules of torch that create
stores: those of the launcher, and on each rank the one behind ``init_process_group``.

Uses the standard library only, because ``rank.py`` loads this file by its path before the program.
"""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = [
    "LOOPBACK",
    "is_loopback",
    "is_number",
    "stores_listen_at_given_address",
    "watch_for_torch",
]

LOOPBACK = "127.0.0.1"
#: The module behind ``init_process_group``, and the name with which it creates stores.
_OF_PROGRAMS = "torch.distributed.rendezvous"
_STORE = "TCPStore"
#: The backlog of connections: all ranks connect at about the same time.
_BACKLOG = 2048


def is_number(host: str) -> bool:
    """Return True if ``host`` is a numeric address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return True if ``host`` always means the machine itself."""
    return host == "localhost" or (is_number(host) and ipaddress.ip_address(host).is_loopback)


def _at_given_address(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``TCPStore`` so that its server listens at the given address only.

    Except if the address is a host name: machines may resolve it differently, and many resolve
    their own name to the loopback address, to which other machines could not connect.
    """

    def make_store(
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        *more: Any,
        **options: Any,
    ) -> Any:
        listener = None
        if is_master and "master_listen_fd" not in options:
            listener = _listen(host_name, port)
        if listener is not None:
            port = listener.getsockname()[1]
            options["master_listen_fd"] = listener.detach()  # the store closes it
        return make(host_name, port, world_size, is_master, *more, **options)

    return make_store


@contextlib.contextmanager
def stores_listen_at_given_address(*modules: ModuleType) -> Iterator[None]:
    """Inside the context, stores that ``modules`` create listen at their address only."""
    with contextlib.ExitStack() as undo:
        for module in modules:
            make = getattr(module, _STORE, None)
            if callable(make):
                setattr(module, _STORE, _at_given_address(make))
                undo.callback(setattr, module, _STORE, make)
        yield


def watch_for_torch() -> None:
    """Make the stores of this process's program listen at their address only.

    Does not import torch, which takes seconds and which the program may not need.
    """
    sys.meta_path.insert(0, _Watcher())


class _Watcher(MetaPathFinder):
    """Changes the module behind ``init_process_group`` when the program imports it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _OF_PROGRAMS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_change(module: ModuleType) -> None:
                execute(module)
                make = getattr(module, _STORE, None)
                if callable(make):
                    setattr(module, _STORE, _at_given_address(make))

            spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def _listen(host: str, port: int) -> socket.socket | None:
    """A socket that listens at ``host`` only; None if torch has to listen itself.

    For example if a store of this process already listens there, which torch then shares.
    """
    with contextlib.suppress(OSError, ValueError):
        address = ipaddress.ip_address(socket.gethostbyname(host) if host == "localhost" else host)
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            # As torch does. This also allows listening on a port that the launcher has reserved.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((str(address), port))
            listener.listen(_BACKLOG)
            return listener
        except OSError:
            listener.close()
    return None
