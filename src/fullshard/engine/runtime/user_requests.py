"""``unshard()`` and ``reshard()``: units that the user unshards, reshards, or wants at rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..comm.streams import HostStreams
from .autograd import in_backward
from .backward import Backward
from .policy import Policy
from .residency import Reason, Residency, UnshardedUnits
from .step_state import StepState
from .unit import State, Unit


class UserRequests:
    """The part of a schedule that carries out the user's requests."""

    _streams: HostStreams
    _policy: Policy
    _unsharded: UnshardedUnits
    _residencies: Mapping[Unit, Residency]
    _states: Mapping[Unit, StepState]
    _backward: Backward
    #: The event after which the next pass may all-gather, if the user named one.
    _stepped: Any
    root: Unit

    if TYPE_CHECKING:

        @property
        def is_idle(self) -> bool: ...
        def _note_capture(self) -> None: ...

    def rest(self, unit: Unit | None = None) -> None:
        """Bring one unit, or all, back to sharded between steps."""
        if not in_backward():
            self._backward.break_off()
        for other in [unit] if unit is not None else self._unsharded.all():
            self._unsharded.keep_changes_and_reshard(other)
        self._unsharded.drop_parts()
        self._streams.settle()
        # The next operation may all-gather, and has to wait for an optimizer step that may still
        # run on the compute stream.
        self._streams.gather_after_compute()

    def await_clean_up(self) -> None:
        """Wait, for half a second at most, until a backward that raised is cleaned up."""
        self._backward.await_clean_up()

    def wait_until_idle(self) -> bool:
        """True if no forward and no backward is running, once one that raised is cleaned up.

        May block for up to half a second, while another thread cleans up.
        """
        self.await_clean_up()
        return self.is_idle

    def unshard(self, unit: Unit) -> None:
        """Begin to all-gather a unit ahead of its use; inside a pass, this is a prefetch."""
        if unit.summoned:
            return
        if not self.wait_until_idle():
            if unit.state is State.SHARDED:
                versions = unit.take_replacements(self._policy.checks_for_changes)
                self._unsharded.prefetch(unit, full_precision=False, versions=versions)
            return
        self._backward.break_off()
        residency = self._residencies[unit]
        if unit.shows_full or residency.is_requested:
            return
        if residency.reason is Reason.AWAITS_BACKWARD:
            # Its parameters may have changed since.
            self._unsharded.reshard(unit)
        if self._streams.runs_ahead:
            self._note_capture()
        unit.write_back()
        unit.shards.begin_pass("unshard", unit.name)
        self._streams.gather_after_compute()
        self._unsharded.prefetch(unit, full_precision=False)
        residency.request(unit.versions())

    def gather_after(self, event: Any) -> None:
        """Let the next pass all-gather after ``event``, instead of after all earlier compute."""
        self._stepped = event

    def finish_unshard(self, unit: Unit) -> None:
        """Put the parameters that :meth:`unshard` all-gathers in place, between passes."""
        if self.is_idle and self._residencies[unit].is_requested and not unit.shows_full:
            unit.finish_unshard()
            unit.show_full(tracked=torch.is_grad_enabled())
            unit.note_full_versions()

    def reshard(self, unit: Unit) -> None:
        """Reshard a unit, and keep the changes that were made to its full parameters."""
        self.await_clean_up()
        state = self._states[unit]
        if unit.summoned or state.active or state.task is not None:
            raise RuntimeError(
                f"Unit {unit.name!r} is in use by a forward, a backward or "
                "summon_full_params: call reshard() after it"
            )
        unit.drop_parts()
        if unit in self._unsharded:
            self._unsharded.keep_changes_and_reshard(unit)
            if self.is_idle:
                self._streams.settle()

    def reduce_kept(self) -> None:
        """Reduce the gradients that backwards kept, of units that synchronize gradients again.

        Reshards what backwards left unsharded, unless it is to stay. To be called by all ranks,
        between passes; does nothing where nothing is kept.
        """
        if not self._backward.keeps_gradients:
            return
        unit = self.root
        unit.shards.begin_pass("reduce", unit.name)
        self._backward.reduce_kept()
        for other in self._unsharded.all():
            if not other.stays_between_passes:
                self._unsharded.keep_changes_and_reshard(other)
        self._streams.settle()
