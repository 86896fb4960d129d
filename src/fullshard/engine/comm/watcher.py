"""A thread that notices collectives that do not complete, where the host does not wait for them.

Once a second it looks, in this process alone, whether the host has gone on and the last collective
has completed. Only when neither has happened for long does it take part in the group's inquiry.
When the group turns out to be broken, the thread says so on standard error and aborts the group, so
that a host that waits for the device comes back; the next operation of this rank raises the
verdict. The thread speaks first, since a program need not get to another operation.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .order_check import Agreement

#: Seconds between two looks, while nothing goes on and else.
_LOOK_EVERY, _LOOK_AT_MOST_EVERY = 0.25, 1.0
#: Patience after a word of a rank that ends.
_SOON = 0.5


def watch(agreement: Agreement, group: Any, patience: float) -> threading.Thread:
    """Look after ``agreement`` until it is let go, or its group is broken."""
    arguments = (weakref.ref(agreement), weakref.ref(group), agreement.stirred, patience)
    thread = threading.Thread(target=_watch, args=arguments, name="fullshard watcher", daemon=True)
    thread.start()
    return thread


def _watch(
    agreement_reference: Any, group_reference: Any, stirred: threading.Event, patience: float
) -> None:
    episode = _Episode(patience)
    while True:
        if stirred.wait(episode.pause):
            stirred.clear()
            episode.hurry()
        agreement = agreement_reference()
        if agreement is None:
            return
        if episode.goes_on(agreement):
            del agreement
            continue
        agreement.order.halt()
        verdict = agreement.unheard_verdict()
        if verdict is not None:
            print(f"[rank{agreement.inquiry.own_name}]: {verdict}", file=sys.stderr, flush=True)
        del agreement
        abort(group_reference())
        return


def abort(group: Any) -> None:
    """Abort the group's pending collectives, so that neither device nor host waits for them."""
    if group is not None:
        # Not every backend can.
        with contextlib.suppress(Exception):
            group.abort()


class _Episode:
    """A time in which neither the host nor the device has gone on."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._seen: tuple[Any, int] = (None, -1)
        self._since = 0.0
        self._is_open = False

    @property
    def pause(self) -> float:
        """Seconds until the next look."""
        return _LOOK_EVERY if self._is_open else min(self._patience / 2, _LOOK_AT_MOST_EVERY)

    def hurry(self) -> None:
        """Another rank has left word: what does not go on now is not going to."""
        self._patience = min(self._patience, _SOON)

    def goes_on(self, agreement: Agreement) -> bool:
        """True if nothing is known to be wrong with the group."""
        if agreement.inquiry.verdict is not None:
            return False
        now, count = time.monotonic(), agreement.order.count
        waits_for = agreement.incomplete_work()
        if waits_for is None or (waits_for, count) != self._seen:
            self._seen, self._since = (waits_for, count), now
            if self._is_open:
                self._is_open = False
                agreement.close()
            return True
        waited = now - self._since
        if waited >= self._patience:
            self._is_open = True
            # The store may be gone, and nobody know why.
            with contextlib.suppress(RuntimeError):
                return not agreement.investigate(waited)
        return True
