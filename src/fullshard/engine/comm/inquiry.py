"""Ranks that wait for too long find out why: one of them examines, and tells all ranks.

Note: one examiner
    A rank that waits for longer than it should posts its last operations in the group's store,
    once. The first to come becomes the examiner. It alone reads the posts, asks after ranks that
    posted nothing (see ``mailbox.py``), and looks for the notes of ranks that ended with an error.
    When two posts differ, or a rank has ended, it writes a verdict, once, and leaves it in every
    rank's mailbox, so that it is known there even if the store is gone by then. The others do
    nothing but look, every few seconds, whether the examiner is still there; one of them replaces
    it if not. So each rank sends a constant number of messages, and all of them together a number
    that grows with the number of ranks. As long as nobody waits there are none.
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from .disagreement import Operation, Place, Verdict, describe_loss, name_ranks
from .examiner import EXAMINES_EVERY, HAS_VERDICT, REACHES_EVERY, Examiner, left_among
from .mailbox import Address, Contact, State, contact, server_of

#: Seconds between two looks at the examiner's pulse, where verdicts arrive by mail; else, seconds
#: per thousand ranks.
_FEELS_PULSE_EVERY = 4.0
_PER_THOUSAND_RANKS = 1.0
#: Seconds after which an examiner without a pulse is replaced.
_NO_PULSE = 3.0
#: Seconds for an attempt to reach ranks.
_REACHES_WITHIN = 1.0
#: How many ranks a rank tells that ends with an error; they tell the others, if they miss it.
_TOLD = 4
#: Seconds after which a rank that has ended without a word is missed, if nothing has failed. It may
#: have finished its last operation before the others do.
_MISSES_AFTER = 2.0


class Inquiry:
    """One rank's part in finding out what its process group waits for."""

    def __init__(self, store: Any, rank: int, names: Sequence[int]) -> None:
        self.store = store
        self._rank = rank
        #: How ranks are called in messages: by their number in the whole job.
        self._names = names
        #: All ranks' mailboxes, once they are known.
        self.mailboxes: Sequence[Address] = ()
        #: What its keys in the store begin with. A store may outlive its group, and the next group
        #: of the same name must not find what ranks of this one disagreed on.
        self._prefix = "fullshard/inquiry"
        #: Finds a rank's mailbox before that, if it can.
        self.find_mailbox: Callable[[int], Address | None] = lambda rank: None
        #: Whether the first rank's process provides the store.
        self.store_ends_with_first = False
        #: Where this rank waits, seen from the operation that it gave out last: "at" it, "at or
        #: before" it where the host runs ahead of the device, or "after" it.
        self.waits = "at"
        self.verdict: Verdict | None = None
        #: Ranks that said that they end, by their number in the group, and with which error.
        self.departed: dict[int, str] = {}
        #: Who is waited for when the store itself does not answer.
        self._silent_store: str | None = None
        self._is_open = False
        self._examiner: Examiner | None = None
        self._pulse, self._felt, self._next_look = -1, 0.0, 0.0
        self._next_question = self._next_search = 0.0
        #: Since when ranks are known to have ended for which this one waits.
        self._ended_since: float | None = None
        #: How many requests this rank sent to the store for this, for measurements.
        self.requests = 0

    def note_store(self, ends_with_first: bool) -> None:
        """Note whether the first rank's process provides the store."""
        self.store_ends_with_first = ends_with_first

    def connect(self, store: Any) -> None:
        """Ask this store from now on: the same one, perhaps over another connection."""
        self.store = store

    def note_waiting(self, waits: str) -> None:
        """Note where this rank waits: "at" an operation, "at or before" or "after" it."""
        self.waits = waits

    def begin_as(self, number: int) -> None:
        """Be of the ``number``-th group of this name that this process has."""
        self._prefix = f"fullshard/inquiry/{number}"

    def note_mailboxes(self, mailboxes: Sequence[Address]) -> None:
        """Note where all ranks' mailboxes are; all ranks are told at the same place."""
        self.mailboxes = mailboxes
        if any(mailboxes[0].secret):
            # No other group has had it. Not itself: whoever knows it is listened to.
            facts = mailboxes[0].secret + mailboxes[0].number.to_bytes(4, "big")
            self._prefix = f"fullshard/inquiry/{hashlib.blake2b(facts, digest_size=8).hexdigest()}"

    @property
    def is_due(self) -> bool:
        """True if a rank that waits has something to do, or to tell its user."""
        if self.verdict is not None or self.departed or not self._is_open:
            return True
        due = self._next_look if self._examiner is None else self._examiner.next_look
        return time.monotonic() >= due

    def diagnose(self, history: list[Place], failed: bool = False) -> Verdict | None:
        """Find out why this rank waits; ``failed``: its collective did, so that somebody is gone.

        To be called again and again; decides itself what is due.
        """
        if self.verdict is None and self.store_ends_with_first and 0 in self.departed:
            # It has told all ranks; and the store, by which they would find out more, may be gone.
            self.verdict = self.describe_lost([*self.departed], self.departed, history[-1])
        if self.verdict is not None:
            return self.verdict
        if not self.is_due or not self.store_answers():
            return None
        if not self._is_open:
            self._post(history)
        elif self._examiner is None:
            self._feel_pulse(time.monotonic())
        if self._examiner is not None:
            self.verdict = self._examiner.diagnose(history, failed)
        return self.verdict

    def close(self) -> None:
        """End this rank's part: it no longer waits."""
        self._ended_since = None
        if self._is_open:
            self._is_open = False
            if self._examiner is not None:
                self._examiner.retire()
                self._examiner = None
                self.compare_set("examiner", str(self._rank), "")

    # -- requests to the store ----------------------------------------------------------------

    def add(self, key: str, amount: int) -> int:
        """Add to a number of all ranks."""
        self.requests += 1
        found: int = self.store.add(f"{self._prefix}/{key}", amount)
        return found

    def set(self, key: str, value: bytes) -> None:
        """Write a value for all ranks."""
        self.requests += 1
        self.store.set(f"{self._prefix}/{key}", value)

    def get(self, key: str) -> bytes:
        """Read a value that is there, or will be at once."""
        self.requests += 1
        value: bytes = self.store.get(f"{self._prefix}/{key}")
        return value

    def delete(self, key: str) -> None:
        """Remove a value that nobody will read any more."""
        self.requests += 1
        self.store.delete_key(f"{self._prefix}/{key}")

    def compare_set(self, key: str, expected: str, value: str) -> str:
        """Write a value if it is as expected; returns the value afterwards."""
        self.requests += 1
        found: bytes = self.store.compare_set(f"{self._prefix}/{key}", expected, value)
        return found.decode()

    # -- a rank that waits --------------------------------------------------------------------

    def _post(self, history: list[Place]) -> None:
        packed = zlib.compress(json.dumps(history).encode(), 1)
        number = self.add("posts", 1)
        self.set(f"post/{number}", b"%d\n" % self._rank + packed)
        self._is_open = True
        self._apply(expected="")

    def _apply(self, expected: str) -> None:
        """Become the examiner, if that is still ``expected``."""
        now = time.monotonic()
        self._pulse, self._felt = -1, now
        self._next_look = now + self._interval
        if self.compare_set("examiner", expected, str(self._rank)) == str(self._rank):
            self._examiner = Examiner(self)

    @property
    def _interval(self) -> float:
        return _FEELS_PULSE_EVERY if self.mailboxes else self._store_interval

    @property
    def _store_interval(self) -> float:
        """Seconds between two questions of a rank that the store can bear from all ranks."""
        return max(EXAMINES_EVERY, _PER_THOUSAND_RANKS * len(self._names) / 1000)

    def _feel_pulse(self, now: float) -> None:
        pulse = self.add("pulse", 0)
        self._next_look = now + self._interval
        if pulse >= HAS_VERDICT:
            self.verdict = Verdict(*json.loads(self.get("verdict")))
            self.note_told()
        elif pulse != self._pulse:
            self._pulse, self._felt = pulse, now
        elif now - self._felt > _NO_PULSE:
            self._apply(expected=self.get("examiner").decode())

    def store_answers(self) -> bool:
        """True if the store will answer a request soon.

        It does not while the first rank, whose process provides the store, is stopped.
        """
        self._silent_store = None
        if self._rank == 0 or not self.store_ends_with_first or not self.mailboxes:
            return True
        found = self.reach([0], {"asked": "answer"})[0]
        answers = found.answer is not None or found.state is State.ENDED
        if not answers and self.mailboxes[0].is_reachable:
            self._silent_store = f"{self.name([0])}\n{self.silence(0)}"
            return False
        return True

    def silence(self, rank: int) -> str:
        return f"{self.name([rank])} is alive and does not answer: stopped, or busy in native code"

    def awaited(self) -> str | None:
        """The ranks that are waited for, in the examiner's words; None if not known."""
        if self._silent_store is not None:
            return self._silent_store
        if self._examiner is not None:
            return self._examiner.awaited
        now = time.monotonic()
        if now < self._next_question:
            return None
        # The examiner mostly knows by now. Where it does not yet, it will in a moment.
        self._next_question = now + self._store_interval
        if not self.store_answers():
            return self._silent_store
        self.requests += 1
        if not self.store.check([f"{self._prefix}/awaited"]):
            return None
        return self.get("awaited").decode() or None

    # -- what all ranks can say ---------------------------------------------------------------

    def describe_lost(self, lost: Sequence[int], reasons: dict[int, str], place: Place) -> Verdict:
        """Say that ranks, by their numbers in the group, have ended."""
        return describe_loss(
            [self._names[rank] for rank in sorted(lost)],
            {self._names[rank]: reason for rank, reason in reasons.items()},
            f"{name_ranks([self._names[self._rank]])} waits {self.waits} the",
            *place,
        )

    @property
    def own_name(self) -> int:
        return self._names[self._rank]

    def name(self, ranks: Sequence[int]) -> str:
        return name_ranks(self._names[rank] for rank in ranks)

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(len(self._names)) if rank != self._rank]

    def named(self, histories: dict[int, dict[int, Operation]]) -> dict[int, dict[int, Operation]]:
        return {self._names[rank]: history for rank, history in histories.items()}

    def reach(self, ranks: Sequence[int], message: dict[str, Any] | None) -> dict[int, Contact]:
        """Try to reach ranks at their mailboxes."""
        places = {r: self.mailboxes[r] if self.mailboxes else self.find_mailbox(r) for r in ranks}
        known = {rank: place for rank, place in places.items() if place is not None}
        found = contact([*known.values()], message, _REACHES_WITHIN)
        return dict.fromkeys(ranks, Contact(State.UNKNOWN)) | dict(zip(known, found, strict=True))

    def receive(self, message: dict[str, Any]) -> bool:
        """Take note of what another rank left in the mailbox; whether it was news."""
        if "verdict" in message:
            self.verdict = self.verdict or Verdict(*message["verdict"])
        elif "departed" in message:
            rank, reason = message["departed"]
            self.departed.setdefault(rank, reason)
        else:
            return False
        return True

    def depart(self, reason: str) -> None:
        """Leave word that this rank ends with an error, before others miss it.

        A few others are told. Those of them that wait already begin an inquiry at once.
        """
        if self.verdict is not None:
            return
        note = {"departed": [self._rank, reason]}
        if self._rank == 0 and self.store_ends_with_first and self.mailboxes:
            self.reach(self.others, note)
            return
        if self.store_ends_with_first and self.reach([0], None)[0].state is State.ENDED:
            return
        if self.store_answers():
            number = self.add("departures", 1)
            self.set(f"departure/{number}", json.dumps(note["departed"]).encode())
            self.note_told()
        size = len(self._names)
        following = [(self._rank + distance) % size for distance in range(1, 1 + _TOLD)]
        self.reach([rank for rank in dict.fromkeys(following) if rank != self._rank], note)

    def note_told(self) -> None:
        """Count this rank among those that know how this ends."""
        self.add("told", 1)

    @property
    def serves_others(self) -> bool:
        """True while other ranks may find out in this rank's store alone how this ends."""
        is_served = self.mailboxes or not self.store_ends_with_first or self._rank != 0
        return not is_served and self.are_others_untold

    @property
    def are_others_untold(self) -> bool:
        """True while some rank has not counted itself among those that know."""
        return self.add("told", 0) < len(self._names)

    def diagnose_without_store(self, history: list[Place], failed: bool = False) -> Verdict | None:
        """Find out who has ended when the store does not answer: most likely who provided it."""
        now = time.monotonic()
        self._next_look = now + EXAMINES_EVERY
        if self.verdict is None and self.departed:
            self.verdict = self.describe_lost([*self.departed], self.departed, history[-1])
        if self.verdict is None and self._rank != 0:
            ended, reasons = self.ended_among([0])
            if not self.mailboxes and self.store_ends_with_first and server_of(self.store):
                # Ranks do not know each other yet; but who serves the store ends with it.
                ended = [0]
            self._miss(ended, reasons, history[-1], failed)
        if self.verdict is None and failed and now >= self._next_search:
            self._next_search = now + REACHES_EVERY
            self._miss(*self.ended_among(self.others), history[-1], failed)
        return self.verdict

    def _miss(self, ended: list[int], reasons: dict[int, str], place: Place, failed: bool) -> None:
        if ended and self.are_missed(failed):
            self.verdict = self.describe_lost(ended, reasons, place)

    def ended_among(self, ranks: Sequence[int]) -> tuple[list[int], dict[int, str]]:
        """Those of ``ranks`` that have ended or left the group; of the latter, how."""
        contacts = self.reach(ranks, {"asked": "where"})
        left = left_among(contacts)
        ended = [rank for rank, found in contacts.items() if found.state is State.ENDED]
        return sorted([*ended, *left]), left

    def are_missed(self, failed: bool) -> bool:
        """True if ranks that have ended are waited for, and did not just finish before others."""
        now = time.monotonic()
        if self._ended_since is None:
            self._ended_since = now
        return failed or now - self._ended_since >= _MISSES_AFTER
