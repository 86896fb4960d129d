"""Reduces one unit's gradients: stages them, reduces them, delivers them to the optimizer.

``unit.py`` all-gathers a unit's parameters; this file reduces its gradients. ``policy.py`` decides
when, ``backward.py`` calls it, and ``gradients.py`` handles one group of parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..comm.collectives import Group
from ..comm.pending_work import kept_alive
from ..params.handle import REQUIRES_GRAD, FlatParamHandle
from . import gradients as flow
from .comm_hook import Ballot, CommHook, reduce_with_hook, settle_by_vote
from .encoded_reduce import staging_dtype
from .local_gradients import keep_local, take_local

if TYPE_CHECKING:
    from ..runtime.unit import Unit


def _already_waited() -> None:
    """Do nothing: the sum over the shards' ranks is complete."""


class Reduction:
    """Reduces one unit's gradients, and holds those that are staged or being reduced.

    ``backward.py`` calls its methods under ``no_grad``.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self.handles: Sequence[FlatParamHandle] = unit.handles
        #: Reduces gradients instead of the engine (``register_comm_hook``).
        self.comm_hook: CommHook | None = None
        #: Votes that ranks hold at the end of a backward whose gradients a hook reduced.
        self.ballots: list[Ballot] = []
        #: Factor for reduced gradients, since some ranks may have none (``Join``).
        self.rescale = 1.0
        #: Whether gradients are summed over the ranks that hold copies of the shards, too.
        self.all_reduces = True
        #: Whether the backend computes sums even if it could compute means.
        self.sums_only = False
        #: Divisor of summed gradients, if it is not the number of ranks.
        self._divisor: float | None = None
        #: A process group for the reduces alone, of the ranks that share the shards.
        self.own_group: Group | None = None
        #: The user's reduce-scatter over those ranks, which also allocates memory for it.
        self._comm: Any = None
        #: Whether unused parameters get gradients of zeros.
        self.fills_unused = False
        #: How many units' gradients may be in flight while others are computed.
        self.max_in_flight = 1
        #: Called with each group's reduced gradients, in one flat tensor, and its stream.
        self.after_reduce: Callable[[torch.Tensor], object] | None = None
        self._hook_stream: Any = None
        #: Sums over the shards' ranks that wait for the sum over the copies' ranks.
        self._partial_sums: dict[FlatParamHandle, torch.Tensor] = {}
        self._averages: dict[torch.dtype, flow.Average] = {}
        self._staged: list[flow.ReduceInput | flow.UnreducedGradients] = []
        #: Inputs from which a device may still be reducing.
        self._reducing: list[flow.ReduceInput | flow.UnreducedGradients] = []
        #: Reduces that run behind compute.
        self._in_flight: list[flow.Reducing] = []
        self._undecided: list[flow.PossiblyUnused] = []

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and pickles, without gradients in flight."""
        return {**vars(Reduction(self._unit)), "comm_hook": self.comm_hook}

    # -- staging ------------------------------------------------------------------------------

    def keep_local(self, gradients: Sequence[flow.Gradients]) -> None:
        """Keep gradients local and whole (``no_sync``)."""
        for handle, full in zip(self._unit.handles, gradients, strict=True):
            if any(gradient is not None for gradient in full):
                keep_local(handle, full)

    def stage(self, gradients: Sequence[flow.Gradients]) -> None:
        """Copy full gradients into reduce buffers, so that autograd can release its memory."""
        alone = self._unit.world_size == 1 and not self._changes_gradients
        shows_gaps = self.after_reduce is not None
        for handle, full in zip(self._unit.handles, gradients, strict=True):
            if True not in map(REQUIRES_GRAD, handle.optimizer_params):
                continue
            if handle.local_gradients:
                full = take_local(handle, full)
            if alone and handle.use_orig_params and not handle.is_sharded:
                # This rank's gradients are the result already.
                own = flow.UnreducedGradients(handle, full)
                if self._unit.streams.runs_ahead:
                    self._staged.append(own)
                else:
                    own.deliver()
            else:
                dtype = handle.dtypes.reduce
                if handle.reduced_in is not None and self.comm_hook is None:
                    dtype = staging_dtype(handle, full, self._unit.shards)
                staged = flow.stage(handle, full, dtype, self.fills_unused, shows_gaps)
                self._staged.append(staged)

    @property
    def _changes_gradients(self) -> bool:
        """True if gradients of a single rank still have to be changed."""
        asked = self.comm_hook is not None or self.after_reduce is not None
        return asked or self._divisor is not None or self.fills_unused

    def stage_kept(self) -> None:
        """Stage gradients that ``no_sync`` kept in a unit that this backward did not reach."""
        handles = self._unit.handles
        if any(handle.keeps_local_gradients for handle in handles):
            self.stage([[None] * len(handle.layout.slots) for handle in handles])

    # -- reducing -----------------------------------------------------------------------------

    def reduce(self) -> None:
        """Reduce the staged gradients, and put the results on the optimizer's parameters."""
        streams = self._unit.streams
        staged, self._staged = self._staged, []
        if not staged:
            return
        if self._unit.joining is not None:
            self._unit.joining.tell("reduce", self._unit)
        # The user's hook may raise; after a failed collective, memory must not be freed.
        self._reducing = staged if self.comm_hook is not None else []
        if not streams.runs_ahead:
            for item in staged:
                self._reduce(item)
            self._reducing = []
            return
        streams.reduce_after_compute()
        with streams.on_reduce():
            for item in staged:
                self._reduce(item)
        self._reducing = staged

    def _reduce(self, item: flow.ReduceInput | flow.UnreducedGradients) -> None:
        if isinstance(item, flow.UnreducedGradients):
            item.deliver()
            return
        unit, hook = self._unit, self.comm_hook
        reduced: torch.Tensor | None
        if hook is not None:
            reduced = reduce_with_hook(item, hook, unit.shards, unit.copies, unit.name)
        else:
            reduced = self._finish(self._start(item))
        if reduced is not None and self.rescale != 1.0:
            reduced.mul_(self.rescale)
        if not unit.streams.runs_ahead:
            item.release()
        if reduced is None:
            return
        if self.after_reduce is not None:
            self._call_after_reduce(reduced)
        undecided = flow.deliver(item.handle, reduced, item.absent)
        if hook is None:
            self._undecided += undecided
        elif item.handle.use_orig_params:
            self.ballots.append(Ballot.of(item, unit.shards, unit.copies, undecided))

    def _start(self, item: flow.ReduceInput) -> flow.Reducing:
        unit, dtype = self._unit, item.flat.dtype
        average = self._averages.get(dtype)
        if average is None:
            average = flow.Average.over(
                self.own_group or unit.shards,
                unit.copies,
                dtype,
                self.sums_only,
                divisor=self._divisor,
                custom=self._comm is not None,
            )
            self._averages[dtype] = average
        return flow.start_reduce(item, average, unit.name, self._comm)

    def _finish(self, reducing: flow.Reducing) -> torch.Tensor | None:
        """The mean over all ranks; None if the sum is kept for later (:attr:`all_reduces`)."""
        if self.all_reduces and not self._partial_sums:
            return reducing.finish()
        reducing.await_sum()
        handle = reducing.staged.handle
        earlier = self._partial_sums.pop(handle, None)
        if earlier is not None:
            reducing.sum.add_(earlier)
        if not self.all_reduces:
            self._partial_sums[handle] = reducing.sum
            return None
        return reducing._replace(await_sum=_already_waited).finish()

    # -- settings -----------------------------------------------------------------------------

    def set_comm_hook(self, hook: CommHook | None) -> None:
        """Let ``hook`` reduce gradients; with None, the engine does."""
        self.comm_hook = hook

    def set_rescale(self, factor: float) -> None:
        """Multiply reduced gradients by ``factor``."""
        self.rescale = factor

    def set_all_reduce(self, enabled: bool) -> None:
        """Sum gradients over the ranks that hold copies, or keep partial sums until enabled."""
        self.all_reduces = enabled

    def set_sums_only(self, enabled: bool) -> None:
        """Let the backend compute sums only; the engine divides them."""
        self.sums_only = enabled
        self._averages.clear()

    def set_divisor(self, divisor: float) -> None:
        """Divide summed gradients by ``divisor`` instead of the number of ranks."""
        self._divisor = divisor
        self._averages.clear()

    def set_group(self, group: Group | None) -> None:
        """Reduce over ``group``, of the same ranks; with None, over the all-gathers' group."""
        self.own_group = group
        self._averages.clear()

    def set_comm(self, comm: Any) -> None:
        """Let ``comm`` reduce over the ranks that share the shards, in memory that it allocates."""
        self._comm = comm
        self._averages.clear()

    def fill_unused(self, enabled: bool) -> None:
        """Choose whether parameters that no rank used get gradients of zeros, or none."""
        self.fills_unused = enabled

    def set_max_in_flight(self, count: int) -> None:
        """Let ``count`` units' gradients be in flight while those of others are computed."""
        self.max_in_flight = count

    def set_after_reduce(
        self, hook: Callable[[torch.Tensor], object] | None, stream: Any = None
    ) -> None:
        """Call ``hook`` with each group's reduced gradients, on ``stream`` if there is one."""
        self.after_reduce, self._hook_stream = hook, stream

    def _call_after_reduce(self, reduced: torch.Tensor) -> None:
        assert self.after_reduce is not None
        unit, stream = self._unit, self._hook_stream
        if stream is None or unit.copies is not None or not unit.streams.runs_ahead:
            self.after_reduce(reduced)
            return
        with unit.streams.aside(stream):
            self.after_reduce(reduced)

    def drop_partial_sums(self) -> None:
        """Drop sums that were kept for the ranks that hold copies."""
        self._partial_sums.clear()

    @property
    def may_run_behind_compute(self) -> bool:
        """True if a host may sum gradients while the next unit's backward computes."""
        allowed = self._unit.plan.reduces_behind_compute or self.max_in_flight > 1
        return allowed and self.comm_hook is None

    def start(self) -> None:
        """Begin to reduce the staged gradients, behind compute; :meth:`finish` completes this."""
        staged, self._staged = self._staged, []
        if staged and self._unit.joining is not None:
            self._unit.joining.tell("reduce", self._unit)
        for item in staged:
            assert isinstance(item, flow.ReduceInput)
            self._in_flight.append(self._start(item))

    def finish(self) -> None:
        """Complete the reduces that :meth:`start` began, and deliver their results."""
        # One by one: if one raises, the following ones still have to be waited for.
        while self._in_flight:
            reducing = self._in_flight.pop(0)
            staged, reduced = reducing.staged, self._finish(reducing)
            if reduced is not None and self.rescale != 1.0:
                reduced.mul_(self.rescale)
            staged.release()
            if reduced is None:
                continue
            if self.after_reduce is not None:
                self._call_after_reduce(reduced)
            self._undecided += flow.deliver(staged.handle, reduced, staged.absent)

    # -- on an accelerator --------------------------------------------------------------------

    def give_out(self) -> None:
        """Have an accelerator reduce what is staged, behind what it computes from now on."""
        if self._is_one_collective:
            self.start()
        else:
            self.reduce()

    def let_go(self) -> None:
        """Free the reduce buffers now; the allocator reuses them when the reduce has read them.

        Only for the first unit of a backward: where the host is far ahead of the device, the
        allocator cannot reuse such blocks yet, and those of all units would pile up.
        """
        streams = self._unit.streams
        for index, reducing in enumerate(self._in_flight):
            with streams.on_reduce():
                reducing.await_sum()
            self._in_flight[index] = reducing._replace(await_sum=streams.compute_after_reduces)
        for item in (*(reducing.staged for reducing in self._in_flight), *self._reducing):
            if isinstance(item, flow.ReduceInput) and item.handle.is_sharded:
                streams.release_after_reduces(item)

    def take_in(self) -> None:
        """Order compute behind what was given out, and free what it was reduced from."""
        if self._in_flight:
            self.finish()
        else:
            self._unit.streams.compute_after_reduces()
            self.free_buffers()

    @property
    def _is_one_collective(self) -> bool:
        """True if reducing is one collective, for which the device waits and not the host.

        The collective has a stream of its own in the backend, and nothing has to follow it there.
        Otherwise the reduce stream is needed: to sum over copies, to bring gradients to the host.
        """
        unit = self._unit
        custom = self.comm_hook is not None or self._comm is not None
        more = unit.copies is not None or custom or unit.offloads or self._encodes
        return not more and unit.shards.runs_ahead and unit.shards.size > 1

    @functools.cached_property
    def _encodes(self) -> bool:
        """True if what is received has to be decoded and added up."""
        return any(handle.reduced_in is not None for handle in self.handles)

    def free_buffers(self) -> None:
        """Free the reduce buffers; compute must be ordered behind the reduce."""
        for item in self._reducing:
            item.release()
        self._reducing = []

    # -- the end of a backward ----------------------------------------------------------------

    def settle(self) -> None:
        """Free the reduce buffers, and decide on gradients that only other ranks may have."""
        if self._reducing:
            self.free_buffers()
        undecided, self._undecided = self._undecided, []
        if undecided and self._unit.streams.capturing:
            flow.settle_as_before(undecided)
        elif undecided:
            flow.settle(undecided)

    def take_ballots(self) -> list[Ballot]:
        """Hand out, once, what the ranks have to vote on."""
        ballots, self.ballots = self.ballots, []
        return ballots

    def drop(self) -> None:
        """Forget what a broken-off backward left."""
        in_flight, self._in_flight = self._in_flight, []
        for reducing in in_flight:
            try:
                if not self._unit.streams.capture_is_lost:
                    reducing.await_sum()
            except BaseException:
                # The collective may still touch this memory: let it go unfreed.
                kept_alive.append(reducing)
                reducing.staged.handle.forget_buffers()
                self._unit.forget_views()
            else:
                reducing.staged.release()
        for item in (*self._staged, *self._reducing):
            item.release()
        self._staged, self._reducing, self._undecided, self.ballots = [], [], [], []
        for handle in self._unit.handles:
            handle.forget_received()


def settle_all(reductions: Sequence[Reduction]) -> None:
    """At the end of a backward, free the reduce buffers and find out which gradients are absent."""
    ballots: list[Ballot] = []
    for reduction in reductions:
        reduction.settle()
        if reduction.ballots:
            ballots += reduction.take_ballots()
    if ballots:
        settle_by_vote(ballots)
