"""Ranks agree on what comes next before they communicate, so that none waits for another forever.

Note: agreeing without talking
    A collective that one rank starts and another does not hangs, and over gloo two collectives of
    different sizes end the process. So an operation is started only when the other ranks are
    known to start the same one. All ranks of a process group have seen the same operations so
    far; each therefore holds the same table from "operations since the last pass began" to "what
    followed last time"; which kind of pass follows is looked up by the last few passes. A rank
    about to do what the table says just does it: a dictionary lookup, no communication. A rank
    about to do something else first counts itself in, in the group's store, under that
    operation's name, and goes on when all ranks have; then all tables learn it. The first step of
    a model is learned this way. After it, the ranks of a static model meet at the beginning of a
    pass only, until the last few passes are as many as are remembered; then never again.

    When ranks disagree, one of them deviates from the table, does not start, and waits in the
    store; the others wait for the collective. Whoever waits for longer than ``PATIENCE`` posts
    the operations it went through and reads what the others posted. Two ranks with different
    operations at the same place have disagreed: the finding is posted, and every rank raises it.
    A rank that is merely slow has posted nothing that contradicts the others, and is waited for;
    those who wait say so after ``TELL_AFTER``.
    Over gloo the host itself waits for collectives, and looks. Over other backends it runs ahead;
    there a thread answers for it.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from .backends import is_gloo

#: Seconds of waiting after which a rank looks at what the others are doing.
PATIENCE = 2.0
#: Seconds of waiting after which a rank says for whom, once.
TELL_AFTER = 60.0
#: Seconds after which a rank stops waiting for others that say nothing at all, at the latest.
LAST_RESORT = 1800.0
#: How often a waiting rank looks again; in the first seconds, this part of the time that it waited.
_LOOK_EVERY = 0.25
_OF_TIME_WAITED = 0.1
#: How many past operations a rank can be compared by.
_REMEMBERED = 512
#: How many passes back the next one is predicted from (micro-batches, train and eval in turn).
_PASSES_REMEMBERED = 32
#: The table is forgotten when a model that never repeats itself has filled it this far.
_TABLE_LIMIT = 200_000
#: Set to "0" to start operations without agreeing on them.
SWITCH = "FULLSHARD_ORDER_CHECK"


class RanksDisagreeError(RuntimeError):
    """Two ranks were about to run different operations at the same place."""


class Operation(NamedTuple):
    """What a rank is about to do: a verb, the unit it is done to, and how much is sent."""

    verb: str
    unit: str
    elements: int = 0

    def __str__(self) -> str:
        size = f" ({self.elements} elements)" if self.elements else ""
        return f"{self.verb} of unit {self.unit!r}{size}"


#: An operation and its number among those of its process group.
Place = tuple[int, Operation]
_ASKED = "fullshard/asked"
#: The threads that are meeting other ranks at a store.
_meeting: set[int] = set()
_meeting_lock = threading.Lock()
#: What a forward does to units.
_OF_FORWARD = ("gather", "run")


class Agreement:
    """One process group's common knowledge of the order of operations."""

    def __init__(
        self, store: Any, rank: int, world_size: int, timeout: float = LAST_RESORT
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout = min(timeout, LAST_RESORT)
        #: From a path to what followed it, and the path that this makes.
        self._table: dict[int, tuple[Operation, int]] = {}
        self._path = 0
        self._count = 0
        #: (place, operation) pairs; copied in one piece by the thread that answers for this rank.
        self._recent: collections.deque[Place] = collections.deque(maxlen=_REMEMBERED)
        self._passes: collections.deque[Operation] = collections.deque(maxlen=_PASSES_REMEMBERED)
        self._previous_key: str | None = None
        self._asking = False
        #: Whether this group has left the connection to the store that all groups share.
        self._has_connection = False
        self._finding: str | None = None
        #: The operation that this rank waits to begin, and its place: not a past one yet.
        self._waiting: Place | None = None
        #: Whether this rank has said that it read where the others are.
        self._announced = False
        #: Called when others have been waited for for long; raises if that is in vain (``Join``).
        self.also_look: Callable[[], None] | None = None
        #: The place of the last operation for which it was told that others are waited for.
        self._told = -1

    def settle(self, asked: tuple[str, str, int], begins_pass: bool = False) -> None:
        """Return when every rank is known to do what is ``asked`` next; raise if one is not.

        An :class:`Operation` in all but type: one that is known need not be made again.
        """
        if self._finding is not None:
            raise RanksDisagreeError(self._finding)
        # What a pass consists of follows from how it began; which pass is next, from the last few.
        path = hash((self._path, *self._passes)) if begins_pass else self._path
        known = self._table.get(path)
        if known is None or known[0] != asked:
            operation = Operation(*asked)
            self._meet(operation)
            if len(self._table) >= _TABLE_LIMIT:
                self._table.clear()
            known = operation, hash(operation if begins_pass else (path, operation))
            self._table[path] = known
        operation, self._path = known
        self._recent.append((self._count, operation))
        self._count += 1
        if begins_pass:
            self._passes.append(operation)

    def wait(self, work: Any) -> None:
        """Wait for a collective; look around when it takes suspiciously long."""
        patience, waited = PATIENCE, 0.0
        while True:
            try:
                work.wait(timedelta(seconds=patience))
                return
            except RuntimeError as error:
                # Gloo's word for "not yet"; anything else is a failure of its own.
                if "timed out" not in str(error).lower():
                    raise
            if work.is_completed():
                # It came, or failed, just now: this returns or raises at once.
                work.wait()
                return
            waited += patience
            self._look(waited)
            patience = _LOOK_EVERY

    def _meet(self, operation: Operation) -> None:
        with self._at_store():
            self._meet_at_store(operation)

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
                    self._store = self._store.clone()
            _meeting.add(thread)
        try:
            yield
        finally:
            with _meeting_lock:
                _meeting.discard(thread)

    def _meet_at_store(self, operation: Operation) -> None:
        key = f"fullshard/{self._count}/{'/'.join(map(str, operation))}"
        if self._store.add(key, 1) == self._world_size:
            self._store.set(f"{key}/go", "1")
            self._forget_previous()
        else:
            self._wait_for_all(key, operation)
        self._previous_key = key

    def _wait_for_all(self, key: str, operation: Operation) -> None:
        # Kept if this raises: a thread that answers must go on to say it.
        self._waiting = self._count, operation
        if self._comes_soon(key):
            self._waiting = None
            return
        waited = PATIENCE
        while True:
            self._look(waited, operation)
            time.sleep(_LOOK_EVERY)
            waited += _LOOK_EVERY
            if self._store.check([f"{key}/go"]):
                self._waiting = None
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
        while not self._store.check([f"{key}/go"]):
            waited = time.monotonic() - began
            if waited >= PATIENCE:
                return False
            time.sleep(min(waited * _OF_TIME_WAITED, _LOOK_EVERY, PATIENCE - waited))
        return True

    def _forget_previous(self) -> None:
        """All ranks are here, so none is still reading the keys of the meeting before."""
        if self._previous_key is not None:
            self._store.delete_key(self._previous_key)
            self._store.delete_key(f"{self._previous_key}/go")

    def look_around(self, waited: float) -> None:
        """Wait on, for a word of another rank; raises what the ranks disagree on."""
        if waited < PATIENCE:
            return
        time.sleep(_LOOK_EVERY)
        self._look(waited)
        if waited > self._timeout:
            raise RanksDisagreeError(f"Waited {waited:.0f} s for ranks that still have data")

    def _look(self, waited: float, pending: Operation | None = None) -> None:
        """Post where this rank is, read where the others are, raise what they disagree on."""
        if self.also_look is not None:
            self.also_look()
        history = [*self._recent] if pending is None else [*self._recent, (self._count, pending)]
        finding = self._compare(history)
        # Asked for after this rank has posted: who answers finds the post, and is done.
        self._ask()
        if finding is not None:
            self._announce()
            raise RanksDisagreeError(finding)
        place, operation = history[-1]
        if waited >= TELL_AFTER and place > self._told:
            self._told = place
            self._tell(waited, place, operation)

    def _tell(self, waited: float, place: int, operation: Operation) -> None:
        """Say which ranks are the furthest behind, by what they said when they last waited."""
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        reached = {rank: max(self._read(rank), default=-1) for rank in others}
        furthest_behind = min(reached.values())
        if furthest_behind < place:
            absent = [rank for rank in others if reached[rank] == furthest_behind]
            warnings.warn(
                f"Rank {self._rank} has waited {waited:.0f} s for {_ranks(absent)}, and is at the "
                f"{operation}. Who is waited for may be slow, busy outside of fullshard, or gone: "
                "look at its log. Waiting goes on",
                stacklevel=2,
            )

    def _ask(self) -> None:
        """Have ranks that do not wait for anything, or not in fullshard, say where they are."""
        if not self._asking:
            self._asking = True
            self._store.set(_ASKED, "1")

    def answer(self) -> bool:
        """Say where this rank is, if another asks; whether they turned out to disagree.

        Called by a thread of its own where collectives do not block the host. The disagreement is
        raised by the next operation of this rank.
        """
        if self._store.check([_ASKED]):
            waiting = self._waiting
            # With what the other thread waits for, which has posted it: this replaces that post.
            self._finding = self._compare([*self._recent, *([waiting] if waiting else [])])
        if self._finding is None:
            return False
        self._announce()
        return True

    def _compare(self, history: list[Place]) -> str | None:
        """Post ``history`` and return in words where another rank's differs from it."""
        self._store.set(_post(self._rank), json.dumps(history))
        mine = dict(history)
        others = {r: self._read(r) for r in range(self._world_size) if r != self._rank}
        for theirs in others.values():
            for place, operation in theirs.items():
                if mine.get(place, operation) != operation:
                    return _describe(place, {self._rank: mine, **others})
        return None

    def _read(self, rank: int) -> dict[int, Operation]:
        if not self._store.check([_post(rank)]):
            return {}
        posted = json.loads(self._store.get(_post(rank)))
        return {place: Operation(*operation) for place, operation in posted}

    def _announce(self) -> None:
        """Give the other ranks time to read this rank's post before this process may end."""
        key = "fullshard/read"
        read = self._store.add(key, 0 if self._announced else 1)
        self._announced = True
        deadline = time.monotonic() + 2 * PATIENCE
        while read < self._world_size and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY / 5)
            read = self._store.add(key, 0)


def _post(rank: int) -> str:
    return f"fullshard/position/{rank}"


def _ranks(ranks: list[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def _describe(place: int, histories: dict[int, dict[int, Operation]]) -> str:
    sides: dict[Operation, list[int]] = {}
    for rank in sorted(histories):
        if place in histories[rank]:
            sides.setdefault(histories[rank][place], []).append(rank)
    told = "; ".join(f"{_ranks(ranks)}: {operation}" for operation, ranks in sides.items())
    forward = all(_is_in_forward(place, h) for h in histories.values() if place in h)
    return (
        f"{'Forward order differs across ranks. ' if forward else ''}"
        f"Ranks disagree about operation {place} of this process group: {told}. Every rank "
        "must run the same units in the same order; look for control flow that depends on a "
        "rank's own data, an exception caught on one rank only, or models built differently."
    )


def _is_in_forward(place: int, history: dict[int, Operation]) -> bool:
    """Whether a forward has begun before ``place`` and done nothing else since."""
    while (operation := history.get(place)) is not None and operation.verb in _OF_FORWARD:
        place -= 1
    return operation is not None and operation.verb.startswith(("forward", "evaluation"))


class NoAgreement:
    """For groups of one rank, groups without a store, and when the check is switched off."""

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
    agreement = Agreement(store, group.rank(), group.size(), _timeout_of(group))
    if not is_gloo(group):
        answer_in_background(agreement, group)
    return agreement


def _timeout_of(group: Any) -> float:
    """Seconds after which the group's collectives fail, by the most patient of its backends."""
    timeouts = []
    for device in group._device_types:
        with contextlib.suppress(AttributeError, RuntimeError):
            timeouts.append(group._get_backend(device).options._timeout.total_seconds())
    return max(timeouts, default=LAST_RESORT)


def answer_in_background(agreement: Agreement, group: Any) -> threading.Thread:
    """Let a thread answer other ranks' questions while this one computes.

    For backends whose collectives do not block the host: a rank that follows the known order runs
    ahead of a collective that will never come. When that is found, the group is aborted, so that a
    host that waits for the device comes back.
    """
    thread = threading.Thread(
        target=_answer, args=(weakref.ref(agreement), weakref.ref(group)), daemon=True
    )
    thread.start()
    return thread


def _answer(agreement_reference: Any, group_reference: Any) -> None:
    while True:
        time.sleep(PATIENCE / 2)
        agreement = agreement_reference()
        try:
            if agreement is None:
                return
            if agreement.answer():
                break
        except RuntimeError:
            # The store is gone, and with it the other ranks.
            return
        del agreement
    group = group_reference()
    if group is not None:
        with contextlib.suppress(Exception):
            group.abort()
