"""A socket per process at which other ranks find out whether it lives, and leave word.

Note: who is alive
    A process that has ended refuses connections. One that is busy, stopped or stuck does not: its
    kernel accepts them. So a rank that asks learns whether another has ended, on this host or
    another, and nobody has to send heartbeats. Addresses and secrets are exchanged once, over the
    process group itself. A message is one line of JSON, which starts with the receiver's secret;
    the answer is another.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import errno
import functools
import hashlib
import ipaddress
import json
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from .hosts import facts_of_this_host

#: Address, port, secret, number of the correspondent, host.
_RECORD = struct.Struct("!16sH8sI8s")
RECORD_SIZE = _RECORD.size
#: Connections that are tried at the same time.
_AT_A_TIME = 256
_LONGEST_MESSAGE = 1 << 20
#: Seconds that are left to a sender to finish its line.
_LINE_TIME = 2.0
#: An address that stands for all that are not on this host's networks (it is nobody's).
_ELSEWHERE = ("192.0.2.1", 9)
#: Seconds until the next attempt of a process that may open no more files to accept a sender.
_ACCEPTS_AGAIN_AFTER = 0.5


class Correspondent(Protocol):
    """Receives the messages that are for one process group."""

    def receive(self, message: dict[str, Any]) -> dict[str, Any]:
        """Act on a message, and answer it."""


class Address(NamedTuple):
    """The address of a rank's mailbox."""

    host: str
    port: int
    secret: bytes
    number: int
    host_id: bytes

    def packed(self) -> bytes:
        """As bytes of a length that is the same for all."""
        packed = _as_ipv6(self.host).packed
        return _RECORD.pack(packed, self.port, self.secret, self.number, self.host_id)

    @classmethod
    def unpacked(cls, record: bytes) -> Address:
        """From bytes."""
        packed, port, secret, number, host_id = _RECORD.unpack(record)
        address = ipaddress.IPv6Address(packed)
        return cls(str(address.ipv4_mapped or address), port, secret, number, host_id)

    @property
    def is_reachable(self) -> bool:
        """True if this host could connect there: not to another host's loopback interface."""
        return self.port != 0 and (self.is_on_this_host or not _is_loopback(self.host))

    @property
    def is_on_this_host(self) -> bool:
        return self.host_id == _host_id()


def _as_ipv6(host: str) -> ipaddress.IPv6Address:
    address = ipaddress.ip_address(host)
    if isinstance(address, ipaddress.IPv4Address):
        return ipaddress.IPv6Address(f"::ffff:{address}")
    return address


class State(enum.Enum):
    """The result of an attempt to reach a rank."""

    #: Its host refuses the connection: the process has ended.
    ENDED = enum.auto()
    #: Its host took the connection: the process is there.
    THERE = enum.auto()
    #: No answer from its host, or no way to ask it.
    UNKNOWN = enum.auto()


class Contact(NamedTuple):
    """The result of an attempt to reach a rank, and the answer, if the rank gave one."""

    state: State
    answer: dict[str, Any] | None = None


class Mailbox:
    """The socket of this process."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.bind((host, 0))
        self._socket.listen(1024)
        self._host, self._port = host, self._socket.getsockname()[1]
        self._secret = secrets.token_bytes(8)
        self._correspondents: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._next_number = 0
        self._is_open = True
        threading.Thread(target=self._serve, name="fullshard mailbox", daemon=True).start()

    def open_for(self, correspondent: Correspondent) -> Address:
        """Deliver to ``correspondent`` from now on; returns the address that others send to."""
        self._next_number += 1
        self._correspondents[self._next_number] = correspondent
        return Address(self._host, self._port, self._secret, self._next_number, _host_id())

    def forget(self) -> None:
        """Close the inherited socket in a forked child, so that it is not taken for its parent."""
        self._socket.close()

    def close(self) -> None:
        """Refuse connections from now on: this process takes part in nothing any more."""
        self._is_open = False
        with contextlib.suppress(OSError):
            # To close it would not be enough while a thread waits for the next connection.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self) -> None:
        while self._is_open:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._is_open:
                    time.sleep(_ACCEPTS_AGAIN_AFTER)
                continue
            # Whatever a stranger sends: those that come after are listened to.
            with connection, contextlib.suppress(Exception):
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        line, deadline = bytearray(), time.monotonic() + _LINE_TIME
        while not line.endswith(b"\n"):
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            received = connection.recv(65536)
            if not received or len(line) > _LONGEST_MESSAGE:
                return
            line += received
        connection.settimeout(_LINE_TIME)
        secret, number, message = json.loads(line)
        if not secrets.compare_digest(bytes.fromhex(secret), self._secret):
            return
        correspondent = self._correspondents.get(number)
        answer = {"left": True} if correspondent is None else correspondent.receive(message)
        connection.sendall(json.dumps(answer).encode() + b"\n")


_own: list[Mailbox] = []


# At the import, so that it comes after what the program does at its exit. The process may take
# seconds from there to its end.
@atexit.register
def _close_at_exit() -> None:
    for mailbox in _own:
        mailbox.close()


@functools.cache
def own_mailbox(host: str) -> Mailbox:
    """The mailbox of this process at an address of this host."""
    mailbox = Mailbox(host)
    _own.append(mailbox)

    def forget_in_child() -> None:
        mailbox.forget()
        _own.clear()
        own_mailbox.cache_clear()

    # A child (a loader's worker) that outlives this process would keep the socket open, and this
    # process would seem alive.
    os.register_at_fork(after_in_child=forget_in_child)
    return mailbox


def host_towards(store: Any) -> str:
    """The address of this host in the network in which ranks reach ``store``."""
    target = server_of(store) or _ELSEWHERE
    found = _address_towards(*target)
    if found is None or (_is_loopback(found) and not _is_loopback(target[0])):
        # A host often has its own name at its loopback interface, which others cannot reach.
        found = _address_towards(*_ELSEWHERE) or found
    return found or "127.0.0.1"


def server_of(store: Any) -> tuple[str, int] | None:
    """The host and port of the process that serves ``store``; None if none does."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, dist.TCPStore) else None


def _address_towards(host: str, port: int) -> str | None:
    """The address of this host from which it reaches another one, if it can."""
    with contextlib.suppress(OSError):
        for family, *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            # Nothing is sent: to connect a datagram socket is to look up the route.
            with (
                contextlib.suppress(OSError),
                socket.socket(family, socket.SOCK_DGRAM) as probe,
            ):
                probe.connect(address)
                return str(probe.getsockname()[0]).partition("%")[0]
    return None


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


@functools.cache
def _host_id() -> bytes:
    """Identifies a host and its network namespace: containers may have networks of their own."""
    return hashlib.blake2b("\n".join(facts_of_this_host()).encode(), digest_size=8).digest()


def contact(
    addresses: Sequence[Address], message: dict[str, Any] | None, timeout: float
) -> list[Contact]:
    """Connect to all ``addresses``, leave ``message`` there, and read the answers.

    None only tests whether the processes are alive.
    """
    found: list[Contact] = []
    for first in range(0, len(addresses), _AT_A_TIME):
        attempts = [_Attempt(address, message) for address in addresses[first:][:_AT_A_TIME]]
        _make(attempts, timeout)
        found.extend(Contact(attempt.state, attempt.answer()) for attempt in attempts)
    return found


class _Attempt:
    def __init__(self, address: Address, message: dict[str, Any] | None) -> None:
        self.state = State.UNKNOWN
        self.socket: socket.socket | None = None
        self._received = bytearray()
        self._to_send = b""
        if message is not None:
            line = json.dumps([address.secret.hex(), address.number, message])
            self._to_send = line.encode() + b"\n"
        self._is_asked = message is not None
        if not address.is_reachable:
            return
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        code = self.socket.connect_ex((address.host, address.port))
        if code not in (0, errno.EINPROGRESS):
            self._fail(code)

    def answer(self) -> dict[str, Any] | None:
        with contextlib.suppress(ValueError):
            if self._received.endswith(b"\n"):
                answer: dict[str, Any] = json.loads(self._received)
                return answer
        return None

    def go_on(self) -> None:
        """Do what the socket is ready for."""
        assert self.socket is not None
        code = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._fail(code)
            return
        self.state = State.THERE
        try:
            if self._to_send:
                self._to_send = self._to_send[self.socket.send(self._to_send) :]
            elif self._is_asked:
                received = self.socket.recv(65536)
                self._received += received
                if not received or self._received.endswith(b"\n"):
                    self._end()
            else:
                self._end()
        except BlockingIOError:
            pass
        except OSError:
            # It accepted, and ended before it answered, or refused to: the next attempt tells.
            self._end()

    @property
    def awaits(self) -> int:
        sends = self.state is State.UNKNOWN or self._to_send
        return selectors.EVENT_WRITE if sends else selectors.EVENT_READ

    def _fail(self, code: int) -> None:
        if code == errno.ECONNREFUSED:
            self.state = State.ENDED
        self._end()

    def _end(self) -> None:
        assert self.socket is not None
        self.socket.close()
        self.socket = None


def _make(attempts: list[_Attempt], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    with selectors.DefaultSelector() as selector:
        for attempt in attempts:
            if attempt.socket is not None:
                selector.register(attempt.socket, attempt.awaits, attempt)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                attempt = key.data
                attempt.go_on()
                if attempt.socket is None:
                    selector.unregister(key.fileobj)
                elif attempt.awaits != key.events:
                    selector.modify(key.fileobj, attempt.awaits, attempt)
    for attempt in attempts:
        if attempt.socket is not None:
            attempt.socket.close()
