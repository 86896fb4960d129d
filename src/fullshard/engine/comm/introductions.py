"""The ranks of a group exchange the addresses of their mailboxes, and test whether they connect.

Note: firewalls
    That a process refuses a connection means that it has ended, unless a firewall refuses it
    instead; and that one does not answer means that it is stopped, unless a firewall drops what it
    is sent. So while all are known to be there, each rank connects to the next one, which tests the
    way from each host to another. Where one of them fails, no rank relies on mailboxes of other
    hosts: what the store and the backend say has to do. Before the first operation, when ranks only
    left their addresses in the store, none does.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

from .announcement import Announcements, Wait
from .mailbox import (
    RECORD_SIZE,
    Address,
    Correspondent,
    State,
    contact,
    host_towards,
    own_mailbox,
)

#: Seconds for a connection to the next rank: a packet that is lost is sent again after one.
_REACHES_WITHIN = 2.5


def leave_address(
    correspondent: Correspondent, rank: int, store: Any, number: int
) -> Callable[[int], Address | None]:
    """Write this rank's mailbox into the store; the function returned finds another rank's.

    So that a rank that ends before its first operation is missed by those of its host. This is for
    the ``number``-th group of its name.
    """
    prefix = f"fullshard/mailbox/{number}"
    with contextlib.suppress(OSError, RuntimeError):
        address = own_mailbox(host_towards(store)).open_for(correspondent)
        store.set(f"{prefix}/{rank}", address.packed())

    @functools.cache
    def known(other: int) -> Address:
        if not store.check([f"{prefix}/{other}"]):
            raise LookupError
        return Address.unpacked(store.get(f"{prefix}/{other}"))

    def find(other: int) -> Address | None:
        with contextlib.suppress(LookupError, RuntimeError):
            found = known(other)
            return found if found.is_on_this_host else None
        return None

    return find


def introduce(
    correspondent: Correspondent, rank: int, store: Any, announcements: Announcements, wait: Wait
) -> list[Address]:
    """The mailboxes of all ranks; they all call this. Those of no use have the port 0."""
    record = bytes(RECORD_SIZE)
    # Who has no socket is asked in other ways; all must take part in the exchange.
    with contextlib.suppress(OSError, RuntimeError):
        record = own_mailbox(host_towards(store)).open_for(correspondent).packed()
    addresses = [*map(Address.unpacked, announcements.of_all(record, wait))]
    if len({address.host_id for address in addresses}) == 1:
        return addresses
    if announcements.is_true_for_all(_reaches_next(addresses, rank), wait):
        return addresses
    return [each if each.is_on_this_host else each._replace(port=0) for each in addresses]


def _reaches_next(addresses: list[Address], rank: int) -> bool:
    following = addresses[(rank + 1) % len(addresses)]
    if not following.is_reachable:
        return True
    found = contact([following], None, _REACHES_WITHIN)[0].state
    if found is not State.THERE:
        what = "refused" if found is State.ENDED else "not answered"
        warnings.warn(
            f"This host is {what} a connection to {following.host}, port {following.port}, on "
            "which a rank of another host listens. If a rank is killed or hangs, others may "
            "learn of it late, or not by which one. Let the hosts of a run connect to each "
            "other's ports",
            stacklevel=2,
        )
    return found is State.THERE
