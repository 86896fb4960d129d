"""The sockets of ranks: what strangers send them, and hosts that do not let each other through."""

from __future__ import annotations

import contextlib
import resource
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from fullshard.engine.comm import inquiry
from fullshard.engine.comm import mailbox as mailboxes
from fullshard.engine.comm.announcement import announcements_of
from fullshard.engine.comm.introductions import introduce
from fullshard.engine.comm.mailbox import (
    Address,
    Mailbox,
    State,
    contact,
    host_towards,
    own_mailbox,
)
from fullshard.testing import ranks


class Listener:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []

    def receive(self, message: dict[str, Any]) -> dict[str, Any]:
        self.heard.append(message)
        return {"heard": len(self.heard)}


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def address(listener: Listener) -> Iterator[Address]:
    mailbox = Mailbox("127.0.0.1")
    yield mailbox.open_for(listener)
    mailbox.close()


def ask(address: Address) -> Any:
    (found,) = contact([address], {"asked": "where"}, 5.0)
    return found.answer


LINES = {
    "a number": b"5\n",
    "null": b"null\n",
    "an object": b"{}\n",
    "numbers": b"[1, 2, 3]\n",
    "no secret": b'["00", 1, {}]\n',
    "not hexadecimal": b'["no number", 1, {}]\n',
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "not UTF-8": b"\xff\xfe\n",
    "a deep list": b"[" * 100_000 + b"\n",
    "a long number": b"9" * 5_000 + b"\n",
    "no end": b"no end of line",
    "nothing": b"",
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_whatever_a_stranger_sends_the_next_message_is_heard(
    address: Address, listener: Listener, line: bytes
) -> None:
    with socket.create_connection((address.host, address.port)) as stranger:
        stranger.sendall(line)
        stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(100) == b""

    assert ask(address) == {"heard": 1}
    assert listener.heard == [{"asked": "where"}]


def test_a_message_with_another_secret_is_not_heard(address: Address, listener: Listener) -> None:
    assert ask(address._replace(secret=b"guessed!")) is None
    assert listener.heard == []


@pytest.mark.skipif(sys.platform == "win32", reason="another limit of open files")
def test_a_process_that_may_open_no_more_files_for_a_while_listens_again(address: Address) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as first, socket.socket() as second:
        # No new file may have a number but those of standard input, output and error. A mailbox
        # may have a number for the first one, for which it waits already.
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            for sender in (first, second):
                sender.settimeout(0.3)
                sender.connect((address.host, address.port))
                sender.shutdown(socket.SHUT_WR)
            with contextlib.suppress(TimeoutError):
                first.recv(1)
            with pytest.raises(TimeoutError):
                second.recv(1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert ask(address) == {"heard": 1}


def test_a_process_that_has_closed_its_mailbox_is_told_from_one_that_has_not(
    address: Address,
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        gone = address._replace(port=free.getsockname()[1])
        states = [found.state for found in contact([address, gone], None, 5.0)]
    assert states == [State.THERE, State.ENDED]


@contextlib.contextmanager
def host_of_its_own() -> Iterator[str]:
    """Let each rank take the others for ranks of other hosts; yields the address of this one."""
    host = host_towards(dist.HashStore())
    if host.startswith("127."):
        pytest.skip("this machine has no address but its own")
    before = mailboxes._host_id
    mailboxes._host_id = lambda: dist.get_rank().to_bytes(8)  # type: ignore[assignment]
    own_mailbox.cache_clear()
    try:
        yield host
    finally:
        mailboxes._host_id = before
        own_mailbox.cache_clear()


def introductions(host: str) -> list[Address]:
    messages = announcements_of(dist.new_group())
    assert messages is not None
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return introduce(Listener(), dist.get_rank(), store, messages, lambda work: work.wait())


@ranks(2)
def test_hosts_that_refuse_connections_are_known_to_before_a_rank_is_taken_for_dead() -> None:
    rank = dist.get_rank()
    with host_of_its_own() as host, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if rank == 1:
            # As a firewall does it: nobody can connect here, and the process is there.
            own_mailbox(host).close()
        addresses = introductions(host)

        assert addresses[rank].is_reachable
        assert not addresses[1 - rank].is_reachable
        assert contact([addresses[1 - rank]], None, 1.0)[0].state is State.UNKNOWN
    told = [str(each.message) for each in caught if "a connection to" in str(each.message)]
    assert len(told) == (1 if rank == 0 else 0)


def test_a_rank_that_has_ended_is_missed_however_long_it_takes_to_ask_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where whole hosts are gone, each look takes seconds."""
    monkeypatch.setattr(inquiry, "_MISSES_AFTER", 0.1)
    looks = inquiry.Inquiry(dist.HashStore(), rank=0, names=range(3))
    assert not looks.are_missed(failed=False)
    time.sleep(0.3)
    assert looks.are_missed(failed=False)

    looks.close()  # what was waited for has come
    assert not looks.are_missed(failed=False)


@ranks(2)
def test_hosts_that_let_each_other_through_rely_on_mailboxes() -> None:
    with host_of_its_own() as host:
        addresses = introductions(host)
        assert [address.is_reachable for address in addresses] == [True, True]
        assert contact(addresses, None, 5.0) == [(State.THERE, None)] * 2
        dist.barrier()
