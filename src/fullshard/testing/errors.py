"""What can go wrong with ranks, as exceptions. Touches nothing else of the package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["raised", "hung", "died"]


class RankSetupError(ValueError):
    """The ranks that were asked for cannot be had, or cannot be given what they should run.

    The message is one line: what was given, what was expected and what to do.
    """


@dataclass(frozen=True)
class RankFailure:
    """How one rank failed.

    ``kind`` is "raised" (an assertion or another exception), "hung" (it did not come back in
    time) or "died" (its process ended). ``summary`` is one line, ``details`` the traceback or
    the stack, and ``output`` what the rank wrote to stdout and stderr during the run.
    """

    rank: int
    kind: Kind
    summary: str
    details: str
    output: str = ""


class RanksFailed(Exception):
    """A function failed on at least one rank; the message holds the report of every rank.

    ``failures`` holds one RankFailure for each rank that did not return, in order of rank.
    """

    def __init__(self, report: str, failures: tuple[RankFailure, ...]) -> None:
        super().__init__(report)
        self.failures = failures

    def __reduce__(self) -> tuple[type[RanksFailed], tuple[str, tuple[RankFailure, ...]]]:
        return type(self), (str(self), self.failures)
