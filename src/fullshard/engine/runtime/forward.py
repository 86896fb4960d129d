"""When things happen: order, prefetch, and what is freed.

One schedule is shared by all units below a root. It moves units through their states (``unit.py``
says how) as their forwards begin and end, and as the user asks; ``backward.py`` does so from the
first output's gradient to the end of a backward. Both share the unsharded units, of which
``residency.py`` knows why each of them is unsharded.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..comm.streams import streams_for
from .autograd import holds_reentrant_checkpoint, in_backward, is_handed_out
from .backward import Backward
from .policy import AfterForward, policy_for
from .pytrees import hold_containers, list_tensors, replace_tensors, tensors_in
from .residency import Reason, UnshardedUnits
from .side_outputs import SideOutputs
from .step_state import ForwardCall
from .unit import State, Unit
from .untraced import untraced

if TYPE_CHECKING:
    from ..join.joining import Joining

#: What a module is called with, by position and by name.
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class Schedule:
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
        self._backward = Backward(self.units, self._unsharded, self._streams, self._policy)
        self._joining: Joining | None = None
        self._depth = 0
        self._order: list[Unit] = []
        self._previous_order: list[Unit] = []

    @property
    def is_idle(self) -> bool:
        """Whether no forward and no backward is running."""
        return self._depth == 0 and not self._backward.is_running

    @property
    def last_order(self) -> list[Unit]:
        """The units in the order of the forward that runs, or of the last one."""
        return list(self._order)

    @property
    def has_run(self) -> bool:
        """Whether a forward has ended."""
        return bool(self._previous_order) or (bool(self._order) and self._depth == 0)

    def rest(self, unit: Unit | None = None) -> None:
        """Bring one unit, or all, back to sharded between steps."""
        if not in_backward():
            self._backward.break_off()
        for other in [unit] if unit is not None else self._unsharded.all():
            self._unsharded.keep_changes_and_reshard(other)
        self._streams.settle()
        # What comes next may gather, and an optimizer may have just given compute its step.
        self._streams.gather_after_compute()

    def await_clean_up(self) -> None:
        """Return when what a backward that raised has left is cleaned up."""
        self._backward.await_clean_up()

    def wait_until_idle(self) -> bool:
        """Whether no forward and no backward is running, once one that raised is cleaned up.

        May block for up to half a second, while another thread cleans up.
        """
        self.await_clean_up()
        return self.is_idle

    # -- on the user's word -------------------------------------------------------------------

    def unshard(self, unit: Unit) -> None:
        """Begin to gather a unit ahead of its use; inside a pass, as prefetching would."""
        if unit.summoned:
            return
        if not self.wait_until_idle():
            self._prefetch(unit, exact=False)
            return
        self._backward.break_off()
        residency = self._residencies[unit]
        if unit.shows_full or residency.is_requested:
            return
        if residency.reason is Reason.AWAITS_BACKWARD:
            # Its parameters may have changed since.
            self._unsharded.reshard(unit)
        unit.write_back()
        unit.shards.begin_pass("unshard", unit.name)
        self._streams.gather_after_compute()
        self._unsharded.prefetch(unit, exact=False)
        residency.request(unit.versions())

    def finish_unshard(self, unit: Unit) -> None:
        """Show what :meth:`unshard` gathers, between passes."""
        if self.is_idle and self._residencies[unit].is_requested and not unit.shows_full:
            unit.finish_gather()
            unit.show_full(tracked=torch.is_grad_enabled())
            unit.remember_values()

    def reshard(self, unit: Unit) -> None:
        """Give a unit's full parameters back; what was done to them since is kept."""
        self.await_clean_up()
        state = self._states[unit]
        if unit.summoned or state.active or state.task is not None:
            raise RuntimeError(
                f"Unit {unit.name!r} computes with its full parameters now, or summon_full_params "
                "shows them: reshard() it afterwards"
            )
        if unit in self._unsharded:
            self._unsharded.keep_changes_and_reshard(unit)
            if self.is_idle:
                self._streams.settle()

    # -- forward ------------------------------------------------------------------------------

    @untraced
    def enter(self, unit: Unit) -> None:
        """A unit's forward begins. Always paired with :meth:`leave`."""
        if self._depth == 0 and not in_backward():
            self._backward.break_off()
            self._begin_pass(unit)
        self._depth += 1
        self._states[unit].active += 1

    def before_module(self, unit: Unit, exact: bool, inputs: Inputs) -> ForwardCall | None:
        """Put full parameters in place."""
        if unit.summoned:
            self._check_summoned(unit)
            return None
        state, residency = self._states[unit], self._residencies[unit]
        self._order.append(unit)
        if not unit.shows_full:
            self._take_over_changes(unit)
        elif residency.is_requested:
            unit.keep_changes()
        if unit.pre_hooks:
            # They have just run, and may have changed the shards.
            self._streams.gather_after_compute()
        if residency.reason is Reason.PREFETCHED:
            # Its gather was a guess; that all ranks run the unit has yet to be seen.
            unit.agree_to_run()
        self._unsharded.unshard(unit, exact)
        tracked = torch.is_grad_enabled()
        plan = unit.plan
        if plan.prefetches_in_training if tracked else plan.prefetches_in_evaluation:
            self._prefetch_forward(exact, tracked)
        unit.show_full(tracked)
        if tracked and not in_backward():
            if state.active == 1:
                state.birth = torch.autograd._get_sequence_nr()
                state.inputs = inputs
                self._side_outputs(unit).watch()
            unit.count_as_run_now()
        if tracked and unit.handles and (state.inputs_tell or unit.is_mixed):
            return self._ask_inputs(unit, inputs)
        return None

    def _take_over_changes(self, unit: Unit) -> None:
        """Take over what was done to the shards, on a host also since the unit was gathered.

        It gathers ahead without being asked. Not seen is what was written by way of ``.data``.
        """
        residency = self._residencies[unit]
        changed = unit.write_back()
        if unit.state is State.SHARDED or not self._policy.checks_for_changes or in_backward():
            return
        awaits = residency.reason is Reason.AWAITS_BACKWARD
        if changed or awaits or self._unsharded.was_changed(unit):
            if residency.reason is Reason.PINNED:
                residency.is_stale = True
            else:
                self._unsharded.reshard(unit)

    def after_module(self, unit: Unit, output: Any, call: ForwardCall | None) -> Any:
        """Take full parameters away again, as the strategy says."""
        state = self._states[unit]
        if state.active > 1 or state.task is not None or unit.summoned:
            return output
        outputs = list_tensors(output)
        if unit.handles and any(unit.lends(tensor) for tensor in outputs):
            output = replace_tensors(output, lambda t: t.clone() if unit.lends(t) else t)
            outputs = list_tensors(output)
        inputs, state.inputs = state.inputs, None
        tracked = _entries(outputs, inputs, state.birth)
        if torch.is_grad_enabled():
            filled = inputs if inputs is not None and hold_containers(*inputs) else None
            aside = self._side_outputs(unit).made_since(state.birth, filled)
            if aside:
                tracked += aside
                self._tell_enclosing(unit, aside)
        if tracked:
            hook = functools.partial(self._backward.on_output_gradient, unit, unit.exact, call)
            self._hook_outputs(tracked, hook, state.birth)
            if state.inputs_tell is None:
                state.inputs_tell = holds_reentrant_checkpoint(tracked, state.birth)
                state.held = state.inputs_tell
            self._backward.expect(unit, unit.exact)
        if in_backward():
            return output
        if self._depth == 1:
            _hook_handed_on(outputs)
        # A module that hides its outputs from us may still need its parameters in backward.
        hidden = not outputs and torch.is_grad_enabled() and unit.has_trainable
        if self._residencies[unit].reason is Reason.PINNED:
            unit.show_sharded()
        elif not (tracked or hidden):
            self._unsharded.reshard(unit)
        else:
            self._leave_to_backward(unit, hidden)
        return output

    def _leave_to_backward(self, unit: Unit, hidden: bool) -> None:
        """Reshard, hide or show a unit through which a backward will come, as its plan says.

        One whose outputs are ``hidden`` is not freed: nobody could tell when backward needs it.
        """
        plan, frees = unit.plan, unit.options.frees_after_forward
        holds_copy = not frees and unit.holds_a_copy
        decision = plan.after_forward(
            is_outermost=self._depth == 1 or hidden,
            forwards_left=self._forwards_left(unit) if plan.begins_backward_among else None,
            holds_copy=holds_copy,
        )
        if decision is AfterForward.RESHARD:
            self._unsharded.reshard(unit)
        elif decision is AfterForward.SHOW:
            unit.remember_values()
        else:
            unit.show_sharded()
            if not hidden and (frees or holds_copy):
                versions = unit.versions() if self._policy.checks_for_changes else None
                self._residencies[unit].leave_to_backward(versions)

    def _forwards_left(self, unit: Unit) -> int | None:
        """How many forwards remain, this one included, if the pass repeats the last one.

        None where it does not, where another unit ran inside of this one, and where this one will
        run again.
        """
        position, previous = len(self._order) - 1, self._previous_order
        left = len(previous) - position
        if self._order[position] is not unit or not 0 < left <= unit.plan.begins_backward_among:
            return None
        runs_last = previous[position] is unit and unit not in previous[position + 1 :]
        return left if runs_last else None

    def _hook_outputs(
        self, outputs: Sequence[torch.Tensor], hook: Callable[[Any], None], birth: int
    ) -> None:
        """Have ``hook`` called when a gradient reaches one of ``outputs``.

        A following unit may have hooked the same tensor as its input, to be closed before this
        one is gathered: hooks of a tensor's node run after those of the tensor. Only the
        outermost unit hooks tensors: its hook starts the backward, before any hook of the user.

        A view that is changed in place gets another node, by which gradients come to its base's.
        """
        nodes: dict[Any, None] = {}
        for tensor in outputs:
            if self._depth == 1:
                tensor.register_hook(hook)
            else:
                nodes[tensor.grad_fn] = None
            base = tensor._base
            if base is not None and _leads_into(base, birth):
                nodes[base.grad_fn] = None
        for node in nodes:
            node.register_prehook(hook)

    def abandon(self, unit: Unit) -> None:
        """A unit's forward raised: leave nothing behind."""
        state = self._states[unit]
        state.inputs = None
        if state.side_outputs is not None:
            state.side_outputs.shown = None
        if state.active == 1 and not in_backward() and not unit.summoned:
            # From the outermost one, nothing of this pass is left to wait for a backward.
            for other in [unit] if self._depth > 1 else [unit, *self._unsharded.all()]:
                self._unsharded.reshard(other)

    @untraced
    def leave(self, unit: Unit) -> None:
        """A unit's forward is over, one way or the other."""
        self._depth -= 1
        self._states[unit].active -= 1
        if self._depth == 0 and not in_backward():
            self._unsharded.reshard_unused()
            self._streams.settle()
            if self._backward.offloads and not torch.is_grad_enabled():
                # No backward follows that waits: the user may change what is still being read.
                self._streams.host_after_gathers()

    def _check_summoned(self, unit: Unit) -> None:
        if torch.is_grad_enabled() and unit.has_trainable:
            raise RuntimeError(
                f"Forward of unit {unit.name!r} inside summon_full_params would leave its "
                "gradients unreduced; run it under torch.no_grad(), or outside of the context"
            )

    def _side_outputs(self, unit: Unit) -> SideOutputs:
        state = self._states[unit]
        if state.side_outputs is None:
            state.side_outputs = SideOutputs(unit, self._modules)
        return state.side_outputs

    def _tell_enclosing(self, unit: Unit, aside: list[torch.Tensor]) -> None:
        """Let the unit around ``unit`` know by which tensors autograd may enter both of them."""
        others = (p for other, p in self._states.items() if other is not unit and p.active)
        enclosing = max(others, key=lambda state: state.birth, default=None)
        if enclosing is not None and enclosing.side_outputs is not None:
            enclosing.side_outputs.note(aside)

    def join(self, joining: Joining | None) -> None:
        """Have ranks that run out of data told of what is done, or no longer."""
        self._joining = self._backward.joining = joining
        for unit in self.units:
            unit.joining = joining

    def _begin_pass(self, unit: Unit) -> None:
        if self._joining is not None:
            self._joining.begin_pass()
        elif unit.shards.refuse is not None:
            unit.shards.refuse("pass of another model", unit.name)
        unit.begin_pass()
        self._unsharded.begin_pass()
        self._streams.gather_after_compute()
        self._previous_order, self._order = self._order, []
        self._backward.begin_pass()

    def _prefetch_forward(self, exact: bool, trains: bool) -> None:
        """All-gather the units that come next, if the pass repeats the last one."""
        position, previous = len(self._order) - 1, self._previous_order
        left = len(previous) - position - 1
        if left <= 0 or previous[position] is not self._order[position]:
            return
        is_first = position == 0
        ahead = self._policy.units_ahead(
            left, is_first=is_first, keeps_all=is_first and trains and self._keeps_all(previous)
        )
        for following in previous[position + 1 : position + 1 + ahead]:
            if self._may_be_changed(following):
                break
            self._prefetch(following, exact)

    def _may_be_changed(self, unit: Unit) -> bool:
        """Whether something may change the shards of ``unit`` before it runs, unnoticed.

        A hook that runs before its forward may. So may the model itself where it trains, in the
        middle of forward, if they are an average of trained parameters, which is frozen.
        """
        if unit.pre_hooks:
            return True
        asked_for = unit.options.forward_prefetch
        return not (asked_for or unit.has_trainable) and any(u.has_trainable for u in self.units)

    def _keeps_all(self, units: Sequence[Unit]) -> bool:
        return all(unit.options.keeps_full_after_forward for unit in units)

    def _prefetch(self, unit: Unit, exact: bool) -> None:
        """Begin to gather a unit for a forward, with what the user replaced since its last one."""
        if unit.state is State.SHARDED:
            unit.write_back()
            self._unsharded.prefetch(unit, exact)
            if self._policy.checks_for_changes:
                self._residencies[unit].versions = unit.versions()

    def _ask_inputs(self, unit: Unit, inputs: Any) -> ForwardCall | None:
        """Have the inputs' gradients tell when the unit's backward is over.

        Frozen parameters are needed until the inputs' gradients are there, which may be after
        the trainable ones' gradients are, and a frozen unit has no others.
        """
        tensors = [t for t in tensors_in(inputs) if t.requires_grad]
        if not tensors:
            self._states[unit].held = bool(self._states[unit].inputs_tell)
            return None
        call = ForwardCall()
        # The outputs' hooks hold the call, and so it lasts as long as the forward's graph.
        hook = functools.partial(self._backward.on_input_gradients, unit, weakref.ref(call))
        if len(tensors) == 1:
            # A view that was changed in place gets its node when it is asked for one; without,
            # torch 2.13 ends the process.
            _ = tensors[0].grad_fn
            call.asking = tensors[0].register_hook(hook)
        else:
            call.asking = torch.autograd.graph.register_multi_grad_hook(tensors, hook)
        return call


def _entries(
    outputs: Sequence[torch.Tensor], inputs: Inputs | None, birth: int
) -> list[torch.Tensor]:
    """Those of a forward's outputs by which gradients come into what it computed.

    They do not by leaves and parameters, nor by inputs that were handed on, whose nodes are older
    than the forward (``birth``): to gather the unit for those would be in vain, and late.
    """
    tracked = [t for t in outputs if t.grad_fn is not None and not is_handed_out(t)]
    if inputs is None or not any(_is_older(tensor, birth) for tensor in tracked):
        return tracked
    given = set(map(id, tensors_in(inputs)))
    return [t for t in tracked if not (id(t) in given and _is_older(t, birth))]


def _hook_handed_on(outputs: Sequence[torch.Tensor]) -> None:
    """Put a hook on those outputs of a model that have none, and by which no gradient comes in.

    Torch's wrapper hooks every output that requires gradients, inputs that were handed on among
    them, and programs look for it there (``_backward_hooks``). One is enough for a tensor that is
    handed on at every step.
    """
    for tensor in outputs:
        if tensor._backward_hooks or not tensor.requires_grad or not torch.is_grad_enabled():
            continue
        if not (isinstance(tensor, torch.nn.Parameter) or is_handed_out(tensor)):
            tensor.register_hook(_handed_on)


def _handed_on(gradient: torch.Tensor) -> None:
    """Nothing is to be done: the gradient goes past the unit."""


def _leads_into(tensor: torch.Tensor, birth: int) -> bool:
    """Whether gradients of ``tensor`` come into what a forward computed that began at ``birth``."""
    return not (tensor.grad_fn is None or is_handed_out(tensor) or _is_older(tensor, birth))


def _is_older(tensor: torch.Tensor, birth: int) -> bool:
    node = tensor.grad_fn
    return node is not None and node._sequence_nr() < birth
