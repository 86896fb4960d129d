"""A backward of a root and its units: unsharding them, reducing their gradients, up to its end.

Autograd tells a backward that a gradient reached a unit's output, that all of a unit's gradients
are there, and that autograd has finished or failed. On a CPU a reduce begins at the next of these
events, not at once: by then autograd has let go of the full gradients, and the reduce's own memory
takes their place.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..comm.streams import HostStreams
from ..grads.gradients import Gradients
from ..grads.reduction import Reduction, settle_all
from ..grads.user_hooks import run_hooks_of_all
from .autograd import (
    BackwardEnd,
    graph_task,
    in_backward,
    refuse_compiled_backward,
    wait_while,
)
from .made_graphs import MadeGraph, PendingGraphs
from .policy import Policy
from .residency import Reason, Residency, UnshardedUnits
from .step_state import ForwardCall
from .unit import State, Unit
from .untraced import untraced

if TYPE_CHECKING:
    from ..join.joining import Joining


class Backward:
    """Drives the units below a root from the outputs' gradients to the parameters'."""

    def __init__(
        self,
        units: Sequence[Unit],
        passed: Sequence[tuple[Unit, bool]],
        unsharded: UnshardedUnits,
        streams: HostStreams,
        policy: Policy,
    ) -> None:
        self._unsharded = unsharded
        self._states = unsharded.states
        self._residencies = unsharded.residencies
        self._streams = streams
        self._policy = policy
        #: Whether shards and gradients rest on the host, away from where the units compute.
        self.offloads = any(unit.offloads for unit in units)
        #: The number of the last backward that began. Hooks and clean-ups compare it with the
        #: number of the backward that they belong to.
        self._number = 0
        self._creates_graph = False
        #: True if the running backward keeps its graph for another one (``retain_graph``).
        self._keeps_graph = False
        #: The graph that the running backward creates (``create_graph``), and others.
        self._made: MadeGraph | None = None
        self._pending_graphs = PendingGraphs()
        self._since_pass = False
        self._breaking_off = threading.RLock()
        #: The forwards that a backward will come through; last come, first reached.
        self._passed = passed
        self._cursor = 0
        #: The units that were prefetched on a host and are not waited for yet.
        self._ahead: list[Unit] = []
        #: The unit whose gradients are staged and, on a host, not yet reduced.
        self._pending: Unit | None = None
        #: The units whose gradients are reduced behind what is computed, and not yet taken in.
        self._in_flight: deque[Unit] = deque()
        #: Tells ranks that have run out of data what is done; inside of ``Join``.
        self._joining: Joining | None = None
        self._reduced: dict[Unit, None] = {}
        self._with_local_gradients: dict[Unit, None] = {}
        for unit in units:
            unit.send_gradients_to(self._on_gradients)

    @property
    def is_running(self) -> bool:
        return self._unsharded.in_backward

    # -- what forward tells -------------------------------------------------------------------

    def has_run_since_pass(self) -> bool:
        """True if there was a backward since this was last asked, when a pass begins."""
        since_pass, self._since_pass = self._since_pass, False
        return since_pass

    def follow(self, joining: Joining | None) -> None:
        """Send what is done to the ranks that have run out of data; None: send it no longer."""
        self._joining = joining

    # -- what autograd tells ------------------------------------------------------------------

    @untraced
    def on_output_gradient(
        self, unit: Unit, full_precision: bool, call: ForwardCall | None, found: Any
    ) -> None:
        """A gradient reached an output of the unit: it needs its parameters."""
        if unit.summoned:
            unit.refuse_backward()
        if not self._unsharded.in_backward:
            self._begin()
        if self._made is not None:
            self._pending_graphs.watch(self._made, found)
        if not self._policy.reduces_at_once and (self._pending or self._in_flight):
            with torch.no_grad():
                self._carry_out_reduce()
        state = self._states[unit]
        if call is not None and call.reached_in != self._number:
            call.reached_in = self._number
            # Its inputs will tell when it is over; or, after another forward, nobody will.
            if call.birth != state.birth:
                state.open_calls += 1
        if state.task is not None and unit.shows_full and unit.full_precision == full_precision:
            return
        state.task = graph_task()
        residency = self._residencies[unit]
        if residency.requested_versions is not None:
            # Shown by the user's own wish, maybe as plain tensors: that is no change.
            unit.show_sharded()
        is_shown = unit.shows_full and unit.state is State.UNSHARDED
        if is_shown and unit.full_precision == full_precision:
            unit.check_unchanged()
        if residency.reason is Reason.AWAITS_BACKWARD and unit.was_changed_since(
            residency.versions
        ):
            self._unsharded.reshard(unit)
        if unit.unshards_in_backward:
            self._unsharded.unshard(unit, full_precision)
            unit.show_full(tracked=True)
        if unit.plan.prefetches_before_backward:
            self._prefetch(unit)

    @untraced
    def on_input_gradients(self, unit: Unit, of_call: weakref.ref[ForwardCall], _: Any) -> None:
        """The gradients of a forward's inputs are there: maybe nothing of it is left to compute.

        Parameters that were used with detached inputs come after them, if they are not there yet.
        """
        call = of_call()
        if call is not None and call.reached_in == self._number and self.is_running:
            call.reached_in = -1
            state = self._states[unit]
            state.open_calls -= 1
            if state.open_calls == 0 and (state.received or not unit.has_trainable):
                self._close(unit)

    def _on_gradients(self, unit: Unit, gradients: Sequence[Gradients]) -> None:
        if not self._unsharded.in_backward:
            self._begin()
        if not torch.is_grad_enabled():
            self._take_gradients(unit, gradients)
            return
        with torch.no_grad():
            self._take_gradients(unit, gradients)

    def _begin(self) -> None:
        refuse_compiled_backward()
        if self._streams.runs_ahead:
            self._streams.begin_backward()
            if self._unsharded.changed_since_forward():
                self._streams.gather_after_compute()
        self._unsharded.begin_backward()
        self._since_pass = True
        self._creates_graph = torch.is_grad_enabled()
        self._keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        self._made = MadeGraph() if self._creates_graph else None
        self._number += 1
        self._cursor = len(self._passed)
        BackwardEnd(self._finish, functools.partial(self._break_off, self._number))
        if self._joining is not None:
            self._joining.begin_backward()

    # -- in the middle ------------------------------------------------------------------------

    def _take_gradients(self, unit: Unit, gradients: Sequence[Gradients]) -> None:
        if self._pending or self._in_flight:
            self._carry_out_reduce()
        while unit in self._in_flight:
            # A second part of the unit's gradients: its reduce buffer must be free again.
            self._take_in()
        state = self._states[unit]
        state.received = True
        if state.task is not None and state.task != graph_task():
            # A reentrant checkpoint inside the unit: a part of its backward, in a graph of its
            # own. More parts may follow, and they need the parameters.
            state.inputs_tell = True
        elif state.open_calls == 0 and not state.held:
            self._close(unit)
        if unit.syncs_gradients:
            self._with_local_gradients.pop(unit, None)
            # Noted before staging: if staging raises, what was staged so far is dropped.
            self._reduced[unit] = None
            unit.reduction.stage(gradients)
            self._pending = unit
            if self._policy.reduces_at_once:
                unit.reduction.give_out()
                if len(self._reduced) == 1:
                    # What the other units saved in forward is all there yet: memory is scarcest.
                    unit.reduction.let_go()
        else:
            unit.reduction.keep_local(gradients)
            self._with_local_gradients[unit] = None
        if unit.plan.prefetches_after_backward:
            self._prefetch(unit)
        if self._ahead:
            self._await_prefetches()

    def _await_prefetches(self) -> None:
        """Wait for the prefetched units before autograd can reach them.

        Otherwise it would compute with parameters that have not arrived yet: see
        ``Policy.waits_for_prefetch``.
        """
        ahead, self._ahead = self._ahead, []
        for unit in ahead:
            unit.finish_unshard()

    def _close(self, unit: Unit) -> None:
        """The unit's backward is over: its parameters are not needed any more."""
        state = self._states[unit]
        state.close()
        if state.active:
            # A backward inside its own forward, which still computes with the full parameters.
            return
        residency = self._residencies[unit]
        if (self._creates_graph or residency.reason is Reason.PINNED) and self._pins(residency):
            # Gradients that are differentiated again reach the parameters by ways of their own.
            residency.pin()
            unit.show_sharded()
        elif unit.stays_between_passes and not self._streams.capturing:
            residency.keep()
            unit.show_sharded()
        else:
            self._unsharded.reshard(unit)

    def _pins(self, residency: Residency) -> bool:
        """True if a backward that follows needs the full parameters in the memory they are in."""
        if self._creates_graph or residency.reason is not Reason.PINNED:
            return self._creates_graph
        return self._keeps_graph or bool(self._pending_graphs)

    def _carry_out_reduce(self) -> None:
        """On a host, reduce the gradients that are staged; on an accelerator, complete that.

        An accelerator was given the reduce when the gradients were staged, and had the next unit's
        whole backward to overlap it with.
        """
        unit, self._pending = self._pending, None
        at_once = self._policy.reduces_at_once
        allowed = (unit or self._in_flight[0]).reduction.max_in_flight
        if unit is not None and at_once:
            # It is being reduced already.
            self._in_flight.append(unit)
        while len(self._in_flight) >= allowed:
            self._take_in()
        if unit is None or at_once:
            return
        if unit.reduction.may_run_behind_compute:
            self._in_flight.append(unit)
            unit.reduction.start()
        else:
            unit.reduction.reduce()

    def _take_in(self) -> None:
        """Complete the oldest reduce in flight."""
        unit = self._in_flight.popleft()
        if self._policy.reduces_at_once:
            unit.reduction.take_in()
        else:
            unit.reduction.finish()

    def _prefetch(self, unit: Unit) -> None:
        """All-gather the units that ran before ``unit`` in forward: they are next in backward.

        If the user has chosen units to prefetch, all-gather those instead.
        """
        cursor = min(self._cursor, len(self._passed)) - 1
        while cursor >= 0 and self._passed[cursor][0] is not unit:
            cursor -= 1
        if cursor >= 0:
            self._cursor = cursor
        is_first = cursor == len(self._passed) - 1
        if unit.prefetch_in_backward is not None:
            for chosen in unit.prefetch_in_backward:
                self._prefetch_one(chosen, False)
        else:
            policy = self._policy
            for position in policy.positions_ahead_in_backward(cursor):
                following, full_precision = self._passed[position]
                if policy.may_prefetch_in_backward(following.options, is_first=is_first):
                    self._prefetch_one(following, full_precision)
        if is_first and self._ahead:
            # At the beginning of backward these units are mostly still unsharded since forward, so
            # that there is nothing to wait for.
            self._await_prefetches()

    def _prefetch_one(self, unit: Unit, full_precision: bool) -> None:
        if not unit.unshards_in_backward:
            return
        self._unsharded.prefetch(unit, full_precision)
        if self._policy.waits_for_prefetch:
            self._ahead.append(unit)

    # -- the end ------------------------------------------------------------------------------

    def _finish(self) -> None:
        with torch.no_grad():
            reduced = self._finish_reduces()
        self._end()
        run_hooks_of_all(reduced)
        if self._joining is not None:
            self._joining.note_gradients()

    @property
    def keeps_gradients(self) -> bool:
        """True if units that synchronize gradients have some that are not reduced."""
        return any(unit.syncs_gradients for unit in self._with_local_gradients)

    def reduce_kept(self) -> None:
        """Reduce, after a backward, what it and others before it kept."""
        with torch.no_grad():
            reduced = self._finish_reduces()
        run_hooks_of_all(reduced)

    def _finish_reduces(self) -> list[Reduction]:
        """Have all gradients where the optimizer looks; returns what reduced them."""
        if self._pending:
            self._carry_out_reduce()
        while self._in_flight:
            self._take_in()
        for unit in [*self._with_local_gradients]:
            if unit.syncs_gradients:
                self._reduced[unit] = None
                unit.reduction.stage_kept()
                unit.reduction.reduce()
                del self._with_local_gradients[unit]
        if self._joining is not None:
            self._joining.tell("finish")
        self._streams.compute_after_reduces()
        reduced = [unit.reduction for unit in self._reduced]
        if self.offloads:
            self._streams.host_after_reduces()
        settle_all(reduced)
        self._reduced = {}
        return reduced

    def break_off(self) -> None:
        """Clean up after the last backward, if it raised and nobody has yet."""
        if self._unsharded.in_backward:
            self._break_off(self._number)

    def await_clean_up(self) -> None:
        """Return when a backward that raised is cleaned up: see ``_break_off``.

        A backward that another thread still runs looks the same as one that raised, so the wait
        ends after half a second.
        """
        if in_backward():
            return
        wait_while(lambda: self.is_running)
        # Until nobody is in the middle of it.
        with self._breaking_off:
            pass

    def _break_off(self, number: int) -> None:
        """Clean up after one backward.

        On a CPU autograd tells at once. An accelerator's backward thread may tell a moment after
        the exception has reached the user, who may be here before it.
        """
        with self._breaking_off:
            if not self.is_running or number != self._number:
                return
            self._streams.lose_capture()
            # What is dropped may still be read by a reduce.
            self._streams.compute_after_reduces()
            for unit in self._reduced:
                unit.reduction.drop()
            self._pending = None
            self._in_flight.clear()
            self._reduced.clear()
            self._end()

    def _end(self) -> None:
        self._made = None
        self._ahead.clear()
        self._unsharded.end_backward(self._pins)
        self._streams.end_pass()
