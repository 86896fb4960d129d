"""Names operations, compares the histories of ranks, and words verdicts. Pure: no communication."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

#: Rank numbers that follow each other are told one by one up to this many.
_LISTED = 3
#: What a forward does to units.
_OF_FORWARD = ("gather", "run")


class RanksDisagreeError(RuntimeError):
    """Two ranks were about to run different operations at the same place."""


class RankLostError(RuntimeError):
    """A rank that others wait for has ended."""


class Operation(NamedTuple):
    """An operation of a rank: a verb, the unit, and the number of elements that are sent."""

    verb: str
    unit: str
    elements: int = 0

    def __str__(self) -> str:
        size = f" ({self.elements} elements)" if self.elements else ""
        return f"{self.verb} of unit {self.unit!r}{size}"


#: An operation and its number among those of its process group.
Place = tuple[int, Operation]


class Verdict(NamedTuple):
    """The reason why a group cannot go on; every rank is told the same."""

    is_lost: bool
    text: str

    def error(self) -> RuntimeError:
        """The error to raise."""
        return (RankLostError if self.is_lost else RanksDisagreeError)(self.text)


def name_ranks(ranks: Iterable[int]) -> str:
    """``rank 3``, or ``ranks 0, 2, 4-1023``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts: list[str] = []
    for run in runs:
        long = len(run) > _LISTED
        parts.extend([f"{run[0]}-{run[-1]}"] if long else map(str, run))
    single = len(runs) == 1 and len(runs[0]) == 1
    return f"{'rank' if single else 'ranks'} {', '.join(parts)}"


def first_difference(histories: Iterable[Mapping[int, Operation]]) -> int | None:
    """The first place at which two of the histories hold different operations."""
    merged: dict[int, Operation] = {}
    different: list[int] = []
    for history in histories:
        for place, operation in history.items():
            if merged.setdefault(place, operation) != operation:
                different.append(place)
    return min(different, default=None)


def describe_difference(place: int, histories: Mapping[int, Mapping[int, Operation]]) -> Verdict:
    """Say in words which ranks (the keys) do what at ``place``."""
    sides: dict[Operation, list[int]] = {}
    for rank in sorted(histories):
        if place in histories[rank]:
            sides.setdefault(histories[rank][place], []).append(rank)
    told = "; ".join(f"{name_ranks(ranks)}: {operation}" for operation, ranks in sides.items())
    forward = all(_is_in_forward(place, h) for h in histories.values() if place in h)
    return Verdict(
        False,
        f"{'Forward order differs across ranks. ' if forward else ''}"
        f"Ranks disagree about operation {place} of this process group: {told}. Every rank "
        "must run the same units in the same order; look for control flow that depends on a "
        "rank's own data, an exception caught on one rank only, or models built differently.",
    )


def _is_in_forward(place: int, history: Mapping[int, Operation]) -> bool:
    """True if a forward began before ``place``, and nothing else was done since."""
    while (operation := history.get(place)) is not None and operation.verb in _OF_FORWARD:
        place -= 1
    return operation is not None and operation.verb.startswith(("forward", "evaluation"))


def describe_loss(
    lost: Sequence[int], reasons: Mapping[int, str], waits: str, place: int, operation: Operation
) -> Verdict:
    """Say in words which ranks have ended, why if that is known, and who ``waits`` for them."""
    said = " ".join(f"Rank {rank} ended with {reasons[rank]}." for rank in lost if rank in reasons)
    silent = [rank for rank in lost if rank not in reasons]
    if silent:
        said += (
            f"{' ' if said else ''}The process of {name_ranks(silent)} has ended without a word: "
            "it left the training loop, or was killed."
        )
    return Verdict(
        True,
        f"{name_ranks(lost).capitalize()} {'is' if len(lost) == 1 else 'are'} gone, and "
        f"{waits} {operation}, operation {place} of this process group. {said} "
        "Look at the log of what is gone.",
    )
