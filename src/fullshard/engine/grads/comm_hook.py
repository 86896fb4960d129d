"""Gradients that a function of the user's reduces, in place of the engine's own collectives.

Note: absent gradients under a hook
    What a hook does to negative zeros is not known: a cast may make some, a compression lose
    them. So they do not mark absent gradients here (see ``gradients.py``). The ranks vote
    instead, once at the end of a backward, by which parameters each of them used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ...api import ShardingStrategy
from ..comm.collectives import Group
from .gradients import PossiblyUnused, ReduceInput, accept


class CommHook:
    """A hook function and its state, shared by all units of this rank.

    ``given`` is the function that the user registered; ``function`` is called, and differs from it
    where fullshard replaces a hook of torch's by its own.
    """

    def __init__(
        self, state: object, function: Callable[..., Any], given: Callable[..., Any] | None = None
    ) -> None:
        self.state = state
        self.function = function
        self.given = function if given is None else given
        #: By number of arguments: the reason why the function does not accept them, or None.
        self._misfits: dict[int, str | None] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> CommHook:
        # The state may hold process groups, which cannot be copied; it is shared by all units.
        return self

    def check_arguments(self, strategy: ShardingStrategy, unit: str) -> None:
        """Raise TypeError if the function cannot be called as units under ``strategy`` call it."""
        sharded = strategy is not ShardingStrategy.NO_SHARD
        arguments = ["state", "gradient", *(["shard"] if sharded else [])]
        if len(arguments) not in self._misfits:
            self._misfits[len(arguments)] = _misfit(self.given, arguments)
        problem = self._misfits[len(arguments)]
        if problem is not None:
            raise TypeError(
                f"The communication hook {getattr(self.given, '__name__', self.given)!r} cannot be "
                f"called as hook({', '.join(arguments)}), as unit {unit!r} under {strategy} does: "
                f"{problem}"
            )


def _misfit(function: Callable[..., Any], arguments: Sequence[str]) -> str | None:
    """The reason why ``function`` cannot be called with ``arguments``; None if it can."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        return str(error)
    except ValueError:
        # A function in C without a signature.
        return None
    return None


class Ballot(NamedTuple):
    """The parameters of a reduced group that this rank used, and those it cannot decide on."""

    shards: Group
    copies: Group | None
    device: torch.device
    present: list[bool]
    undecided: list[PossiblyUnused]

    @classmethod
    def of(
        cls,
        staged: ReduceInput,
        shards: Group,
        copies: Group | None,
        undecided: list[PossiblyUnused],
    ) -> Ballot:
        absent = set(staged.absent)
        present = [index not in absent for index in range(len(staged.handle.layout.slots))]
        return cls(shards, copies, staged.handle.device, present, undecided)


def reduce_with_hook(
    staged: ReduceInput, hook: CommHook, shards: Group, copies: Group | None, unit: str
) -> torch.Tensor:
    """Let the hook reduce the staged gradients; returns this rank's shard, or all of it.

    The hook is called as ``hook(state, full, shard)``, or ``hook(state, full)`` where nothing is
    sharded, and averages over the ranks that share the shards. Where there are copies, the
    engine averages over them.
    """
    handle = staged.handle
    hook.check_arguments(handle.strategy, unit)
    # The hook gets tensor objects of its own, whose data and dtype it may replace.
    full = staged.flat.detach()
    shards.agree("communication hook", unit, full)
    if not handle.is_sharded:
        hook.function(hook.state, full)
        return _checked(full, staged.flat.shape, hook, unit)
    shard = torch.zeros(handle.layout.shard_numel, dtype=full.dtype, device=full.device)
    expected = shard.shape
    hook.function(hook.state, full, shard)
    shard = _checked(shard, expected, hook, unit)
    if copies is not None:
        copies.all_reduce(shard, unit)
        shard.div_(copies.size)
    return shard


def _checked(result: torch.Tensor, expected: torch.Size, hook: CommHook, unit: str) -> torch.Tensor:
    if result.shape != expected:
        name = getattr(hook.function, "__name__", repr(hook.function))
        raise RuntimeError(
            f"The communication hook {name} changed the shape of a gradient of unit {unit!r} from "
            f"{tuple(expected)} to {tuple(result.shape)}; it must leave the reduced gradient in "
            "the last tensor that it is given"
        )
    return result


def settle_by_vote(ballots: Iterable[Ballot]) -> None:
    """Deliver the gradients that some rank has; all ranks call this, with the same groups."""
    by_group: dict[tuple[Group, Group | None], list[Ballot]] = {}
    for ballot in ballots:
        by_group.setdefault((ballot.shards, ballot.copies), []).append(ballot)
    for (shards, copies), cast in by_group.items():
        present = [is_present for ballot in cast for is_present in ballot.present]
        votes = torch.tensor(present, dtype=torch.uint8, device=cast[0].device)
        for group in filter(None, (shards, copies)):
            group.all_reduce_max(votes, "(all units)", "vote on absent gradients")
        found = iter(votes.tolist())
        for ballot in cast:
            used = [next(found) for _ in ballot.present]
            accept([maybe for maybe in ballot.undecided if used[maybe.slot]])
