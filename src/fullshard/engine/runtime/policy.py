"""The policy: when units are unsharded and resharded, and when gradients are reduced.

No tensors and no effects. The engine asks and carries out; ``fullshard plan`` asks the same object
for the memory that follows. There is one policy per kind of device:

    decision                           accelerator (runs ahead)       host
    ---------------------------------  -----------------------------  ----------------------------
    prefetch in forward                if ``forward_prefetch``        also with BACKWARD_PRE, and
                                                                      where forward keeps all anyway
    units ahead in forward             one                            one; all of them where
                                                                      forward keeps all anyway
    after forward, FULL_SHARD          reshard, the outermost: hide   with BACKWARD_PRE, also hide
                                                                      the last two units, with
                                                                      which backward begins
    release of a resharded unit        one unit late, unless          at once
                                       the next one was prefetched
                                       before this unit computed
    prefetch in backward               as ``backward_prefetch``       the same, and waited for
                                       says                           before autograd can reach it
    units ahead in backward            one                            one
    reduce-scatter                     issued as gradients arrive     at the next event; behind
                                                                      compute where parameters stay
"""

from __future__ import annotations

import dataclasses
import functools
from enum import Enum, auto

from ...api import (
    HYBRID_STRATEGIES,
    NO_RESHARD_AFTER_FORWARD_STRATEGIES,
    BackwardPrefetch,
    Communication,
    MixedPrecision,
    ShardingStrategy,
)

#: How many of the units that run last in forward a host keeps unsharded for the backward: it begins
#: with them before it can prefetch.
_KEPT_FOR_BACKWARD = 2


@dataclasses.dataclass(frozen=True)
class UnitOptions:
    """The options that the user gave for one unit."""

    strategy: ShardingStrategy
    mixed_precision: MixedPrecision
    backward_prefetch: BackwardPrefetch | None
    forward_prefetch: bool
    limit_all_gathers: bool
    use_orig_params: bool
    communication: Communication | None = None

    @functools.cached_property
    def frees_after_forward(self) -> bool:
        return self.strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)

    @functools.cached_property
    def keeps_full_after_forward(self) -> bool:
        return self.strategy in NO_RESHARD_AFTER_FORWARD_STRATEGIES

    @functools.cached_property
    def is_hybrid(self) -> bool:
        return self.strategy in HYBRID_STRATEGIES

    @functools.cached_property
    def is_sharded(self) -> bool:
        """True if a rank keeps a part of the parameters only."""
        return self.strategy is not ShardingStrategy.NO_SHARD


class AfterForward(Enum):
    """The fate of a unit's full parameters when its forward ends and a backward will come."""

    #: Their memory is given back.
    RESHARD = auto()
    #: They stay in memory for the backward; the module shows this rank's pieces.
    HIDE = auto()
    #: They stay in place, where the module and the user see them.
    SHOW = auto()


@dataclasses.dataclass(frozen=True)
class UnitPlan:
    """The decisions for one unit, made once; the step's path looks them up."""

    #: Whether the next unit is all-gathered while this one computes forward, if a backward may
    #: follow.
    prefetches_in_training: bool
    #: The same if no backward will follow.
    prefetches_in_evaluation: bool
    #: Whether the next unit of a backward is prefetched before this one's backward computes.
    prefetches_before_backward: bool
    #: Whether it is prefetched when this one's gradients are there.
    prefetches_after_backward: bool
    #: What becomes of the full parameters after forward, unless backward begins with the unit.
    normally_after_forward: AfterForward
    #: Backward begins with the unit if the number of forwards left, its own included, is one of
    #: these.
    begins_backward_with_left: frozenset[int]
    #: Whether the memory of the resharded unit is given back one unit late: otherwise the next
    #: all-gather, issued after this unit's compute, would have to wait for that compute to write
    #: where this unit was (see the note in ``streams.py``).
    releases_late_in_forward: bool
    releases_late_in_backward: bool
    #: Whether gradients are reduced while the next unit's backward computes.
    reduces_behind_compute: bool

    def after_forward(
        self, *, is_outermost: bool, forwards_left: int | None, holds_copy: bool
    ) -> AfterForward:
        """Decide on the full parameters when a forward ends and a backward will come.

        ``forwards_left`` counts the forwards that remain of the expected order, this one included;
        None where another unit ran inside of this one, or where the order is not known.
        ``holds_copy``: what is unsharded is a copy of whole shards, in another precision or place.
        """
        if self.normally_after_forward is not AfterForward.RESHARD and not holds_copy:
            return self.normally_after_forward
        # The first to be needed in backward are hidden, but not freed.
        begins = is_outermost or forwards_left in self.begins_backward_with_left
        return AfterForward.HIDE if begins else AfterForward.RESHARD

    @functools.cached_property
    def after_forward_table(self) -> dict[tuple[bool, bool], AfterForward]:
        """:meth:`after_forward` by (whether backward begins with the unit, ``holds_copy``)."""
        return {
            (begins, copy): self.after_forward(
                is_outermost=begins, forwards_left=None, holds_copy=copy
            )
            for begins in (False, True)
            for copy in (False, True)
        }


@dataclasses.dataclass(frozen=True)
class Policy:
    """The decisions for one kind of device.

    ``runs_ahead``: work that is given to the device may still be running when the call returns, as
    on an accelerator. A host computes in order, and communicates in the background.
    ``units_ahead_in_backward``: how many units a unit prefetches when backward reaches it.
    """

    runs_ahead: bool
    units_ahead_in_backward: int = 1

    def plan(self, unit: UnitOptions) -> UnitPlan:
        """Make the decisions that depend on a unit's options alone.

        An accelerator overlaps work by itself, so it prefetches in forward only with
        ``forward_prefetch``. A host also prefetches without it, if this takes no more memory than
        the step needs anyway: because backward prefetches, or because nothing is resharded before
        backward. For the same reason a host does not reshard the units with which backward begins.
        An accelerator does, because the loss may need the memory, and all-gathers them again after
        it.
        """
        host = not self.runs_ahead
        before = unit.backward_prefetch is BackwardPrefetch.BACKWARD_PRE
        in_every_pass = unit.forward_prefetch or (host and before)
        if unit.frees_after_forward:
            after_forward = AfterForward.RESHARD
        elif unit.keeps_full_after_forward:
            after_forward = AfterForward.SHOW
        else:
            after_forward = AfterForward.HIDE
        return UnitPlan(
            prefetches_in_training=in_every_pass or (host and unit.keeps_full_after_forward),
            prefetches_in_evaluation=in_every_pass,
            prefetches_before_backward=before,
            prefetches_after_backward=unit.backward_prefetch is BackwardPrefetch.BACKWARD_POST,
            normally_after_forward=after_forward,
            begins_backward_with_left=frozenset(
                range(1, _KEPT_FOR_BACKWARD + 1)
                if host and before and unit.frees_after_forward
                else ()
            ),
            releases_late_in_forward=self.runs_ahead and not unit.forward_prefetch,
            releases_late_in_backward=self.runs_ahead and not before,
            # On a host that takes a second reduce buffer, which is much where full parameters come
            # and go, and little where they stay.
            reduces_behind_compute=self.runs_ahead or not unit.frees_after_forward,
        )

    def units_ahead(self, units_left: int, *, is_first: bool, keeps_all: bool) -> int:
        """The number of following units that a unit prefetches in forward.

        ``keeps_all``: all units stay unsharded until backward. A host then begins with all of them
        at once: they will be there at the end of forward, when memory is scarcest, and the sooner
        they are on their way, the less do ranks wait for each other.
        """
        if is_first and keeps_all and not self.runs_ahead:
            return units_left
        return min(units_left, 1)

    def positions_ahead_in_backward(self, position: int) -> range:
        """The forwards whose units are prefetched when backward reaches the one at ``position``.

        Positions count forwards in the order in which they ended; backward goes down.
        """
        return range(position - 1, max(position - 1 - self.units_ahead_in_backward, -1), -1)

    def may_prefetch_in_backward(self, following: UnitOptions, *, is_first: bool) -> bool:
        """True if a unit that is next in backward is unsharded ahead.

        Under ``NO_SHARD``, unsharding only copies this rank's whole shard, which is fast.
        ``is_first``: backward has just begun, and memory is scarcest, so no such copy is made.
        """
        return following.is_sharded or not is_first

    @functools.cached_property
    def checks_for_changes(self) -> bool:
        """True if prefetched parameters are compared with the user's before they are used."""
        return not self.runs_ahead

    @functools.cached_property
    def waits_for_prefetch(self) -> bool:
        """True if a prefetch is waited for before autograd can reach the unit that it is for.

        Autograd may reach the unit through tensors that it stored where the engine does not look
        for outputs, so that no hook announces it. An accelerator is not made to wait: it would lose
        what overlaps at the beginning of a backward.
        """
        return not self.runs_ahead

    @functools.cached_property
    def reduces_at_once(self) -> bool:
        """True if gradients are reduced as they arrive, since an accelerator overlaps that by
        itself.

        A host waits for the next event of the backward. By then autograd has released the full
        gradients, and the reduce can use their memory.
        """
        return self.runs_ahead


_ACCELERATOR, _HOST = Policy(runs_ahead=True), Policy(runs_ahead=False)


def policy_for(device_type: str) -> Policy:
    """The policy for a kind of device, such as ``cuda`` or ``cpu``."""
    return _HOST if device_type in ("cpu", "meta") else _ACCELERATOR
