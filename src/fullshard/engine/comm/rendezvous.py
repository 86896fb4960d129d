"""The rendezvous of ranks, in a store, before an operation that not all of them expect."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

#: Longest time between two questions to the store; in the first seconds, this part of the time
#: that has passed.
_ASK_EVERY = 0.25
_OF_TIME_WAITED = 0.1
#: Seconds per rank between two questions of one rank to the store, which answers them one by one.
_PER_RANK = 2e-5
#: Up to how many ranks may ask as often as they like.
_FEW = 16
#: The threads that are waiting for other ranks at a store.
_waiting: set[int] = set()
_waiting_lock = threading.Lock()


class Rendezvous:
    """The rendezvous of a process group's ranks: each counts itself in under a key."""

    def __init__(self, store: Any, world_size: int) -> None:
        self.store = store
        self._world_size = world_size
        self._previous_key: str | None = None
        #: Whether this group has left the connection to the store that all groups share.
        self._has_connection = False

    @contextlib.contextmanager
    def connection(self) -> Iterator[None]:
        """Have a connection to the store on which no other thread waits.

        Groups share one, and whoever waits on it keeps all others waiting: another thread, too, for
        which other ranks may wait in turn. Not one for every group: servers are slow to take many.
        """
        thread = threading.get_ident()
        with _waiting_lock:
            if _waiting - {thread} and not self._has_connection:
                self._has_connection = True
                # A store that is written in Python need not be able to.
                with contextlib.suppress(RuntimeError):
                    self.store = self.store.clone()
            _waiting.add(thread)
        try:
            yield
        finally:
            with _waiting_lock:
                _waiting.discard(thread)

    def arrive(self, key: str, patience: float) -> bool:
        """Count this rank in; return whether all ranks arrive at ``key`` within ``patience`` s."""
        arrived = self.store.add(key, 1) == self._world_size
        if arrived:
            self.store.set(f"{key}/go", "1")
            self._forget_previous()
        self._previous_key = key
        return arrived or self._all_arrive_within(key, patience)

    def all_are_at(self, key: str) -> bool:
        """True if all ranks have arrived."""
        there: bool = self.store.check([f"{key}/go"])
        return there

    def count_at(self, key: str) -> int:
        """The number of ranks that have arrived."""
        count: int = self.store.add(key, 0)
        return count

    @property
    def pause(self) -> float:
        """Seconds between two questions of a rank that waits for long."""
        return max(_ASK_EVERY, 50 * _PER_RANK * self._world_size)

    def _all_arrive_within(self, key: str, patience: float) -> bool:
        """Ask the store for the other ranks, at intervals that grow with the time that has passed.

        A wait at the store that ends in vain is a warning of torch's, and healthy ranks may be
        slow.
        """
        began = time.monotonic()
        shortest = 0.0 if self._world_size <= _FEW else _PER_RANK * self._world_size
        while not self.all_are_at(key):
            waited = time.monotonic() - began
            if waited >= patience:
                return False
            pause = max(shortest, min(waited * _OF_TIME_WAITED, _ASK_EVERY))
            time.sleep(min(pause, patience - waited))
        return True

    def _forget_previous(self) -> None:
        """All ranks are here, so none is still reading the keys of the previous rendezvous."""
        if self._previous_key is not None:
            self.store.delete_key(self._previous_key)
            self.store.delete_key(f"{self._previous_key}/go")
