"""Ranks agree on what comes next before they communicate, so that none waits for another forever.

Note: agreeing without talking
    A collective that one rank starts and another does not hangs, and over gloo two collectives of
    different sizes end the process. So an operation is started only when the other ranks are
    known to start the same one, or to start nothing. All ranks of a process group expect the same
    operation next (see ``order_table.py``). A rank about to do what is expected just does it: a
    comparison, no communication. Where nothing is expected, as in the first step of a model, the
    group's first rank announces what it is about to do, over the group's own backend; ranks about
    to do the same go on, and all expect it from then on. A rank about to do something else than
    is expected starts nothing: it counts itself in, in the group's store, under that operation's
    name, and goes on when all ranks have (a first evaluation after many steps of training). The
    ranks of a static model communicate in its first step, and at the beginning of the second.

    When ranks disagree, at least one of them does not start, and the others wait for the
    collective. Whoever waits for longer than ``PATIENCE`` takes part in an inquiry (see
    ``inquiry.py``), and every rank raises what comes of it. A rank that is merely slow contradicts
    nobody and has not ended, and is waited for; those who wait say so after ``TELL_AFTER``.
    Over gloo the host itself waits for collectives, and looks. Over other backends it runs ahead;
    there a thread looks for it (see ``watcher.py``).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from . import departure
from .announcement import Announcements
from .disagreement import Operation, Place, RankLostError, RanksDisagreeError
from .inquiry import Inquiry
from .mailbox import RECORD_SIZE, Address, host_towards, own_mailbox
from .order_table import Expectation, OrderTable
from .watcher import watch

__all__ = ["Agreement", "NoAgreement", "Operation", "RankLostError", "RanksDisagreeError"]

#: Seconds of waiting after which a rank looks at what the others are doing.
PATIENCE = 2.0
#: Seconds of waiting after which a rank says for whom, once.
TELL_AFTER = 8.0
#: Seconds after which a rank stops waiting for others that say nothing at all, at the latest.
LAST_RESORT = 1800.0
#: Seconds within which a collective that failed is explained, or raises what the backend said.
EXPLAIN_WITHIN = 6.0
#: How often a waiting rank looks again; in the first seconds, this part of the time that it waited.
_LOOK_EVERY = 0.25
_OF_TIME_WAITED = 0.1
#: Seconds per rank between two questions of one rank to the store, which answers them one by one.
_PER_RANK = 2e-5
#: What a rank does by itself: others learn of it at the next operation.
_SILENT = ("run",)
#: What a rank looks around for while it waits, so that it may start before it has heard of others.
_WATCHED = ("gather", "reduce")
#: What is followed by collectives in which nobody looks around: all ranks always meet before.
_ALWAYS_MEETS = ("save a checkpoint", "load a checkpoint")
#: Set to "0" to start operations without agreeing on them.
SWITCH = "FULLSHARD_ORDER_CHECK"
#: The threads that are meeting other ranks at a store.
_meeting: set[int] = set()
_meeting_lock = threading.Lock()


class Agreement:
    """One process group's common knowledge of the order of operations."""

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        timeout: float = LAST_RESORT,
        group: Any = None,
        names: Sequence[int] | None = None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout = min(timeout, LAST_RESORT)
        #: What is expected, and where this rank stands; the step's path advances it by itself.
        self.order = OrderTable()
        names = range(world_size) if names is None else names
        self.inquiry = Inquiry(store, rank, names)
        self._announcements = None if group is None else Announcements(group, self.wait)
        #: The collective that was issued last, where the host does not wait for it.
        self.issued: Any = None
        #: The operation that this rank waits to begin, and its place: not a past one yet.
        self._waiting: Place | None = None
        self._previous_key: str | None = None
        #: Whether this group has left the connection to the store that all groups share.
        self._has_connection = False
        #: Called when others have been waited for for long; raises if that is in vain (``Join``).
        self.also_look: Callable[[], None] | None = None
        #: The place of the last operation for which it was told that others are waited for.
        self._told = -1

    @property
    def _recent(self) -> list[Place]:
        return self.order.history()

    def settle(self, asked: tuple[str, str, int], begins_pass: bool = False) -> None:
        """Return when every rank is known to do what is ``asked`` next; raise if one is not.

        An :class:`Operation` in all but type: one that is known need not be made again.
        """
        if self.inquiry.verdict is not None:
            raise self.inquiry.verdict.error()
        expectation = self.order.expectation(asked, begins_pass)
        if asked[0] in _ALWAYS_MEETS:
            expectation = Expectation.DEVIATES
        if expectation is not Expectation.FOLLOWS:
            operation = Operation(*asked)
            self._waiting = self.order.count, operation
            if expectation is Expectation.IS_NEW and self._can_announce(operation):
                self._learn(operation, begins_pass)
            else:
                self._meet(operation, begins_pass)
            # Kept if this raises: others are to be told what this rank was about to do.
            self._waiting = None
        self.order.advance(asked, begins_pass)

    @property
    def host_waits(self) -> bool:
        """Whether the host itself waits to begin an operation, and looks around meanwhile."""
        return self._waiting is not None

    def history(self) -> list[Place]:
        """The last operations and their places, with the one that this rank waits to begin."""
        waiting = self._waiting
        return [*self.order.history(), *([waiting] if waiting else [])]

    # -- a collective -------------------------------------------------------------------------

    def wait(self, work: Any) -> None:
        """Wait for a collective; look around when it takes suspiciously long."""
        patience, began, looked = PATIENCE, 0.0, False
        while True:
            try:
                work.wait(timedelta(seconds=patience))
                break
            except RuntimeError as error:
                # Gloo's word for "not yet"; anything else is a failure of its own.
                if "timed out" not in str(error).lower():
                    self.explain(error)
            if work.is_completed():
                # It came, or failed, just now: this returns or raises at once.
                try:
                    work.wait()
                except RuntimeError as error:
                    self.explain(error)
                break
            # Not read before it has to be: most collectives come in time.
            began = began or time.monotonic() - patience
            self.look(time.monotonic() - began)
            patience, looked = _LOOK_EVERY, True
        if looked:
            self.close()

    def explain(self, error: RuntimeError) -> NoReturn:
        """Raise why a collective, or the store, has failed: which rank is gone."""
        deadline = time.monotonic() + EXPLAIN_WITHIN
        history = self.history()
        while history and time.monotonic() < deadline:
            try:
                verdict = self.inquiry.look(history, failed=True)
            except RuntimeError:
                verdict = self.inquiry.look_without_store(history)
            if verdict is not None:
                found = verdict.error()
                found.add_note(f"Rank {self._rank} was told by its backend: {error}")
                raise found from None
            time.sleep(_LOOK_EVERY / 5)
        raise error

    # -- an operation that is not expected ----------------------------------------------------

    def _can_announce(self, operation: Operation) -> bool:
        if self._announcements is None:
            return False
        return operation.verb in _SILENT or self._announcements.is_possible

    def _learn(self, operation: Operation, begins_pass: bool) -> None:
        """Compare what this rank is about to do with what the first one announces."""
        if operation.verb in _SILENT:
            return
        assert self._announcements is not None
        if not self.inquiry.mailboxes:
            self._exchange_addresses()
        digest = self.order.digest(operation, begins_pass)
        agrees = self._announcements.of_first(digest) == digest
        if operation.verb not in _WATCHED:
            agrees = self._announcements.is_true_for_all(agrees)
        if not agrees:
            # Nobody has started what all others would wait for. This rank does not, and finds out
            # who is about to do what.
            self._wait_in_vain()

    def _exchange_addresses(self) -> None:
        assert self._announcements is not None
        record = bytes(RECORD_SIZE)
        # Who has no socket is asked in other ways; all must take part in the exchange.
        with contextlib.suppress(OSError, RuntimeError):
            record = own_mailbox(host_towards(self._store)).open_for(self).packed()
        self.inquiry.mailboxes = [*map(Address.unpacked, self._announcements.of_all(record))]
        departure.leave_word_of(self)

    def _wait_in_vain(self) -> NoReturn:
        began = time.monotonic()
        while (waited := time.monotonic() - began) < self._timeout:
            self.look(waited)
            time.sleep(_LOOK_EVERY / 5)
        raise RanksDisagreeError(
            f"Rank {self._rank} is about to {_at(self.history())}, and the first rank of its "
            f"process group is not. No other rank has said anything for {self._timeout:.0f} s"
        )

    def _meet(self, operation: Operation, begins_pass: bool) -> None:
        key = f"fullshard/{self.order.count}/{self.order.digest(operation, begins_pass):x}"
        try:
            with self._at_store():
                self._meet_at_store(key, operation)
        except (RanksDisagreeError, RankLostError):
            raise
        except RuntimeError as error:
            self.explain(error)

    @contextlib.contextmanager
    def _at_store(self) -> Iterator[None]:
        """Have a connection to the store on which no other thread waits.

        Groups share one, and whoever waits on it keeps all others waiting: another thread, too, for
        which other ranks may wait in turn. Not one for every group: servers are slow to take many.
        """
        thread = threading.get_ident()
        with _meeting_lock:
            if _meeting - {thread} and not self._has_connection:
                self._has_connection = True
                # A store that is written in Python need not be able to.
                with contextlib.suppress(RuntimeError):
                    self._store = self.inquiry.store = self._store.clone()
            _meeting.add(thread)
        try:
            yield
        finally:
            with _meeting_lock:
                _meeting.discard(thread)

    def _meet_at_store(self, key: str, operation: Operation) -> None:
        if self._store.add(key, 1) == self._world_size:
            self._store.set(f"{key}/go", "1")
            self._forget_previous()
        elif not self._comes_soon(key):
            self._wait_for_all(key, operation)
        self._previous_key = key

    def _wait_for_all(self, key: str, operation: Operation) -> None:
        began = time.monotonic() - PATIENCE
        pause = max(_LOOK_EVERY, 50 * _PER_RANK * self._world_size)
        waited = next_question = PATIENCE
        while True:
            self.look(waited)
            time.sleep(_LOOK_EVERY)
            waited = time.monotonic() - began
            if waited >= next_question and self.inquiry.store_answers():
                next_question = waited + pause
                if self._store.check([f"{key}/go"]):
                    self.close()
                    return
            if waited > self._timeout:
                raise RanksDisagreeError(
                    f"Waited {waited:.0f} s for all ranks to start {operation}; "
                    f"{self._store.add(key, 0)} of {self._world_size} have. The others are not in "
                    "fullshard, or gone: look at their logs. (Ranks are waited for as long as the "
                    "process group's timeout says.)"
                )

    def _comes_soon(self, key: str) -> bool:
        """Whether all ranks are at ``key`` before patience ends.

        Asks the store again and again, at intervals that grow with the time that has passed. A wait
        at the store that ends in vain is a warning of torch's, and healthy ranks may be slow.
        """
        began = time.monotonic()
        shortest = 0.0 if self._world_size < 16 else _PER_RANK * self._world_size
        while not self._store.check([f"{key}/go"]):
            waited = time.monotonic() - began
            if waited >= PATIENCE:
                return False
            pause = max(shortest, min(waited * _OF_TIME_WAITED, _LOOK_EVERY))
            time.sleep(min(pause, PATIENCE - waited))
        return True

    def _forget_previous(self) -> None:
        """All ranks are here, so none is still reading the keys of the meeting before."""
        if self._previous_key is not None:
            self._store.delete_key(self._previous_key)
            self._store.delete_key(f"{self._previous_key}/go")

    # -- waiting for long ---------------------------------------------------------------------

    def look_around(self, waited: float) -> None:
        """Wait on, for a word of another rank; raises what the ranks disagree on."""
        if waited < PATIENCE:
            return
        time.sleep(_LOOK_EVERY)
        self.look(waited)
        if waited > self._timeout:
            raise RanksDisagreeError(f"Waited {waited:.0f} s for ranks that still have data")

    def look(self, waited: float) -> None:
        """Take part in the inquiry into what this rank waits for; raise what comes of it."""
        if self.also_look is not None:
            self.also_look()
        tells = waited >= TELL_AFTER and self._place > self._told
        if not self.inquiry.is_due and not tells:
            return
        history = self.history()
        try:
            verdict = self.inquiry.look(history)
            if verdict is None and tells:
                self._tell(waited, *history[-1])
        except RuntimeError:
            verdict = self.inquiry.look_without_store(history)
            if verdict is None:
                raise
        if verdict is not None:
            raise verdict.error() from None

    @property
    def _place(self) -> int:
        return self.order.count - (self._waiting is None)

    def close(self) -> None:
        """What was waited for has come."""
        # The store may have ended with another rank just now.
        with contextlib.suppress(RuntimeError):
            self.inquiry.close()

    def _tell(self, waited: float, place: int, operation: Operation) -> None:
        """Say once for whom this rank waits, as far as the examiner knows."""
        awaited = self.inquiry.awaited()
        if awaited is None:
            return
        self._told = place
        ranks, _, words = awaited.partition("\n")
        warnings.warn(
            f"Rank {self.inquiry.own_name} has waited {waited:.0f} s for {ranks}, and is at the "
            f"{operation}. Who is waited for may be slow, busy outside of fullshard, or stuck"
            f"{': ' if words else ''}{words}. Waiting goes on",
            stacklevel=2,
        )

    # -- what other ranks ask or tell ---------------------------------------------------------

    def receive(self, message: dict[str, Any]) -> dict[str, Any]:
        """Act on what another rank left in this process's mailbox."""
        if message.get("asked") == "where":
            history = self.order.history()
            return {"place": history[-1][0] if history else -1, "where": departure.whereabouts()}
        self.inquiry.receive(message)
        if self.inquiry.verdict is not None:
            self.order.halt()
        return {}


def _at(history: list[Place]) -> str:
    return str(history[-1][1]) if history else "begin"


class NoAgreement:
    """For groups of one rank, groups without a store, and when the check is switched off."""

    order: OrderTable | None = None
    issued: Any = None

    def settle(self, asked: tuple[str, str, int], begins_pass: bool = False) -> None:
        pass

    def wait(self, work: Any) -> None:
        work.wait()


_agreements: weakref.WeakKeyDictionary[Any, Agreement | NoAgreement] = weakref.WeakKeyDictionary()


def agreement_for(group: Any) -> Agreement | NoAgreement:
    """The agreement of ``group``; made once, shared by every unit that uses the group."""
    agreement = _agreements.get(group)
    if agreement is None:
        agreement = _agreements[group] = _make(group)
    return agreement


def _make(group: Any) -> Agreement | NoAgreement:
    if os.environ.get(SWITCH) == "0" or group.size() == 1:
        return NoAgreement()
    backend, store = dist.distributed_c10d._world.pg_map.get(group, (None, None))
    if store is None or backend == "fake":
        return NoAgreement()
    names = dist.get_process_group_ranks(group)
    announces = group if any(name in str(backend) for name in ("gloo", "nccl", "xccl")) else None
    agreement = Agreement(store, group.rank(), group.size(), _timeout_of(group), announces, names)
    agreement.inquiry.store_ends_with_first = names[0] == 0 and not _agent_has_store()
    if "gloo" not in str(backend):
        watch(agreement, group, PATIENCE)
    return agreement


def _agent_has_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _timeout_of(group: Any) -> float:
    """Seconds after which the group's collectives fail, by the most patient of its backends."""
    timeouts = []
    for device in group._device_types:
        with contextlib.suppress(AttributeError, RuntimeError):
            timeouts.append(group._get_backend(device).options._timeout.total_seconds())
    return max(timeouts, default=LAST_RESORT)
