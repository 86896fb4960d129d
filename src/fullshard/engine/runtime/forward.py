"""A forward of a root and its units: unsharding, prefetching and resharding them in order.

All units below a root share one schedule. It moves units through their states (``unit.py`` says
how) as their forwards begin and end, and as the user asks; ``backward.py`` does so from the first
output's gradient to the end of a backward. Both share the unsharded units, of which
``residency.py`` knows why each of them is unsharded.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..comm.streams import streams_for
from ..params.buffers import any_holds
from .autograd import graph_task, holds_reentrant_checkpoint, in_backward
from .backward import Backward
from .capturing import check_can_be_captured, tell_groups, tell_watchers, watching
from .outputs import Inputs, SideOutputs, entries, hook_entries, hook_handed_on
from .policy import AfterForward, policy_for
from .pytrees import replace_tensors, tensors_in
from .residency import Reason, UnshardedUnits
from .step_state import ForwardCall, StepState, tell_enclosing
from .unit import State, Unit
from .untraced import untraced
from .user_requests import UserRequests

if TYPE_CHECKING:
    from ..join.joining import Joining

#: Passes without a backward after which their order is no longer kept for prefetching.
_PASSES_KEPT = 64


class Schedule(UserRequests):
    """Drives the units below ``root``."""

    def __init__(self, root: Unit, units: Sequence[Unit]) -> None:
        self.root = root
        self.units = list(units)
        self._modules = {unit.module for unit in units}
        self._unsharded = UnshardedUnits(self.units)
        self._states = self._unsharded.states
        self._residencies = self._unsharded.residencies
        self._streams = streams_for(root.device)
        self._policy = policy_for(root.device.type)
        #: The forwards that a backward will come through, and their precision, in order.
        self._passed: list[tuple[Unit, bool]] = []
        self._backward = Backward(
            self.units, self._passed, self._unsharded, self._streams, self._policy
        )
        self._joining: Joining | None = None
        #: Whether the pass that runs, or ran last, is captured. Of these units: the streams, which
        #: know of the last pass on the device, serve those of other models as well.
        self._is_captured = False
        #: The event after which the next pass may all-gather; None: after all compute before it.
        self._stepped: Any = None
        #: How many forwards are running, one inside the other.
        self.depth = 0
        #: How many units each one but the first prefetches.
        self._units_ahead = self._policy.units_ahead(len(units), is_first=False, keeps_all=False)
        self._order: list[Unit] = []
        self._previous_order: list[Unit] = []
        #: How many passes have begun.
        self.passes = 0
        #: Units of several modules, some of which have yet to run in this pass.
        self._partly_run: set[Unit] = set()

    @property
    def is_idle(self) -> bool:
        """True if no forward and no backward is running."""
        return self.depth == 0 and not self._backward.is_running

    @property
    def last_order(self) -> list[Unit]:
        """The units in the order of the forward that runs, or of the last one."""
        return list(self._order)

    @property
    def has_run(self) -> bool:
        """True if a forward has ended."""
        return bool(self._previous_order) or (bool(self._order) and self.depth == 0)

    # -- forward ------------------------------------------------------------------------------

    @untraced
    def begin_forward(self, unit: Unit, full_precision: bool, inputs: Inputs) -> ForwardCall | None:
        """A unit's forward begins: put full parameters in place.

        :meth:`end_forward` follows, with what is returned, or :meth:`abandon`.
        """
        recomputes = graph_task() != -1
        if self.depth == 0 and not recomputes:
            self._backward.break_off()
            self._begin_pass(unit)
        self.depth += 1
        state, residency = self._states[unit], self._residencies[unit]
        state.active += 1
        if unit.summoned:
            unit.check_summoned()
            return None
        self._order.append(unit)
        if not unit.shows_full:
            self._take_over_changes(unit, recomputes)
        elif residency.is_requested:
            unit.keep_changes()
        if unit.pre_hooks:
            # They have just run, and may have changed the shards.
            self._streams.gather_after_compute()
        if residency.reason is Reason.PREFETCHED:
            # The prefetch was a guess; that all ranks run the unit has yet to be seen.
            unit.agree_to_run()
        self._unsharded.unshard(unit, full_precision)
        tracked = torch.is_grad_enabled()
        plan = unit.plan
        if plan.prefetches_in_training if tracked else plan.prefetches_in_evaluation:
            self._prefetch_forward(full_precision, tracked)
        if not tracked:
            unit.show_full(tracked=False)
            return None
        if recomputes:
            unit.show_full(tracked=True)
        else:
            if state.active == 1:
                state.birth = torch.autograd._get_sequence_nr()
                state.inputs = inputs
                (state.side_outputs or self._watch_side_outputs(unit)).watch()
            unit.show_full_for_forward()
        if unit.handles and (state.inputs_tell or unit.is_mixed):
            return self._ask_inputs(unit, inputs)
        return None

    def _take_over_changes(self, unit: Unit, recomputes: bool) -> None:
        """Take over what was done to the shards, on a host also since the unit was unsharded.

        A host prefetches without being asked. What was written by way of ``.data`` is not seen.
        """
        if recomputes and unit.parts is not None and unit.parts.held:
            # What the forward left is what it computes with again.
            return
        changed = unit.write_back()
        if unit.state is State.SHARDED or not self._policy.checks_for_changes or recomputes:
            return
        residency = self._residencies[unit]
        awaits = residency.reason is Reason.AWAITS_BACKWARD
        if changed or awaits or unit.was_changed_since(residency.versions):
            if residency.reason is Reason.PINNED:
                residency.mark_stale()
            else:
                self._unsharded.reshard(unit)

    @untraced
    def end_forward(
        self, unit: Unit, output: Any, call: ForwardCall | None, runs_again: bool = False
    ) -> Any:
        """A unit's forward has ended: take full parameters away again, as the strategy says.

        They stay in place if the unit ``runs_again`` in this pass: others of its modules follow.
        """
        state = self._states[unit]
        if not (state.active > 1 or state.task is not None or unit.summoned):
            output = self._leave_module(unit, state, output, call, runs_again)
        self.depth -= 1
        state.active -= 1
        if self.depth == 0:
            self._end_pass()
        return output

    def _leave_module(
        self,
        unit: Unit,
        state: StepState,
        output: Any,
        call: ForwardCall | None,
        runs_again: bool,
    ) -> Any:
        outputs = [output] if isinstance(output, torch.Tensor) else list(tensors_in(output))
        buffers = unit.full_buffers
        if buffers:
            for tensor in outputs:
                if any_holds(buffers, tensor):
                    output = replace_tensors(output, lambda t: t.clone() if unit.lends(t) else t)
                    outputs = list(tensors_in(output))
                    break
        inputs, state.inputs = state.inputs, None
        birth, tracks = state.birth, torch.is_grad_enabled()
        tracked = entries(outputs, inputs, birth)
        if tracks:
            side_outputs = state.side_outputs or self._watch_side_outputs(unit)
            aside = side_outputs.made_since(birth, inputs)
            if aside:
                tracked += aside
                tell_enclosing(self._states, unit, aside)
        if tracked:
            hook = functools.partial(
                self._backward.on_output_gradient, unit, unit.full_precision, call
            )
            hook_entries(tracked, hook, birth, is_outermost=self.depth == 1)
            if state.inputs_tell is None:
                state.learn_who_tells(holds_reentrant_checkpoint(tracked, birth))
            passed = (unit, unit.full_precision)
            if not self._passed or self._passed[-1] != passed:
                self._passed.append(passed)
        if graph_task() != -1:
            return output
        if self.depth == 1:
            hook_handed_on(outputs)
        is_pinned = self._residencies[unit].reason is Reason.PINNED
        if runs_again and self.depth > 1 and not is_pinned:
            self._partly_run.add(unit)
            return output
        self._partly_run.discard(unit)
        # A module that hides its outputs from us may still need its parameters in backward.
        hidden = tracks and not outputs and unit.has_trainable
        if is_pinned:
            unit.show_sharded()
        elif not (tracked or hidden):
            self._unsharded.reshard(unit)
        else:
            self._leave_to_backward(unit, hidden)
        return output

    def _leave_to_backward(self, unit: Unit, hidden: bool) -> None:
        """Reshard, hide or show a unit through which a backward will come, as its plan says.

        One whose outputs are ``hidden`` is not resharded: nobody could tell when backward needs it.
        """
        if unit.parts is not None and unit.parts.are_shown and not hidden:
            self._unsharded.reshard_to_parts(unit)
            return
        plan, frees = unit.plan, unit.options.frees_after_forward
        holds_copy = not frees and unit.holds_a_copy
        begins = self.depth == 1 or hidden
        if not begins and plan.begins_backward_with_left:
            begins = self._forwards_left(unit) in plan.begins_backward_with_left
        decision = plan.after_forward_table[begins, holds_copy]
        if decision is AfterForward.RESHARD and unit.parts is not None:
            self._unsharded.reshard_to_parts(unit)
        elif decision is AfterForward.RESHARD:
            self._unsharded.reshard(unit)
        elif decision is AfterForward.SHOW:
            unit.note_full_versions()
        else:
            unit.show_sharded()
            if not hidden and (frees or holds_copy):
                versions = unit.versions() if self._policy.checks_for_changes else None
                self._residencies[unit].leave_to_backward(versions)

    def _forwards_left(self, unit: Unit) -> int | None:
        """The forwards that remain, that of ``unit`` included, if the pass repeats the last one.

        None if it does not, if another unit ran inside of ``unit``, or if ``unit`` will run again.
        """
        position, previous = len(self._order) - 1, self._previous_order
        if self._order[position] is not unit or position >= len(previous):
            return None
        if previous[position] is not unit or unit in previous[position + 1 :]:
            return None
        return len(previous) - position

    @untraced
    def abandon(self, unit: Unit, depth: int) -> None:
        """A unit's forward raised: leave nothing behind.

        ``depth`` is how many forwards were running before it; it may not have begun itself.
        """
        if self.depth == depth:
            return
        if not in_backward():
            # In a backward, a checkpoint raises on purpose when it has recomputed enough; if the
            # backward itself fails, it loses the capture.
            self._streams.lose_capture()
        state = self._states[unit]
        state.inputs = None
        if state.side_outputs is not None:
            state.side_outputs.stop_watching()
        if state.active == 1 and not in_backward() and not unit.summoned:
            # If the outermost forward raised, no backward of this pass follows.
            for other in [unit] if self.depth > 1 else [unit, *self._unsharded.all()]:
                self._unsharded.reshard(other)
            if self.depth == 1:
                self._unsharded.drop_parts()
        self.depth -= 1
        state.active -= 1
        if self.depth == 0:
            self._end_pass()

    def _end_pass(self) -> None:
        """The outermost forward is over, one way or the other."""
        if not in_backward():
            for unit in self._partly_run:
                self._unsharded.reshard(unit)
            self._partly_run.clear()
            self._unsharded.reshard_unused()
            self._streams.end_pass()
            if self._streams.runs_ahead and torch.is_grad_enabled():
                self._unsharded.end_forward()
            if self._backward.offloads and not torch.is_grad_enabled():
                # No backward follows whose end would wait for the all-gathers. So the host waits
                # here, before the user can change offloaded shards that are still being read.
                self._streams.host_after_gathers()

    def _watch_side_outputs(self, unit: Unit) -> SideOutputs:
        return self._states[unit].keep_side_outputs(SideOutputs(unit, self._modules))

    def join(self, joining: Joining | None) -> None:
        """Have ranks that run out of data told of what is done, or no longer."""
        self._joining = joining
        self._backward.follow(joining)
        for unit in self.units:
            unit.follow(joining)

    def _note_capture(self) -> None:
        """A pass begins that a graph may capture, as the pass before it may have been."""
        self._streams.begin_pass()
        was_captured, is_captured = self._is_captured, self._streams.capturing
        if is_captured:
            check_can_be_captured(self.units, self._residencies, is_first=not was_captured)
        if is_captured is not was_captured:
            self._is_captured = is_captured
            tell_groups(self.units, is_captured)

    def _begin_pass(self, unit: Unit) -> None:
        if self._joining is not None:
            self._joining.begin_pass()
        elif unit.shards.refuse is not None:
            unit.shards.refuse("pass of another model", unit.name)
        if self._streams.runs_ahead:
            self._note_capture()
        if watching:
            tell_watchers(self)
        unit.begin_pass()
        self.passes += 1
        streams = self._streams
        self._unsharded.begin_pass(leaves_nothing=streams.capturing)
        event, self._stepped = self._stepped, None
        if event is None or streams.capturing:
            streams.gather_after_compute()
        else:
            streams.gather_after(event)
        self._previous_order, self._order = self._order, []
        is_long = len(self._passed) > _PASSES_KEPT * len(self.units)
        if self._backward.has_run_since_pass() or is_long:
            self._passed.clear()

    def _prefetch_forward(self, full_precision: bool, trains: bool) -> None:
        """All-gather the units that come next, if the pass repeats the last one."""
        position, previous = len(self._order) - 1, self._previous_order
        left = len(previous) - position - 1
        if left <= 0 or previous[position] is not self._order[position]:
            return
        ahead = self._units_ahead
        if position == 0:
            keeps_all = trains and all(u.options.keeps_full_after_forward for u in previous)
            ahead = self._policy.units_ahead(left, is_first=True, keeps_all=keeps_all)
        for following in previous[position + 1 : position + 1 + ahead]:
            if self._may_be_changed(following):
                break
            if following.state is State.SHARDED:
                versions = following.take_replacements(self._policy.checks_for_changes)
                self._unsharded.prefetch(following, full_precision, versions)

    def _may_be_changed(self, unit: Unit) -> bool:
        """True if something may change the shards of ``unit`` before it runs, unnoticed.

        A forward pre-hook of the unit may. In a model with trainable units, so may the model's own
        forward, if the frozen parameters are a moving average of trained ones.
        """
        if unit.pre_hooks:
            return True
        if unit.options.forward_prefetch or unit.has_trainable:
            return False
        return any(other.has_trainable for other in self.units)

    def _ask_inputs(self, unit: Unit, inputs: Any) -> ForwardCall | None:
        """Have the inputs' gradients tell when the unit's backward is over.

        Frozen parameters are needed until the inputs' gradients are there, which may be after
        the trainable ones' gradients are, and a frozen unit has no others.
        """
        state = self._states[unit]
        tensors = [t for t in tensors_in(inputs) if t.requires_grad]
        if not tensors:
            state.hold_if_nobody_tells()
            return ForwardCall(state.birth)
        call = ForwardCall()
        # The outputs' hooks hold the call, and so it lasts as long as the forward's graph.
        hook = functools.partial(self._backward.on_input_gradients, unit, weakref.ref(call))
        call.ask(tensors, hook)
        return call
