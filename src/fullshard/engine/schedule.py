"""When things happen: order, prefetch, what is freed, and the end of a backward.

One schedule is shared by all units below a root. It moves units through their states (``unit.py``
says how) and is told four things: a unit's forward begins and ends, a gradient reaches a unit's
output, and all of a unit's gradients are there. On a CPU a reduce is begun at the next of these
events, not at once: by then autograd has let go of the full gradients, and the reduce's own
memory takes their place.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..api import BackwardPrefetch
from .autograd import (
    BackwardEnd,
    holds_reentrant_checkpoint,
    in_backward,
)
from .comm_hook import settle_by_vote
from .device import lines_for
from .gradients import Gradients
from .progress import Call, Progress
from .structures import replace_tensors, tensors_in
from .unit import State, Unit

#: Passes without a backward after which their order is no longer kept for prefetching.
_PASSES_KEPT = 64


class Schedule:
    """Drives the units below ``root``."""

    def __init__(self, root: Unit, units: Sequence[Unit]) -> None:
        self.root = root
        self.units = list(units)
        self._progress = {unit: Progress() for unit in self.units}
        self._depth = 0
        self._order: list[Unit] = []
        self._previous_order: list[Unit] = []
        self._passed: list[tuple[Unit, bool]] = []
        self._cursor = 0
        self._out: dict[Unit, None] = {}
        self._pending: Unit | None = None
        #: The unit whose gradients a host reduces behind what it computes.
        self._in_flight: Unit | None = None
        self._reduced: dict[Unit, None] = {}
        self._with_local_gradients: dict[Unit, None] = {}
        self._kept_versions: list[int] | None = None
        self._backward = 0
        self._in_backward = False
        self._breaking_off = threading.RLock()
        self._creates_graph = False
        self._backward_since_pass = False
        self._lines = lines_for(root.device)
        self._offloads = any(handle.offload for unit in self.units for handle in unit.handles)
        for unit in self.units:
            unit.on_gradients = self._on_gradients

    @property
    def is_idle(self) -> bool:
        """Whether no forward and no backward is running."""
        return self._depth == 0 and not self._in_backward

    def rest(self, unit: Unit | None = None) -> None:
        """Bring one unit, or all, back to sharded between steps."""
        if not in_backward():
            self._break_off_backward(self._backward)
        for other in [unit] if unit is not None else [*self._out]:
            self._abandon_full(other)
        self._lines.settle()
        # What comes next may gather, and an optimizer may have just given compute its step.
        self._lines.gather_after_compute()

    # -- on the user's word -------------------------------------------------------------------

    def unshard(self, unit: Unit) -> None:
        """Begin to gather a unit ahead of its use; inside a pass, as prefetching would."""
        if unit.summoned:
            return
        if not self.is_idle:
            self._prefetch(unit, exact=False)
            return
        self._break_off_backward(self._backward)
        if unit.shows_full or self._progress[unit].asked_for is not None:
            return
        unit.write_back()
        unit.shards.begin_pass("unshard", unit.name)
        self._lines.gather_after_compute()
        self._prefetch(unit, exact=False)
        progress = self._progress[unit]
        progress.prefetched = False
        progress.asked_for = unit.versions()

    def finish_unshard(self, unit: Unit) -> None:
        """Show what :meth:`unshard` gathers, between passes."""
        if self.is_idle and self._progress[unit].asked_for is not None and not unit.shows_full:
            unit.finish_gather()
            unit.show_full(tracked=torch.is_grad_enabled())
            unit.remember_values()

    def reshard(self, unit: Unit) -> None:
        """Give a unit's full parameters back; what was done to them since is kept."""
        progress = self._progress[unit]
        if unit.summoned or progress.active or progress.task is not None:
            raise RuntimeError(
                f"Unit {unit.name!r} computes with its full parameters now, or summon_full_params "
                "shows them: reshard() it afterwards"
            )
        if unit in self._out:
            self._abandon_full(unit)
            if self.is_idle:
                self._lines.settle()

    # -- forward ------------------------------------------------------------------------------

    def enter(self, unit: Unit) -> None:
        """A unit's forward begins. Always paired with :meth:`leave`."""
        if self._depth == 0 and not in_backward():
            self._break_off_backward(self._backward)
            self._begin_pass(unit)
        self._depth += 1
        self._progress[unit].active += 1

    def before_module(self, unit: Unit, exact: bool, inputs: Any) -> Call | None:
        """Put full parameters in place."""
        if unit.summoned:
            self._check_summoned(unit)
            return None
        progress = self._progress[unit]
        self._order.append(unit)
        if not unit.shows_full:
            unit.write_back()
        elif progress.asked_for is not None:
            unit.keep_changes()
        if progress.prefetched:
            # Its gather was a guess; that all ranks run the unit has yet to be seen.
            unit.shards.agree("run", unit.name)
        self._gather(unit, exact)
        if self._prefetches_forward(unit):
            self._prefetch_forward(exact)
        tracked = torch.is_grad_enabled()
        unit.show_full(tracked)
        if tracked and not in_backward():
            progress.birth = torch.autograd._get_sequence_nr()
            unit.count_as_run_now()
        if tracked and unit.handles and (progress.inputs_tell or unit.is_mixed):
            return self._ask_inputs(unit, inputs)
        return None

    def after_module(self, unit: Unit, output: Any, call: Call | None) -> Any:
        """Take full parameters away again, as the strategy says."""
        progress = self._progress[unit]
        if progress.active > 1 or progress.task is not None or unit.summoned:
            return output
        outputs = list(tensors_in(output))
        if unit.handles and any(unit.lends(tensor) for tensor in outputs):
            output = replace_tensors(output, lambda t: t.clone() if unit.lends(t) else t)
            outputs = list(tensors_in(output))
        tracked = [tensor for tensor in outputs if tensor.requires_grad]
        if torch.is_grad_enabled():
            tracked += self._side_outputs(unit)
        if tracked:
            hook = functools.partial(self._on_output_gradient, unit, unit.exact, call)
            self._hook_outputs(tracked, hook)
            if progress.inputs_tell is None:
                progress.inputs_tell = holds_reentrant_checkpoint(tracked, progress.birth)
                progress.held = progress.inputs_tell
            self._passed.append((unit, unit.exact))
        if in_backward():
            return output
        # A module that hides its outputs from us may still need its parameters in backward.
        hidden = not outputs and torch.is_grad_enabled() and unit.has_trainable
        if progress.pinned:
            unit.show_sharded()
        elif not (tracked or hidden):
            self._shelve(unit)
        elif (unit.options.frees_after_forward or unit.holds_a_copy) and not hidden:
            if self._depth == 1:
                # The first to be needed in backward: hide, but do not free.
                unit.show_sharded()
            else:
                self._shelve(unit)
        elif unit.options.keeps_full_after_forward:
            unit.remember_values()
        else:
            unit.show_sharded()
        return output

    def _hook_outputs(self, outputs: Sequence[torch.Tensor], hook: Callable[[Any], None]) -> None:
        """Have ``hook`` called when a gradient reaches one of ``outputs``.

        A following unit may have hooked the same tensor as its input, to be closed before this
        one is gathered: hooks of a tensor's node run after those of the tensor. Only the
        outermost unit hooks tensors: its hook starts the backward, before any hook of the user.
        """
        nodes: dict[Any, None] = {}
        for tensor in outputs:
            if self._depth == 1 or tensor.grad_fn is None:
                tensor.register_hook(hook)
            else:
                nodes[tensor.grad_fn] = None
        for node in nodes:
            node.register_prehook(hook)

    def abandon(self, unit: Unit) -> None:
        """A unit's forward raised: leave nothing behind."""
        progress = self._progress[unit]
        if progress.active == 1 and not in_backward() and not unit.summoned:
            # From the outermost one, nothing of this pass is left to wait for a backward.
            for other in [unit] if self._depth > 1 else [unit, *self._out]:
                self._shelve(other)

    def leave(self, unit: Unit) -> None:
        """A unit's forward is over, one way or the other."""
        self._depth -= 1
        self._progress[unit].active -= 1
        if self._depth == 0 and not in_backward():
            self._drop_prefetched()
            self._lines.settle()
            if self._offloads and not torch.is_grad_enabled():
                # No backward follows that waits: the user may change what is still being read.
                self._lines.host_after_gathers()

    def _check_summoned(self, unit: Unit) -> None:
        if torch.is_grad_enabled() and unit.has_trainable:
            raise RuntimeError(
                f"Forward of unit {unit.name!r} inside summon_full_params would leave its "
                "gradients unreduced; run it under torch.no_grad(), or outside of the context"
            )

    def _side_outputs(self, unit: Unit) -> list[torch.Tensor]:
        """Tensors that the unit's modules keep as attributes, by which autograd may enter too.

        Where to look is learned at the unit's first forward.
        """
        progress = self._progress[unit]
        if progress.side_outputs is None:
            progress.side_outputs = [
                (module, name)
                for module in unit.module.modules()
                for name, value in vars(module).items()
                if not name.startswith("_") and any(map(unit.made, tensors_in(value)))
            ]
        found = [tensors_in(vars(m).get(name)) for m, name in progress.side_outputs]
        return [tensor for tensors in found for tensor in tensors if unit.made(tensor)]

    def _begin_pass(self, unit: Unit) -> None:
        unit.begin_pass()
        changed = self._kept_versions is not None and self._kept_versions != self._versions()
        self._kept_versions = None
        for other in [*self._out]:
            # Gathered for a backward that has not come; the parameters may have changed since.
            progress = self._progress[other]
            if progress.asked_for is not None:
                stays = progress.asked_for == other.versions()
            else:
                stays = (progress.kept or progress.pinned) and not changed
            if not stays:
                self._abandon_full(other)
        self._lines.gather_after_compute()
        self._previous_order, self._order = self._order, []
        if self._backward_since_pass or len(self._passed) > _PASSES_KEPT * len(self.units):
            self._passed.clear()
            self._backward_since_pass = False
        self._cursor = len(self._passed)

    def _versions(self) -> list[int]:
        """Counts of in-place changes to the parameters, by which kept full ones are checked."""
        return [version for unit in self.units for version in unit.versions()]

    def _prefetches_forward(self, unit: Unit) -> bool:
        """Whether the next unit is gathered while this one computes.

        An accelerator overlaps what it is given without being told. A host does not: it gathers
        ahead where that takes no more memory than the unit takes anyway, since backward gathers
        ahead or nothing is freed before it.
        """
        options = unit.options
        if options.forward_prefetch or self._lines.runs_ahead:
            return options.forward_prefetch
        ahead = options.backward_prefetch is BackwardPrefetch.BACKWARD_PRE
        return ahead or (options.keeps_full_after_forward and torch.is_grad_enabled())

    def _prefetch_forward(self, exact: bool) -> None:
        position = len(self._order) - 1
        previous = self._previous_order
        if position + 1 < len(previous) and previous[position] is self._order[position]:
            following = previous[position + 1]
            # A hook that runs before its forward may change what a gather now would read.
            if not following.pre_hooks:
                self._prefetch(following, exact)

    def _ask_inputs(self, unit: Unit, inputs: Any) -> Call | None:
        """Have the inputs' gradients tell when the unit's backward is over.

        Frozen parameters are needed until the inputs' gradients are there, which may be after
        the trainable ones' gradients are, and a frozen unit has no others.
        """
        tensors = [t for t in tensors_in(inputs) if t.requires_grad]
        if not tensors:
            self._progress[unit].held = bool(self._progress[unit].inputs_tell)
            return None
        call = Call()
        hook = functools.partial(self._on_input_gradients, unit, call)
        if len(tensors) == 1:
            tensors[0].register_hook(hook)
        else:
            torch.autograd.graph.register_multi_grad_hook(tensors, hook)
        return call

    # -- backward -----------------------------------------------------------------------------

    def _enter_backward(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            self._backward_since_pass = True
            self._creates_graph = torch.is_grad_enabled()
            self._backward += 1
            self._cursor = len(self._passed)
            failed = functools.partial(self._break_off_backward, self._backward)
            BackwardEnd(self._finish_backward, failed)

    def _on_output_gradient(self, unit: Unit, exact: bool, call: Call | None, _: Any) -> None:
        self._enter_backward()
        if not self._lines.runs_ahead:
            self._carry_out_reduce()
        progress = self._progress[unit]
        if call is not None and call.reached_in != self._backward:
            call.reached_in = self._backward
            progress.open_calls += 1
        if progress.task is not None and unit.shows_full and unit.exact == exact:
            return
        progress.task = torch._C._current_graph_task_id()
        if progress.asked_for is not None:
            # Shown by the user's own wish, maybe as plain tensors: that is no change.
            unit.show_sharded()
        if unit.shows_full and unit.state is State.GATHERED and unit.exact == exact:
            self._check_unchanged(unit)
        self._gather(unit, exact)
        unit.show_full(tracked=True)
        if unit.options.backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
            self._prefetch_backward(unit)

    def _on_gradients(self, unit: Unit, gradients: Sequence[Gradients]) -> None:
        self._enter_backward()
        if not torch.is_grad_enabled():
            self._take_gradients(unit, gradients)
            return
        with torch.no_grad():
            self._take_gradients(unit, gradients)

    def _take_gradients(self, unit: Unit, gradients: Sequence[Gradients]) -> None:
        self._carry_out_reduce()
        if self._in_flight is unit:
            # A second part of the unit's gradients: its reduce buffer must be free again.
            self._carry_out_reduce()
        progress = self._progress[unit]
        if progress.task is not None and progress.task != torch._C._current_graph_task_id():
            # A reentrant checkpoint inside the unit: a part of its backward, in a graph of its
            # own. More parts may follow, and they need the parameters.
            progress.inputs_tell = True
        elif progress.open_calls == 0 and not progress.held:
            self._close(unit)
        if unit.synchronizes:
            self._with_local_gradients.pop(unit, None)
            # First, so that what is staged when staging raises is dropped.
            self._reduced[unit] = None
            unit.stage_gradients(gradients)
            self._pending = unit
            if self._lines.runs_ahead:
                unit.reduce_staged()
        else:
            unit.keep_gradients(gradients)
            self._with_local_gradients[unit] = None
        if unit.options.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
            self._prefetch_backward(unit)

    def _on_input_gradients(self, unit: Unit, call: Call, _: Any) -> None:
        if call.reached_in == self._backward and self._in_backward:
            call.reached_in = -1
            progress = self._progress[unit]
            progress.open_calls -= 1
            if progress.open_calls == 0:
                self._close(unit)

    def _close(self, unit: Unit) -> None:
        """The unit's backward is over: its parameters are not needed any more."""
        progress = self._progress[unit]
        progress.task = None
        progress.open_calls = 0
        if self._creates_graph:
            # Gradients that are differentiated again reach the parameters by ways of their own.
            progress.pinned = True
            unit.show_sharded()
        elif not unit.synchronizes and unit.options.keeps_full_after_forward:
            progress.kept = True
            unit.show_sharded()
        else:
            self._shelve(unit)

    def _carry_out_reduce(self) -> None:
        """Reduce what the last unit staged; on an accelerator, free what it reduced from.

        There the reduce was given out at once, and had until now, the next unit's whole backward,
        to overlap with.
        """
        unit, self._pending = self._pending, None
        if self._in_flight is not None:
            in_flight, self._in_flight = self._in_flight, None
            in_flight.finish_reduces()
        if unit is None:
            return
        if self._lines.runs_ahead:
            self._lines.compute_after_reduces()
            unit.free_reduce_buffers()
        elif unit.may_reduce_behind_compute:
            self._in_flight = unit
            unit.start_reduces()
        else:
            unit.reduce_staged()

    def _prefetch_backward(self, unit: Unit) -> None:
        """Gather the unit that ran before ``unit`` in forward: it is next in backward."""
        cursor = min(self._cursor, len(self._passed)) - 1
        while cursor >= 0 and self._passed[cursor][0] is not unit:
            cursor -= 1
        if cursor >= 0:
            self._cursor = cursor
        if cursor >= 1:
            self._prefetch(*self._passed[cursor - 1])

    def _check_unchanged(self, unit: Unit) -> None:
        if not unit.shows_what_it_gathered():
            unit.forget_views()
            raise AssertionError(
                "FSDP does not support changing the parameters between forward and backward "
                f"(unit {unit.name!r} under {unit.options.strategy}); change them after backward, "
                "or use a strategy that frees parameters after forward"
            )

    def _finish_backward(self) -> None:
        self._carry_out_reduce()
        if self._in_flight is not None:
            self._carry_out_reduce()
        for unit in [*self._with_local_gradients]:
            if unit.synchronizes:
                self._reduced[unit] = None
                unit.stage_kept_gradients()
                unit.reduce_staged()
                del self._with_local_gradients[unit]
        self._lines.compute_after_reduces()
        reduced = self._reduced
        if self._offloads:
            self._lines.host_after_reduces()
        for unit in reduced:
            unit.free_reduce_buffers()
            unit.settle_gradients()
        ballots = [ballot for unit in reduced if unit.ballots for ballot in unit.take_ballots()]
        if ballots:
            settle_by_vote(ballots)
        self._reduced = {}
        self._end_backward()
        for unit in reduced:
            unit.run_gradient_hooks()

    def _break_off_backward(self, backward: int) -> None:
        """Clean up after ``backward``, if it raised and nobody has yet.

        On a CPU autograd tells at once. An accelerator's backward thread may tell a moment after
        the exception has reached the user, who may be here before it.
        """
        with self._breaking_off:
            if not self._in_backward or backward != self._backward:
                return
            # What is dropped may still be read by a reduce.
            self._lines.compute_after_reduces()
            for unit in self._reduced:
                unit.drop_gradients()
            self._pending = self._in_flight = None
            self._reduced.clear()
            self._end_backward()

    def _end_backward(self) -> None:
        self._in_backward = False
        for unit in [*self._out]:
            progress = self._progress[unit]
            progress.task = None
            progress.open_calls = 0
            progress.held = False
            if self._creates_graph and not progress.prefetched:
                progress.pinned = True
                unit.show_sharded()
            elif not progress.kept:
                self._shelve(unit)
        self._kept_versions = self._versions() if self._out else None
        self._lines.settle()

    # -- gathering and freeing ----------------------------------------------------------------

    def _gather(self, unit: Unit, exact: bool) -> None:
        if unit.exact != exact and unit.state is not State.SHARDED:
            self._shelve(unit)
        unit.start_gather(exact)
        unit.finish_gather()
        progress = self._progress[unit]
        progress.prefetched = progress.kept = False
        progress.asked_for = None
        self._out[unit] = None

    def _prefetch(self, unit: Unit, exact: bool) -> None:
        if unit.state is State.SHARDED:
            unit.start_gather(exact)
            self._progress[unit].prefetched = True
            self._out[unit] = None

    def _drop_prefetched(self) -> None:
        for unit in [*self._out]:
            if self._progress[unit].prefetched:
                self._shelve(unit)

    def _abandon_full(self, unit: Unit) -> None:
        """Shelve a unit whose full parameters the user may have changed after forward."""
        try:
            if unit.shows_full:
                unit.keep_changes()
        finally:
            self._shelve(unit)

    def _shelve(self, unit: Unit) -> None:
        """Back to sharded: what every unit is outside of its compute."""
        progress = self._progress[unit]
        progress.prefetched = progress.kept = progress.pinned = False
        progress.asked_for = None
        self._out.pop(unit, None)
        unit.show_sharded()
        options = unit.options
        prefetches = options.backward_prefetch is BackwardPrefetch.BACKWARD_PRE
        unit.release(late=not (prefetches if self._in_backward else options.forward_prefetch))
