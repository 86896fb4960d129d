"""The examiner: one waiting rank compares the histories of all, and publishes the verdict."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .disagreement import Operation, Place, Verdict, describe_difference, first_difference
from .mailbox import Contact, State

if TYPE_CHECKING:
    from .inquiry import Inquiry

#: Seconds between two looks of the examiner.
EXAMINES_EVERY = 0.25
#: Seconds between two attempts to reach ranks that posted nothing.
REACHES_EVERY = 2.0
#: What is added to the examiner's pulse when it has published a verdict.
HAS_VERDICT = 1 << 40
#: Seconds for which posts are awaited that would name further ranks, after two have differed.
_GRACE = 1.0
#: How many of the ranks that are waited for are described.
_DESCRIBED = 4
#: Seconds for which a rank stays whose verdict did not reach all mailboxes.
_STAYS = 5.0
#: What is said of a rank that destroyed its process group and goes on.
_LEFT = "destroy_process_group(), as programs do after training"


class Examiner:
    """The part of an inquiry that one rank carries out for all."""

    def __init__(self, inquiry: Inquiry) -> None:
        self._inquiry = inquiry
        self._first = self._read = inquiry.add("read", 0)
        self._read_departures = 0
        self._histories: dict[int, dict[int, Operation]] = {}
        #: Most ranks post the same: it is read once.
        self._known: dict[bytes, dict[int, Operation]] = {}
        self._departed: dict[int, str] = {}
        self._differ_since: float | None = None
        self.next_look = self._next_reach = 0.0
        self.awaited: str | None = None

    def retire(self) -> None:
        """Delete what the ranks posted in the store: the wait is over."""
        for number in range(self._first + 1, self._read + 1):
            self._inquiry.delete(f"post/{number}")
        self._inquiry.add("read", self._read - self._first)
        if self.awaited is not None:
            self._inquiry.set("awaited", b"")

    def diagnose(self, history: list[Place], failed: bool) -> Verdict | None:
        now = time.monotonic()
        self.next_look = now + EXAMINES_EVERY
        self._inquiry.add("pulse", 1)
        self._read_posts()
        self._read_notes()
        verdict = self._departure(history) or self._difference(now)
        if verdict is None and self._differ_since is None and (failed or now >= self._next_reach):
            verdict = self._reach_others(history, failed)
        if verdict is not None:
            self._publish(verdict)
        return verdict

    def _read_posts(self) -> None:
        count = self._inquiry.add("posts", 0)
        for number in range(self._read + 1, count + 1):
            rank, _, packed = self._inquiry.get(f"post/{number}").partition(b"\n")
            if packed not in self._known:
                posted = json.loads(zlib.decompress(packed))
                self._known[packed] = {place: Operation(*given) for place, given in posted}
            self._histories[int(rank)] = self._known[packed]
        self._read = count

    def _read_notes(self) -> None:
        count = self._inquiry.add("departures", 0)
        for number in range(self._read_departures + 1, count + 1):
            rank, reason = json.loads(self._inquiry.get(f"departure/{number}"))
            self._departed[rank] = reason
        self._departed.update(self._inquiry.departed)
        self._read_departures = count

    def _departure(self, history: list[Place]) -> Verdict | None:
        if not self._departed:
            return None
        return self._inquiry.describe_lost([*self._departed], self._departed, history[-1])

    def _difference(self, now: float) -> Verdict | None:
        distinct = {id(history): history for history in self._histories.values()}
        place = first_difference(distinct.values())
        if place is None:
            return None
        self._differ_since = self._differ_since or now
        missing = len(self._histories) <= len(self._inquiry.others)
        if missing and now - self._differ_since < _GRACE:
            return None
        return describe_difference(place, self._inquiry.named(self._histories))

    def _reach_others(self, history: list[Place], failed: bool) -> Verdict | None:
        """Ask after the ranks that are furthest behind, by what they posted."""
        first = self._next_reach == 0.0 and not failed
        self._next_reach = time.monotonic() + (_GRACE if first else REACHES_EVERY)
        if first:
            # Others may be about to post.
            return None
        inquiry, place = self._inquiry, history[-1][0]
        reached = {r: max(self._histories.get(r, {}), default=-1) for r in inquiry.others}
        behind = [rank for rank, last in reached.items() if last < place]
        contacts = inquiry.reach(behind or inquiry.others, None)
        ended = [rank for rank, found in contacts.items() if found.state is State.ENDED]
        if not ended:
            furthest = [rank for rank in behind if reached[rank] == min(reached.values())]
            answers = inquiry.reach(furthest[:_DESCRIBED], {"asked": "where"})
            left = left_among(answers)
            if not left:
                self._name_awaited(furthest, answers, place)
                return None
        self._next_reach = time.monotonic() + _GRACE
        if not inquiry.are_missed(failed):
            return None
        # Who ends by an error says so before it ends.
        self._read_notes()
        reasons = self._departed if ended else {**left, **self._departed}
        return inquiry.describe_lost(ended or [*left], reasons, history[-1])

    def _name_awaited(self, ranks: list[int], answers: dict[int, Contact], place: int) -> None:
        """Publish which ranks are waited for: those of ``ranks`` that are not at ``place`` yet."""
        words = []
        for rank, found in answers.items():
            answer = found.answer
            if answer and answer["place"] >= place:
                ranks.remove(rank)
            elif answer:
                words.append(f"{self._inquiry.name([rank])} is in {answer['where']}")
            elif found.state is State.THERE:
                words.append(self._inquiry.silence(rank))
        awaited = self._inquiry.name(ranks) if ranks else ""
        said = f"{awaited}\n{'; '.join(words)}" if awaited else ""
        if said != (self.awaited or ""):
            self.awaited = said or None
            self._inquiry.set("awaited", said.encode())

    def _publish(self, verdict: Verdict) -> None:
        inquiry = self._inquiry
        inquiry.set("verdict", json.dumps(list(verdict)).encode())
        inquiry.add("pulse", HAS_VERDICT)
        inquiry.note_told()
        reached = inquiry.reach(inquiry.others, {"verdict": list(verdict)})
        if any(found.state is State.UNKNOWN for found in reached.values()):
            # Others will find it in the store, which may end with this process.
            deadline = time.monotonic() + _STAYS
            while inquiry.are_others_untold and time.monotonic() < deadline:
                time.sleep(EXAMINES_EVERY)


def left_among(contacts: Mapping[int, Contact]) -> dict[int, str]:
    """The ranks that are alive but have destroyed the process group, each with a description."""
    return {rank: _LEFT for rank, found in contacts.items() if (found.answer or {}).get("left")}
