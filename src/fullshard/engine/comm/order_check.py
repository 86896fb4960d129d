"""Ranks agree on what comes next before they communicate, so that none waits for another forever.

Note: agreeing without talking
    A collective that one rank starts and another does not hangs, and over gloo two collectives of
    different sizes end the process. So an operation is started only when the other ranks are
    known to start the same one, or to start nothing. All ranks of a process group expect the same
    operation next (see ``order_table.py``). A rank about to do what is expected just does it: a
    comparison, no communication. Where nothing is expected, as in the first steps of a model, the
    group's first rank announces what it is about to do, over the group's own backend; ranks about
    to do the same go on, and all expect it from then on. A rank about to do something else than
    is expected starts nothing: it counts itself in, in the group's store, under that operation's
    name, and goes on when all ranks have (a first evaluation after many steps of training). A few
    ranks meet there for what is new, too. The ranks of a static model communicate in its first two
    steps (in the second, units are prefetched), and at the beginning of the third.

    When ranks disagree, at least one of them does not start, and the others wait for the
    collective. Whoever waits for longer than ``PATIENCE`` takes part in an inquiry (see
    ``inquiry.py``), and every rank raises what comes of it. A rank that is merely slow contradicts
    nobody and has not ended, and is waited for; those who wait say so after ``TELL_AFTER``.
    Over gloo the host itself waits for collectives, and looks. Over other backends it runs ahead;
    there a thread looks for it (see ``watcher.py``).
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NoReturn

from . import departure, failures
from .announcement import Announcements
from .disagreement import Operation, Place, RankLostError, RanksDisagreeError
from .inquiry import Inquiry
from .introductions import introduce
from .issued_work import IssuedWork
from .order_table import Expectation, OrderTable
from .rendezvous import Rendezvous

__all__ = ["Agreement", "Operation", "RankLostError", "RanksDisagreeError"]

#: Seconds of waiting after which a rank looks at what the others are doing.
PATIENCE = 2.0
#: Seconds of waiting after which a rank says for whom, once.
TELL_AFTER = 8.0
#: Seconds after which a rank stops waiting for others that say nothing at all, where the group
#: does not say.
LAST_RESORT = 1800.0
#: How often a waiting rank looks again.
_LOOK_EVERY = 0.25
#: What a rank does by itself: others learn of it at the next operation.
_SILENT = ("run",)
#: What a rank looks around for while it waits, so that it may start before it has heard of others.
_WATCHED = ("gather", "reduce")
#: Up to how many ranks meet at the store before new operations, which is faster for them.
FEW = 4
#: What is followed by collectives in which nobody looks around: all ranks always meet before.
_ALWAYS_MEETS = ("save a checkpoint", "load a checkpoint")


class Agreement:
    """One process group's common knowledge of the order of operations."""

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        timeout: float = LAST_RESORT,
        announcements: Announcements | None = None,
        names: Sequence[int] | None = None,
        has_left: Callable[[], bool] = lambda: False,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        #: What is expected, and where this rank stands; the step's path advances it by itself.
        self.order = OrderTable()
        names = range(world_size) if names is None else names
        self.inquiry = Inquiry(store, rank, names)
        self._rendezvous = Rendezvous(store, world_size)
        self._announcements = announcements
        #: What the host gave the device last, and does not wait for.
        self.issued = IssuedWork()
        #: Bound once: the step's path makes one call, not two.
        self.issue = self.issued.note
        self.note_capturing = self.issued.note_capturing
        #: Set when another rank has left word: the watcher need not wait for its next look.
        self.stirred = threading.Event()
        #: The operation that this rank waits to begin, and its place: not a past one yet.
        self._waiting: Place | None = None
        #: Whether this rank has destroyed the process group.
        self.has_left = has_left
        #: See :meth:`check_also`.
        self._also_check: Callable[[], None] | None = None
        #: The place of the last operation for which it was told that others are waited for.
        self._told = -1
        #: Whether the host finds out itself why something failed.
        self._explains = False
        #: Whether this rank's user has heard the verdict.
        self._has_heard = False

    def check(self, asked: tuple[str, str, int], begins_pass: bool = False) -> None:
        """Return when every rank is known to do what is ``asked`` next; raise if one is not.

        ``asked`` is an :class:`Operation`'s fields as a plain tuple, to avoid building known ones.
        """
        if self.inquiry.verdict is not None:
            raise self._verdict_error()
        expectation = self.order.expectation(asked, begins_pass)
        if asked[0] in _ALWAYS_MEETS:
            expectation = Expectation.DEVIATES
        if expectation is not Expectation.FOLLOWS:
            operation = Operation(*asked)
            self._waiting = self.order.count, operation
            if expectation is Expectation.IS_NEW:
                self._learn(operation, begins_pass)
            else:
                self._wait_at_rendezvous(operation, begins_pass)
            # Kept if this raises: others are to be told what this rank was about to do.
            self._waiting = None
        self.order.advance(asked, begins_pass)

    def _verdict_error(self) -> RuntimeError:
        assert self.inquiry.verdict is not None
        self._has_heard = True
        return self.inquiry.verdict.error()

    # -- where the host does not wait for collectives -----------------------------------------

    def unheard_verdict(self) -> str | None:
        """The verdict, once, where the host may never come to raise it."""
        if self._has_heard or self.inquiry.verdict is None:
            return None
        self._has_heard = True
        error = self.inquiry.verdict.error()
        return f"{type(error).__name__}: {error}"

    def incomplete_work(self) -> Any:
        """As :class:`IssuedWork` says it, unless the host looks around itself."""
        return None if self._is_waiting or self._explains else self.issued.incomplete()

    def check_also(self, check: Callable[[], None] | None) -> None:
        """Call ``check`` when others have been waited for for long, or, with None, no longer.

        It raises if the wait is in vain.
        """
        self._also_check = check

    def history(self) -> list[Place]:
        """The last operations and their places, with the one that this rank waits to begin."""
        waiting = self._waiting
        return [*self.order.history(), *([waiting] if waiting and self._is_waiting else [])]

    @property
    def _is_waiting(self) -> bool:
        """True if this rank waits to begin an operation: it has not gone on from there."""
        waiting = self._waiting
        return waiting is not None and waiting[0] >= self.order.count

    @contextlib.contextmanager
    def instead(self, verb: str, unit: str) -> Iterator[None]:
        """Let others know that this rank does this, and not what they may be about to do next."""
        self._waiting = self.order.count, Operation(verb, unit)
        try:
            yield
        finally:
            self._waiting = None

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
            self.diagnose(time.monotonic() - began)
            patience, looked = _LOOK_EVERY, True
        if looked:
            self.close()

    def explain(self, error: RuntimeError) -> NoReturn:
        """Raise why a collective, or the store, has failed: which rank is gone."""
        found = failures.explanation([self], error)
        if found is None:
            raise error
        raise found from None

    def verdict_on_failure(self) -> RuntimeError | None:
        """The error to raise after a collective has failed, once it is known which rank is gone."""
        self._explains = True
        history = self.history()
        if not history:
            return None
        try:
            verdict = self.inquiry.diagnose(history, failed=True)
        except RuntimeError:
            verdict = self.inquiry.diagnose_without_store(history, failed=True)
        return None if verdict is None else self._verdict_error()

    # -- an operation that is not expected ----------------------------------------------------

    def _learn(self, operation: Operation, begins_pass: bool) -> None:
        """Agree on an operation where nothing is expected."""
        announcements = self._announcements
        if announcements is None:
            self._wait_at_rendezvous(operation, begins_pass)
            return
        if operation.verb in _SILENT:
            return
        connects = announcements.connects_ranks and not self.inquiry.mailboxes
        if self._world_size <= FEW or connects or not announcements.is_possible:
            self._wait_at_rendezvous(operation, begins_pass)
        else:
            self._hear_first(announcements, operation, begins_pass)
        if not self.inquiry.mailboxes and announcements.is_possible:
            store = self._rendezvous.store
            self.inquiry.note_mailboxes(
                introduce(self, self._rank, store, announcements, self.wait)
            )

    def _hear_first(
        self, announcements: Announcements, operation: Operation, begins_pass: bool
    ) -> None:
        """Compare what this rank is about to do with what the first one announces."""
        digest = self.order.digest(operation, begins_pass)
        agrees = announcements.of_first(digest, self.wait) == digest
        # The ranks have to know of each other's mailboxes from the first operation on.
        if operation.verb not in _WATCHED or not self.inquiry.mailboxes:
            agrees = announcements.is_true_for_all(agrees, self.wait)
        if not agrees:
            # Nobody has started what all others would wait for. This rank does not, and finds out
            # who is about to do what.
            self._wait_in_vain()

    def _wait_in_vain(self) -> NoReturn:
        began = time.monotonic()
        while (waited := time.monotonic() - began) < self._timeout:
            self.diagnose(waited)
            time.sleep(_LOOK_EVERY / 5)
        raise RanksDisagreeError(
            f"Rank {self._rank} is about to {_at(self.history())}, and the first rank of its "
            f"process group is not. No other rank has said anything for {self._timeout:.0f} s"
        )

    def _wait_at_rendezvous(self, operation: Operation, begins_pass: bool) -> None:
        key = f"fullshard/{self.order.count}/{self.order.digest(operation, begins_pass):x}"
        try:
            with self._rendezvous.connection():
                self.inquiry.connect(self._rendezvous.store)
                if not self._rendezvous.arrive(key, PATIENCE):
                    self._wait_for_all(key, operation)
        except (RanksDisagreeError, RankLostError):
            raise
        except RuntimeError as error:
            self.explain(error)

    def _wait_for_all(self, key: str, operation: Operation) -> None:
        began = time.monotonic() - PATIENCE
        waited = next_question = PATIENCE
        while True:
            self.diagnose(waited)
            time.sleep(_LOOK_EVERY)
            waited = time.monotonic() - began
            if waited >= next_question and self.inquiry.store_answers():
                next_question = waited + self._rendezvous.pause
                if self._rendezvous.all_are_at(key):
                    self.close()
                    return
            if waited > self._timeout:
                raise RanksDisagreeError(
                    f"Waited {waited:.0f} s for all ranks to start {operation}; "
                    f"{self._rendezvous.count_at(key)} of {self._world_size} have. The others are "
                    "not in fullshard, or gone: look at their logs. (Ranks are waited for as long "
                    "as the process group's timeout says.)"
                )

    # -- waiting for long ---------------------------------------------------------------------

    def look_around(self, waited: float) -> None:
        """Wait on, for a word of another rank; raises what the ranks disagree on."""
        if waited < PATIENCE:
            return
        time.sleep(_LOOK_EVERY)
        self.diagnose(waited)
        if waited > self._timeout:
            raise RanksDisagreeError(f"Waited {waited:.0f} s for ranks that still have data")

    def diagnose(self, waited: float) -> None:
        """Take part in the inquiry into what this rank waits for; raise what comes of it."""
        if self._also_check is not None:
            self._also_check()
        if self.investigate(waited):
            raise self._verdict_error() from None

    def investigate(self, waited: float) -> bool:
        """Take part in the inquiry; whether there is a verdict."""
        tells = waited >= TELL_AFTER and self._place > self._told
        if not self.inquiry.is_due and not tells:
            return False
        history = self.history()
        try:
            verdict = self.inquiry.diagnose(history)
            if verdict is None and tells:
                self._tell(waited, *history[-1])
        except RuntimeError:
            # The store may have ended with the rank that provided it. What is waited for may come.
            verdict = self.inquiry.diagnose_without_store(history)
        return verdict is not None

    @property
    def _place(self) -> int:
        return self.order.count - (not self._is_waiting)

    def close(self) -> None:
        """End the inquiry on this rank: it no longer waits."""
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
            return {
                "place": history[-1][0] if history else -1,
                "where": departure.whereabouts(),
                "left": self.has_left(),
            }
        if self.inquiry.receive(message):
            if self.inquiry.verdict is not None:
                self.order.halt()
            self.stirred.set()
        return {}


def _at(history: list[Place]) -> str:
    return str(history[-1][1]) if history else "begin"
