"""The one reason why a unit is unsharded, its transitions, and the units that are unsharded.

Note: one reason at a time
    A unit is unsharded for exactly one reason (:class:`Reason`), and the reason changes by one of
    the named transitions that :class:`Residency` lists. Reasons exclude each other: when each was a
    flag of its own, assertions at the beginning and end of every method that sets or reads one were
    run under all tests of engine, hazards, original parameters, gradients, state and compat (2,731
    tests), and no two of prefetched, requested, awaiting backward, kept and pinned were ever set at
    the same time. Two further flags were seen beside others. *Stale* came with pinned only, and is
    a part of it here. *Held* (``StepState.held``) came with several of them: it says that a running
    backward still needs the unit, not why the unit is unsharded.

    ``summon_full_params`` stands outside: it unshards a unit between steps by itself, for as long
    as its context lasts, and ``Unit.summoned`` says so. The unit has no reason then.

    One pair that no test had met is possible: ``unshard()`` of a unit that is pinned. The unit
    stays pinned, since its memory must stay; ``requested_versions`` keeps that it was requested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto

from .step_state import StepState
from .unit import State, Unit


class Reason(Enum):
    """The reason why a unit is unsharded, or being unsharded."""

    #: The unit is sharded, or ``summon_full_params`` shows its parameters.
    NONE = auto()
    #: All-gathered ahead of its use, on a guess.
    PREFETCHED = auto()
    #: The user called ``unshard()`` between passes.
    REQUESTED = auto()
    #: A forward or backward computes with them, or ended and left them in place.
    IN_USE = auto()
    #: Left by a forward for the backward that follows. Another forward must all-gather again:
    #: parameters may have changed.
    AWAITS_BACKWARD = auto()
    #: Left by a backward for the next forward: inside ``no_sync`` under a strategy that keeps
    #: parameters after forward, or after ``set_reshard_after_backward(False)``.
    KEPT = auto()
    #: Left by a backward with ``create_graph``, in the memory that the next backward will read.
    PINNED = auto()


class Residency:
    """The reason why one unit is unsharded, and its parameters' versions when that began.

    The transitions, by what happens to the unit. A pinned unit stays pinned whoever else uses it,
    until a backward keeps it or it is resharded.

        prefetch           NONE                 → PREFETCHED
        request            any but PINNED       → REQUESTED
        use                any but PINNED       → IN_USE
        leave_to_backward  IN_USE               → AWAITS_BACKWARD
        keep               any but NONE         → KEPT
        pin                any but NONE         → PINNED
        reshard            any                  → NONE
    """

    __slots__ = ("is_stale", "reason", "requested_versions", "versions")

    def __init__(self) -> None:
        self.reason = Reason.NONE
        #: The versions of the parameters when the user called ``unshard()``.
        self.requested_versions: list[int] | None = None
        #: The versions when a backward kept the unit; or, on a host, when a forward prefetched it
        #: or left it unsharded.
        self.versions: list[int] | None = None
        #: Of a pinned unit: parameters may have changed since, and have to be all-gathered again
        #: before the next use. ``.data`` can be written to unnoticed.
        self.is_stale = False

    # -- transitions --------------------------------------------------------------------------

    def prefetch(self, versions: list[int] | None = None) -> None:
        self.reason = Reason.PREFETCHED
        self.versions = versions

    def request(self, versions: list[int]) -> None:
        if self.reason is not Reason.PINNED:
            self.reason = Reason.REQUESTED
        self.requested_versions = versions

    def use(self) -> None:
        if self.reason is not Reason.PINNED:
            self.reason = Reason.IN_USE
        self.requested_versions = self.versions = None

    def leave_to_backward(self, versions: list[int] | None) -> None:
        if self.reason is Reason.IN_USE:
            self.reason = Reason.AWAITS_BACKWARD
            self.versions = versions

    def keep(self) -> None:
        if self.reason is not Reason.NONE:
            self.reason = Reason.KEPT
            self.is_stale = False

    def pin(self) -> None:
        if self.reason is not Reason.NONE:
            self.reason = Reason.PINNED

    def mark_stale(self) -> None:
        """Let a pinned unit be all-gathered again before its next use."""
        self.is_stale = self.reason is Reason.PINNED

    def reshard(self) -> None:
        self.reason = Reason.NONE
        self.requested_versions = None
        self.is_stale = False

    # -- questions ----------------------------------------------------------------------------

    @property
    def is_requested(self) -> bool:
        return self.requested_versions is not None

    def serves_next_pass(self, versions: Callable[[], list[int]], any_changed: bool) -> bool:
        """True if a pass that begins may use the full parameters that are there.

        Parameters that were left for a backward that never came must be all-gathered again.

        ``versions`` returns those of the unit's parameters now; ``any_changed`` says whether
        parameters of any unit changed since the last backward.
        """
        if self.requested_versions is not None:
            return self.requested_versions == versions()
        kept = self.reason is Reason.KEPT or self.reason is Reason.PINNED
        return kept and not any_changed


class UnshardedUnits:
    """The units that are unsharded now; unshards and reshards units for forward and backward."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.states = {unit: StepState() for unit in units}
        self.residencies = {unit: Residency() for unit in units}
        #: Whether a backward is running.
        self.in_backward = False
        #: The units that are not sharded, in the order in which they were all-gathered.
        self._unsharded: dict[Unit, None] = {}
        self._kept_versions: dict[Unit, list[int]] = {}
        #: The versions of all parameters when the last forward ended, if a backward may follow.
        self._after_forward: list[list[int]] = []
        #: The units of which a forward has left parts to a few ranks.
        self._with_parts: list[Unit] = []

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._unsharded

    def end_forward(self) -> None:
        """Note the parameters' versions at the end of the outermost forward."""
        self._after_forward = [unit.versions() for unit in self.residencies]

    def changed_since_forward(self) -> bool:
        """True if parameters were changed in place between forward and backward."""
        noted, self._after_forward = self._after_forward, []
        return bool(noted) and noted != [unit.versions() for unit in self.residencies]

    def all(self) -> list[Unit]:
        """The unsharded units, in a list that stays as it is while they are resharded."""
        return [*self._unsharded]

    def unshard(self, unit: Unit, full_precision: bool) -> None:
        """Unshard a unit now, in the shards' own precision if ``full_precision``."""
        if unit.full_precision != full_precision and unit.state is not State.SHARDED:
            self.reshard(unit)
        residency = self.residencies[unit]
        if residency.is_stale:
            residency.is_stale = False
            unit.fill_again()
        if residency.reason is not Reason.IN_USE:
            residency.use()
        self._unsharded[unit] = None
        if unit.state is State.SHARDED:
            unit.start_unshard(full_precision)
        if unit.state is State.UNSHARDING:
            unit.finish_unshard()

    def prefetch(self, unit: Unit, full_precision: bool, versions: list[int] | None = None) -> None:
        """Begin to unshard a unit that will probably be next; ``versions`` are its parameters'."""
        if unit.state is State.SHARDED:
            self.residencies[unit].prefetch(versions)
            self._unsharded[unit] = None
            unit.start_unshard(full_precision)

    def reshard_unused(self) -> None:
        """Reshard the units that were prefetched and not used."""
        for unit in self.all():
            if self.residencies[unit].reason is Reason.PREFETCHED:
                self.reshard(unit)

    def keep_changes_and_reshard(self, unit: Unit) -> None:
        """Reshard a unit whose full parameters the user may have changed after forward."""
        try:
            if unit.shows_full:
                unit.keep_changes()
        finally:
            self.reshard(unit)

    def reshard(self, unit: Unit) -> None:
        """Reshard a unit, and forget why it was unsharded."""
        self.residencies[unit].reshard()
        self._unsharded.pop(unit, None)
        plan = unit.plan
        unit.reshard(
            plan.releases_late_in_backward if self.in_backward else plan.releases_late_in_forward
        )

    def reshard_to_parts(self, unit: Unit) -> None:
        """Reshard a unit, of whose full parameters a few ranks keep one copy for the backward."""
        self.residencies[unit].reshard()
        self._unsharded.pop(unit, None)
        unit.reshard_to_parts(unit.plan.releases_late_in_forward)
        self._with_parts.append(unit)

    def drop_parts(self) -> None:
        """Drop the parts that forwards left to a few ranks: all ranks share those units again."""
        units, self._with_parts = self._with_parts, []
        for unit in units:
            unit.drop_parts()

    def begin_pass(self, leaves_nothing: bool = False) -> None:
        """Reshard the units that earlier passes left unsharded, unless they are still valid.

        ``leaves_nothing``: reshard all of them.
        """
        self.drop_parts()
        kept, self._kept_versions = self._kept_versions, {}
        changed = bool(kept) and kept != self._versions()
        for unit in self.all():
            residency = self.residencies[unit]
            stays = not leaves_nothing and residency.serves_next_pass(unit.versions, changed)
            if stays and not unit.shows_full:
                unit.finish_unshard()
                stays = not unit.write_back()
            if not stays:
                self.keep_changes_and_reshard(unit)
            elif residency.reason is Reason.KEPT and kept:
                residency.versions = kept[unit]
            # The memory of a pinned unit is what a pending backward will read.
            residency.mark_stale()

    def begin_backward(self) -> None:
        """From now on, release memory as the policy says for backward."""
        self.in_backward = True

    def end_backward(self, pins: Callable[[Residency], bool]) -> None:
        """Reshard all units but those whose forward runs, that are KEPT, or that ``pins`` selects.

        ``pins`` selects the units whose full parameters a following backward will read.
        """
        self.in_backward = False
        for unit in self.all():
            state, residency = self.states[unit], self.residencies[unit]
            state.end_backward()
            if state.active:
                # A backward inside a forward: the unit is needed until that ends.
                continue
            if residency.reason is not Reason.PREFETCHED and pins(residency):
                residency.pin()
                unit.show_sharded()
            elif residency.reason is not Reason.KEPT:
                self.reshard(unit)
        self.drop_parts()
        self._kept_versions = self._versions() if self._unsharded else {}

    def _versions(self) -> dict[Unit, list[int]]:
        """Counts of in-place changes to the parameters, by which kept full ones are checked."""
        return {unit: unit.versions() for unit in self.states}
