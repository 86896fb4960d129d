"""A thread that notices collectives that do not complete, where the host does not wait for them.

Once a second it looks, in this process alone, whether the host has gone on and the last collective
has completed. Only when neither has happened for long does it take part in the group's inquiry.
When the group turns out to be broken it is aborted, so that a host that waits for the device comes
back; the verdict is raised by the next operation of this rank.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .order_check import Agreement


def watch(agreement: Agreement, group: Any, patience: float) -> threading.Thread:
    """Look after ``agreement`` until it is let go, or its group is broken."""
    references = weakref.ref(agreement), weakref.ref(group)
    thread = threading.Thread(
        target=_watch, args=(*references, patience), name="fullshard watcher", daemon=True
    )
    thread.start()
    return thread


def _watch(agreement_reference: Any, group_reference: Any, patience: float) -> None:
    episode = _Episode(patience)
    while True:
        time.sleep(patience / 2)
        agreement = agreement_reference()
        if agreement is None:
            return
        if episode.goes_on(agreement):
            del agreement
            continue
        agreement.order.halt()
        group = group_reference()
        if group is not None:
            with contextlib.suppress(Exception):
                group.abort()
        return


class _Episode:
    """A time in which neither the host nor the device has gone on."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._seen: tuple[Any, int] = (None, -1)
        self._since = 0.0
        self._is_open = False

    def goes_on(self, agreement: Agreement) -> bool:
        """Whether nothing is known to be wrong with the group."""
        if agreement.inquiry.verdict is not None:
            return False
        now, work = time.monotonic(), agreement.issued
        seen = (work, agreement.order.count)
        if work is None or seen != self._seen or agreement.host_waits or work.is_completed():
            self._seen, self._since = seen, now
            if self._is_open:
                self._is_open = False
                agreement.close()
            return True
        waited = now - self._since
        if waited >= self._patience:
            self._is_open = True
            try:
                agreement.look(waited)
            except RuntimeError:
                # A verdict; or the store is gone, and nobody knows why.
                return agreement.inquiry.verdict is None
        return True
