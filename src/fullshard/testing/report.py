"""The report of a function that failed on ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from .errors import RankFailure

# A rank that died makes others raise, and one that raised lets others hang.
_CAUSES = ("died", "raised", "hung")
_NO_STACK = "  (no stack: a process that is killed or stopped cannot write it)"
# gloo announces every process group on stdout.
_NOISE = ("[Gloo] Rank ",)


def format_report(function_name: str, world_size: int, failures: Sequence[RankFailure]) -> str:
    """The report of one run, with a section for each rank; equal sections are shown once."""
    numbers = [failure.rank for failure in failures]
    returned = [rank for rank in range(world_size) if rank not in numbers]
    cause = min(failures, key=lambda failure: _CAUSES.index(failure.kind))
    sections = [
        f"{function_name} failed on {_ranks(numbers)} of {world_size}: "
        f"rank {cause.rank}: {cause.summary}"
    ]
    for group in _equal_accounts(failures):
        sections.append(f"--- {_ranks([failure.rank for failure in group])}: {group[0].summary}")
        sections.append(group[0].details or _NO_STACK)
    if returned:
        sections.append(f"--- {_ranks(returned)}: returned")
    for failure in failures:
        if failure.output:
            sections.append(f"--- output of rank {failure.rank}")
            sections.append(failure.output)
    return "\n".join(sections)


def _equal_accounts(failures: Sequence[RankFailure]) -> list[list[RankFailure]]:
    grouped: dict[tuple[str, str], list[RankFailure]] = {}
    for failure in failures:
        grouped.setdefault((failure.summary, failure.details), []).append(failure)
    return list(grouped.values())


def describe_death(status: int | None) -> str:
    """Describe the status of a rank that has ended, as from os.waitpid; None is unknown."""
    if status is None:
        return "its process ended"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"its process was killed by signal {number} ({signal.Signals(number).name})"
    return f"its process ended with exit status {os.WEXITSTATUS(status)}"


def without_noise(output: str) -> str:
    """A rank's output without the lines that gloo itself writes."""
    lines = [line for line in output.splitlines() if not line.startswith(_NOISE)]
    return "\n".join(lines).strip("\n")


def _ranks(numbers: list[int]) -> str:
    word = "rank" if len(numbers) == 1 else "ranks"
    return f"{word} {', '.join(map(str, numbers))}"
