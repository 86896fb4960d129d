"""Launchers of several machines meet over the network, at the address that the user gave.

torch's launcher and gloo look for this machine's address under its name, which many clusters do not
resolve, or resolve to an address that no other machine can reach. The way to the rendezvous
endpoint tells more: the address and the interface from which packets leave for it are those at
which the other machines reach this one.

A store on another machine does not answer while the network is down, for as long as TCP tries. So
that the launcher stays able to react, :class:`PatientRendezvous` has another thread ask.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import queue
import socket
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    c10d_rendezvous_backend,
    rendezvous_handler_registry,
    static_tcp_rendezvous,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from .listening import is_loopback

__all__ = [
    "PatientRendezvous",
    "interface_variables",
    "patient_backend",
    "stores_found_by_address",
]

_Answer = TypeVar("_Answer")

#: The option, one of ``--rdzv-conf``, for the seconds without word from a host after which it is
#: lost, and its default. Until then, a network that comes back lets training go on.
HOST_TIMEOUT = "host_timeout"
_SECONDS_TO_LOSE = 30.0
#: Rendezvous of torch that ask a store, and the names of theirs with more patience.
_PATIENT = {"c10d": "fullshard-c10d", "static": "fullshard-static"}
#: Seconds for which the launcher waits for an answer that it can do without.
_SECONDS_TO_ANSWER = 2.0
#: Seconds after which it says that it waits for other hosts, and those for which it does, unless
#: ``--rdzv-conf join_timeout=`` says otherwise, as torch's does.
_SECONDS_TO_TELL = 30.0
_SECONDS_TO_JOIN = 600
#: torch's function that decides which launcher hosts the store.
_IS_HOST = "_matches_machine_hostname"


def interface_variables(arguments: Namespace) -> dict[str, str | None]:
    """Variables for ranks of several machines; sets ``--local-addr`` where the user did not."""
    endpoint = arguments.rdzv_endpoint
    if arguments.rdzv_backend == "static" and not endpoint:
        endpoint = arguments.master_addr
    if arguments.local_addr is None:
        arguments.local_addr = _address_towards(parse_rendezvous_endpoint(endpoint, 0)[0])
    # Not NCCL's: it looks for interfaces itself, and may use several.
    return {"GLOO_SOCKET_IFNAME": _interface_of(arguments.local_addr)}


def patient_backend(backend: str) -> str:
    """The rendezvous to use instead of torch's ``backend``."""
    return _PATIENT.get(backend, backend)


@contextlib.contextmanager
def stores_found_by_address() -> Iterator[None]:
    """Inside the context, a launcher hosts the store if its address is one of this machine's.

    torch compares it with the addresses that this machine's name stands for.
    """
    before = vars(c10d_rendezvous_backend).get(_IS_HOST)
    if not callable(before):
        yield
        return

    def is_here(host: str) -> bool:
        if host in ("localhost", socket.gethostname()):
            return True
        addresses = _addresses_of(host)
        return any(_can_listen_at(family, address) for family, address in addresses)

    setattr(c10d_rendezvous_backend, _IS_HOST, is_here)
    try:
        yield
    finally:
        setattr(c10d_rendezvous_backend, _IS_HOST, before)


# -- addresses and interfaces ----------------------------------------------------------------------


def _address_towards(host: str) -> str | None:
    """The address from which packets leave for ``host``; None if no other machine could use it."""
    for family, address in _addresses_of(host):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as towards:
            towards.connect((address, 9))  # sends nothing
            own: str = towards.getsockname()[0]
            if not is_loopback(own):
                return own
    return None


def _addresses_of(host: str) -> list[tuple[socket.AddressFamily, str]]:
    try:
        found = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError):
        return []
    return [(family, str(place[0])) for family, _, _, _, place in found]


def _can_listen_at(family: socket.AddressFamily, address: str) -> bool:
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((address, 0))
        return True
    return False


class _SocketAddress(ctypes.Structure):
    _fields_ = (("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26))


class _InterfaceAddress(ctypes.Structure):
    """The beginning of ``struct ifaddrs``, see getifaddrs(3)."""


_InterfaceAddress._fields_ = (
    ("next", ctypes.POINTER(_InterfaceAddress)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SocketAddress)),
)


def _interface_of(address: str | None) -> str | None:
    """The interface that has ``address``; None where that cannot be found out."""
    if address is None or sys.platform != "linux":
        return None
    first = ctypes.POINTER(_InterfaceAddress)()
    libc = ctypes.CDLL(None)
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        return None
    try:
        entry = first
        while entry:
            if _text_of(entry.contents.address) == address:
                return str(entry.contents.name.decode())
            entry = entry.contents.next
    finally:
        libc.freeifaddrs(first)
    return None


def _text_of(address: Any) -> str | None:
    """An address of an interface, as a number in words; it stands behind the port and others."""
    if not address:
        return None
    begin = {socket.AF_INET: (2, 4), socket.AF_INET6: (6, 16)}.get(address.contents.family)
    if begin is None:
        return None
    start, size = begin
    packed = bytes(address.contents.data)[start : start + size]
    return socket.inet_ntop(address.contents.family, packed)


# -- a launcher that does not hang -----------------------------------------------------------------


class PatientRendezvous(RendezvousHandler):
    """A rendezvous of torch's that a thread of its own talks to, in the order of the questions.

    The launcher's thread waits only as long as an answer is worth; signals reach it while it does.
    """

    def __init__(self, inner: RendezvousHandler, parameters: RendezvousParameters) -> None:
        self._inner = inner
        #: Where the launchers meet, and seconds without word after which a host is lost.
        self.endpoint = parameters.endpoint
        self.host_timeout = _seconds(parameters.get(HOST_TIMEOUT))
        self._hosts = parameters.min_nodes
        # Without a deadline of its own, such as under ``static``, torch's holds.
        given = parameters.get("join_timeout") or parameters.get("timeout")
        self._seconds_to_join = int(given or _SECONDS_TO_JOIN)
        self._questions: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._waiting: Future[int] | None = None
        self._thread = threading.Thread(target=self._answer, name="rendezvous", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the other launchers; print for whom if that takes long."""
        asked, told = time.monotonic(), False
        answer = self._ask(self._inner.next_rendezvous)
        while True:
            with contextlib.suppress(TimeoutError):
                return answer.result(timeout=1.0)
            if answer.done():  # a timeout of its own
                return answer.result()
            waited = time.monotonic() - asked
            if waited > self._seconds_to_join + _SECONDS_TO_TELL:
                raise RendezvousTimeoutError(
                    f"{self.endpoint}, where the hosts meet, has not answered for {waited:.0f} s"
                )
            if waited > _SECONDS_TO_TELL and not told:
                told = True
                print(
                    f"fullshard: {socket.gethostname()} has waited for {waited:.0f} s to meet "
                    f"{self._hosts} hosts (itself included) at {self.endpoint}, and gives up "
                    f"after {self._seconds_to_join} s (--rdzv-conf join_timeout=SECONDS)",
                    file=sys.stderr,
                    flush=True,
                )

    def num_nodes_waiting(self) -> int:
        """The hosts that want to take part; none if the store does not answer."""
        worth = 0.0  # seconds: the launcher has waited for this answer before
        if self._waiting is None:
            self._waiting = self._ask(self._inner.num_nodes_waiting)
            worth = _SECONDS_TO_ANSWER
        try:
            number = self._waiting.result(timeout=worth)
        except TimeoutError:
            if not self._waiting.done():
                return 0
            raise
        except BaseException:
            self._waiting = None
            raise
        self._waiting = None
        return number

    def is_closed(self) -> bool:
        """True if the store says that no attempt may follow."""
        return self._in_time(self._inner.is_closed, False)

    def set_closed(self) -> None:
        """Tell the other launchers, if they can be reached, that no attempt follows."""
        self._in_time(self._inner.set_closed, None)

    def shutdown(self) -> bool:
        """Leave; the store may not hear of it."""
        return self._in_time(self._inner.shutdown, False)

    def get_backend(self) -> str:
        """The name of torch's rendezvous."""
        return self._inner.get_backend()

    @property
    def use_agent_store(self) -> bool:
        """True if ranks meet at the launchers' store."""
        return self._inner.use_agent_store

    def get_run_id(self) -> str:
        """The run's name."""
        return self._inner.get_run_id()

    def _ask(self, question: Callable[[], _Answer]) -> Future[_Answer]:
        answer: Future[_Answer] = Future()
        self._questions.put((question, answer))
        return answer

    def _in_time(self, question: Callable[[], _Answer], otherwise: _Answer) -> _Answer:
        answer = self._ask(question)
        try:
            return answer.result(timeout=_SECONDS_TO_ANSWER)
        except TimeoutError:
            return otherwise

    def _end(self) -> None:
        """At exit, return when the thread is out of torch's C++ code, or hangs there.

        The interpreter ends its threads when it ends, and to end one there aborts the process.
        """
        self._questions.put(None)
        self._thread.join(_SECONDS_TO_ANSWER)

    def _answer(self) -> None:
        while (asked := self._questions.get()) is not None:
            question, answer = asked
            del asked
            try:
                answer.set_result(question())
            except BaseException as error:
                answer.set_exception(error)
            del question, answer


class _StoreOfEachAttempt(RendezvousHandler):
    """torch's static rendezvous, whose ranks get a store of their own in every attempt.

    torch gives them the launchers' store each time, in which restarted ranks would find the
    addresses of ranks that have died.
    """

    def __init__(self, inner: RendezvousHandler) -> None:
        self._inner = inner
        self._attempts = 0
        #: The server of the running attempt's store, on the first host.
        self._server: Any = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other launchers; the first one serves a store for the ranks."""
        met = self._inner.next_rendezvous()
        attempt, self._attempts = self._attempts, self._attempts + 1
        first = met.bootstrap_store_info
        if attempt == 0 or first is None:
            return met
        key = f"fullshard/port of attempt {attempt}"
        if met.rank == 0:
            # By torch's name for it, which :mod:`.listening` replaces.
            self._server = static_tcp_rendezvous.TCPStore(
                first.master_addr, 0, is_master=True, wait_for_workers=False
            )
            met.store.set(key, str(self._server.port))
        own = RendezvousStoreInfo(first.master_addr, int(met.store.get(key)))
        return RendezvousInfo(met.store, met.rank, met.world_size, own)

    def get_backend(self) -> str:
        """The name of torch's rendezvous."""
        return self._inner.get_backend()

    @property
    def use_agent_store(self) -> bool:
        """Ranks meet at a store of the launchers'."""
        return True

    def is_closed(self) -> bool:
        """True if no attempt may follow."""
        return self._inner.is_closed()

    def set_closed(self) -> None:
        """Prevent another attempt."""
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """The hosts that want to take part."""
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        """The run's name."""
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        """Leave."""
        return self._inner.shutdown()


def _seconds(given: str | None) -> float:
    """The value of ``host_timeout``, checked."""
    if given is None:
        return _SECONDS_TO_LOSE
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(f"{HOST_TIMEOUT} expects more than 0 seconds, but got {given!r}")
    return seconds


def _creator(backend: str) -> Callable[[RendezvousParameters], RendezvousHandler]:
    def create(parameters: RendezvousParameters) -> RendezvousHandler:
        parameters.backend = backend
        handler = rendezvous_handler_registry.create_handler(parameters)
        if backend == "static":
            handler = _StoreOfEachAttempt(handler)
        return PatientRendezvous(handler, parameters)

    return create


for _name, _patient in _PATIENT.items():
    rendezvous_handler_registry.register(_patient, _creator(_name))
