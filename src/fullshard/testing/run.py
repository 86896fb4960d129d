"""One run of a function on the ranks of a pool, and the outcome on each rank."""

from __future__ import annotations

import time
from multiprocessing.connection import wait

from .errors import RankFailure
from .launcher import Launcher
from .protocol import Outcome
from .rank_process import RankEnded, RankProcess, connections
from .report import describe_death
from .stacks import request_stacks


class Run:
    """The state of a run.

    After the first rank has failed, the others get ``grace`` seconds, because they may be waiting
    for that rank in a collective that will never complete.
    """

    def __init__(
        self, launcher: Launcher, ranks: list[RankProcess], timeout: float, grace: float
    ) -> None:
        self._launcher = launcher
        self._ranks = ranks
        self._grace = grace
        self._deadline = time.monotonic() + timeout
        self._overdue = f"still running after {timeout:g} s, the time limit"
        self.outcomes: dict[int, Outcome] = {}
        self._ended: dict[int, int | None] = {}

    def wait(self) -> None:
        """Return when every rank has returned or ended, or when the time is up."""
        while running := self._running():
            remaining = self._deadline - time.monotonic()
            if remaining <= 0:
                return
            wait([*connections(running), self._launcher.fileno()], remaining)
            for rank in running:
                self._note_progress(rank)

    def failures(self) -> list[RankFailure]:
        """The failures, in order of rank. Requests the stacks of ranks that are still running."""
        request_stacks([rank.process for rank in self._running()])
        found = [self._failure(rank) for rank in self._ranks]
        return [failure for failure in found if failure is not None]

    def _running(self) -> list[RankProcess]:
        return [
            rank
            for rank in self._ranks
            if rank.rank not in self.outcomes and rank.rank not in self._ended
        ]

    def _note_progress(self, rank: RankProcess) -> None:
        try:
            outcome: Outcome | None = rank.receive_if_any()
        except RankEnded as end:
            self._ended[rank.rank] = end.status
            self._cut_short()
            return
        if outcome is not None:
            self.outcomes[rank.rank] = outcome
            if outcome.kind != "returned":
                self._cut_short()

    def _cut_short(self) -> None:
        deadline = time.monotonic() + self._grace
        if deadline < self._deadline:
            self._deadline = deadline
            self._overdue = f"still running {self._grace:g} s after another rank had failed"

    def _failure(self, rank: RankProcess) -> RankFailure | None:
        number, output = rank.rank, rank.output()
        if number in self._ended:
            summary = describe_death(self._ended[number])
            return RankFailure(number, "died", summary, rank.stack_at_end(), output)
        outcome = self.outcomes.get(number)
        if outcome is None:
            return RankFailure(number, "hung", self._overdue, rank.stack_now(), output)
        if outcome.kind == "returned":
            return None
        summary = outcome.summary
        if outcome.kind == "skipped":
            summary = f"skipped there, but not everywhere: {summary}"
        return RankFailure(number, "raised", summary, outcome.details, output)
