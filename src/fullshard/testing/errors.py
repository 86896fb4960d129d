"""The exceptions about ranks. Imports nothing else of the package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["raised", "hung", "died"]


class RankSetupError(ValueError):
    """Ranks cannot be started, or a function cannot be sent to them.

    The message is one line that says what was given, what was expected and what to do.
    """


@dataclass(frozen=True)
class RankFailure:
    """The failure of one rank.

    ``kind`` is "raised" (an assertion or another exception), "hung" (the rank did not return in
    time) or "died" (its process ended). ``summary`` is one line, ``details`` the traceback or the
    stack, and ``output`` the rank's stdout and stderr during the run.
    """

    rank: int
    kind: Kind
    summary: str
    details: str
    output: str = ""


class RanksFailed(Exception):
    """A function failed on at least one rank; the message contains the report of every rank.

    ``failures`` contains a RankFailure for each rank that did not return, in order of rank.
    """

    def __init__(self, report: str, failures: tuple[RankFailure, ...]) -> None:
        super().__init__(report)
        self.failures = failures

    def __reduce__(self) -> tuple[type[RanksFailed], tuple[str, tuple[RankFailure, ...]]]:
        return type(self), (str(self), self.failures)
