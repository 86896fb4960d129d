"""A unit: one wrapped module, its groups, and how they change between sharded and unsharded.

The unit knows *how*; ``policy.py`` decides *when*, and ``forward.py`` and ``backward.py`` carry
that out. Its ``reduction`` takes the unit's gradients. Its state is one of

    SHARDED ──start_unshard──▶ UNSHARDING ──finish_unshard──▶ UNSHARDED ──reshard──▶ SHARDED

and, apart from it, ``shows_full`` says what the module's code finds under its parameters' names:
this rank's pieces or full parameters.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from enum import Enum, auto
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..comm.collectives import Group
from ..comm.custom import gather_by
from ..comm.pending_work import kept_alive
from ..comm.streams import streams_for
from ..grads.gradients import Gradients
from ..grads.reduction import Reduction
from ..params.buffers import FullBuffer, any_holds
from ..params.handle import REQUIRES_GRAD, FlatParamHandle
from ..params.row_handle import RowHandle
from .autograd import Tracked, is_handed_out, track
from .parts import FewRanks, Parts
from .policy import UnitOptions, policy_for

if TYPE_CHECKING:
    from ..join.joining import Joining

#: How many sets of trainable parameters a unit remembers nodes for.
_PATTERNS_KEPT = 8

_VERSION = operator.attrgetter("_version")
_VERSIONED = operator.attrgetter("versioned")
_OPTIMIZER_PARAMS = operator.attrgetter("optimizer_params")

#: Takes a unit and, per group, one full gradient or None for each parameter.
OnGradients = Callable[["Unit", Sequence[Gradients]], None]


class State(Enum):
    """The state of a unit's full parameters."""

    SHARDED = auto()
    UNSHARDING = auto()
    UNSHARDED = auto()


class Unit:
    """One unit's mechanism. ``handles`` has one entry per group, none if it has no parameters."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        handles: Sequence[FlatParamHandle],
        shards: Group,
        copies: Group | None,
        device: torch.device,
        options: UnitOptions,
    ) -> None:
        self.name = name
        self.module = module
        self.handles = list(handles)
        self.shards = shards
        self.copies = copies
        self.options = options
        self.set_device(device)
        self.state = State.SHARDED
        self.shows_full = False
        #: Whether the unsharded parameters are in the shards' own precision.
        self.full_precision = False
        #: Whether backward reduces gradients (False inside ``no_sync``).
        self.syncs_gradients = True
        #: Whether full parameters stay after a backward, for the next forward.
        self.stays_after_backward = False
        #: Whether full parameters stay after a backward at all, if no graph captures it: one that
        #: began with the next forward would not gather what is there already.
        self.stays_between_passes = False
        #: Whether backward computes with the full parameters (an embedding's does not).
        self.unshards_in_backward = True
        #: What the user brings to all-gather with.
        self._gather_comm: Any = None
        self.reduction = Reduction(self)
        #: The units that the user asked to be prefetched when a backward reaches this one.
        self.prefetch_in_backward: Sequence[Unit] | None = None
        #: The full buffers in use, one per group; empty while sharded.
        self.full_buffers: list[FullBuffer] = []
        #: Whether some of the full parameters that were last tracked are frozen.
        self.is_mixed = False
        #: How many ``summon_full_params`` the unit is inside of, also if it has nothing to show.
        self.summoning = 0
        #: Whether ``summon_full_params`` shows full parameters.
        self.summoned = False
        #: Whether it shows them on every rank that shares the shards.
        self.summoned_everywhere = False
        #: Tells ranks that have run out of data what is done to the unit; inside of ``Join``.
        self.joining: Joining | None = None
        #: The user's functions that are called before a forward of the unit.
        self.pre_hooks: Mapping[int, Any] = {}
        self._on_gradients: OnGradients | None = None
        self._all_gathers: list[Any] = []
        #: Whether a full buffer is being filled without a collective, from a whole shard.
        self._copies_shards = False
        #: Whether what is being all-gathered has to be copied to the full parameters.
        self._copies_out = False
        #: What a forward leaves of full parameters to a few ranks, if it does.
        self.parts: Parts | None = None
        #: The ranks that the running all-gather is over.
        self._gathers_over = shards
        self._nodes: dict[Any, Tracked] = {}
        self._changes: list[int] = []
        #: The full parameters in place, one list per group.
        self._shown: list[list[torch.Tensor]] = []

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: what a unit is, without what it is in the middle of."""
        return {
            **self.__dict__,
            "prefetch_in_backward": None,
            "pre_hooks": {},
            "joining": None,
            "_on_gradients": None,
            "_all_gathers": [],
            "full_buffers": [],
            "_nodes": {},
            "_changes": [],
            "_shown": [],
            "parts": None,
        }

    # -- what others tell the unit --------------------------------------------------------------

    def set_device(self, device: torch.device) -> None:
        """Compute on ``device`` from now on."""
        self.device = device
        if self.shards.device_type != device.type:
            self.shards = self.shards.on(device)
            self.copies = self.copies and self.copies.on(device)
        self.streams = streams_for(device)
        #: What is decided for this unit, on this kind of device, by its options.
        self.plan = policy_for(device.type).plan(self.options)

    def start_training(self, name: str, pre_hooks: Mapping[int, Any]) -> None:
        """A root has adopted the unit, which it calls ``name``."""
        self.name = name
        self.pre_hooks = pre_hooks

    def send_gradients_to(self, receiver: OnGradients) -> None:
        """Have ``receiver`` called with all full gradients of the unit when they are there."""
        self._on_gradients = receiver

    def follow(self, joining: Joining | None) -> None:
        """Tell ranks that have run out of data what is done to the unit, or no longer."""
        self.joining = joining

    def sync_gradients(self, enabled: bool) -> None:
        """Have backward reduce gradients, or keep them local."""
        self.syncs_gradients = enabled
        self._decide_what_stays()

    def set_options(self, options: UnitOptions) -> None:
        """Follow other options from now on."""
        self.options = options
        self.set_device(self.device)
        self._decide_what_stays()

    def stay_after_backward(self, enabled: bool) -> None:
        """Keep full parameters after a backward; the next forward uses them if none changed."""
        self.stays_after_backward = enabled
        self._decide_what_stays()

    def _decide_what_stays(self) -> None:
        unsynced = not self.syncs_gradients and self.options.keeps_full_after_forward
        self.stays_between_passes = self.stays_after_backward or unsynced

    def unshard_in_backward(self, enabled: bool) -> None:
        """Have full parameters in backward, or leave the unit sharded: its user knows better."""
        self.unshards_in_backward = enabled

    def keep_parts(self, few: FewRanks | None) -> None:
        """Have a forward leave full parameters to a few ranks, or to nobody; while sharded."""
        self.drop_parts()
        rows = [handle for handle in self.handles if isinstance(handle, RowHandle)]
        self.parts = None if few is None else Parts(rows, few, self.streams)

    def gather_with(self, comm: Any) -> None:
        """All-gather by ``comm``, which the user brings, or by the engine's own collective."""
        self._gather_comm = comm

    def prefetch_when_reached(self, units: Sequence[Unit] | None) -> None:
        """Have ``units`` prefetched, in place of the next one, when a backward reaches this one."""
        self.prefetch_in_backward = units

    def mark_summoned(self, shown: bool, everywhere: bool) -> None:
        """``summon_full_params`` shows full parameters, or no longer, on this rank or on all."""
        self.summoned, self.summoned_everywhere = shown, everywhere

    @contextlib.contextmanager
    def being_summoned(self) -> Generator[None, None, None]:
        """Count a ``summon_full_params`` that the unit is inside of."""
        self.summoning += 1
        try:
            yield
        finally:
            self.summoning -= 1

    # -- facts ------------------------------------------------------------------------------------

    @functools.cached_property
    def world_size(self) -> int:
        """Ranks that gradients are averaged over."""
        return self.shards.size * (self.copies.size if self.copies else 1)

    @functools.cached_property
    def offloads(self) -> bool:
        """True if shards and gradients rest on the host, away from where the unit computes."""
        return any(handle.offload for handle in self.handles)

    @property
    def is_sharded(self) -> bool:
        """True if a rank keeps a part of the parameters only."""
        return self.options.is_sharded

    @property
    def has_trainable(self) -> bool:
        return True in map(REQUIRES_GRAD, chain.from_iterable(map(_OPTIMIZER_PARAMS, self.handles)))

    @property
    def holds_a_copy(self) -> bool:
        """True if the full buffers are a copy, in another precision or place, of whole shards."""
        return not self.is_sharded and any(not buffer.is_standing for buffer in self.full_buffers)

    def versions(self) -> list[int]:
        """Counts of in-place changes to the parameters that the user holds."""
        return [*map(_VERSION, chain.from_iterable(map(_VERSIONED, self.handles)))]

    def was_changed_since(self, versions: list[int] | None) -> bool:
        """True if parameters were changed in place since ``versions`` were noted, if they were."""
        return versions is not None and versions != self.versions()

    def lends(self, tensor: torch.Tensor) -> bool:
        """True if ``tensor`` lies in memory that goes when the full parameters go."""
        return any_holds(self.full_buffers, tensor)

    def made(self, tensor: torch.Tensor) -> bool:
        """True if ``tensor`` may lead autograd into this unit, and is not a parameter."""
        return tensor.grad_fn is not None and not (is_handed_out(tensor) or self.lends(tensor))

    def forget_views(self) -> None:
        """Drop what was derived from buffers that no longer exist."""
        self._nodes.clear()

    # -- unsharding and resharding ------------------------------------------------------------

    def start_unshard(self, full_precision: bool = False) -> None:
        """Begin to fill the full buffers; no-op when they are full or being filled."""
        if self.state is not State.SHARDED:
            return
        if self.joining is not None:
            self.joining.tell("gather", self, full_precision)
        self.full_precision = full_precision
        buffers: list[FullBuffer] = []
        for handle in self.handles:
            dtype = handle.dtypes.shard if full_precision else handle.dtypes.compute
            buffers.append(handle.full_buffers.get(dtype) or handle.buffer(dtype))
        self.full_buffers = buffers
        streams = self.streams
        if streams.runs_ahead:
            streams.take_again(buffers)
            streams.gather_may_write()
            with streams.on_gather():
                self._fill(buffers)
        else:
            self._fill(buffers)
        self.state = State.UNSHARDING

    def _fill(self, buffers: Sequence[FullBuffer]) -> None:
        """Allocate the full buffers, and all-gather the shards into them."""
        outputs: list[torch.Tensor] = []
        inputs: list[torch.Tensor] = []
        self._copies_shards = self._copies_out = False
        self._gathers_over = self.shards
        if self.parts is not None and self.parts.fit(buffers):
            self._gathers_over, self._copies_out = self.parts.group, True
            outputs, inputs = self.parts.begin_gather()
            buffers = ()
        for buffer in buffers:
            buffer.allocate()
            if buffer.is_extended:
                filled, sent = buffer.begin_gather()
                outputs += filled
                inputs += sent
                self._copies_out = True
                continue
            if buffer.filled_from is not None:
                buffer.own.copy_(buffer.filled_from, non_blocking=True)
            if buffer.world_size > 1:
                if buffer.flat.numel() > 0:
                    inputs.append(buffer.gather_input)
                    outputs.append(buffer.gather_output)
                    self._copies_out |= buffer.is_copied_out
            elif not buffer.is_standing:
                self._copies_shards = True
        if not outputs:
            return
        if self._gather_comm is not None:
            self._all_gathers = gather_by(
                self._gather_comm, self._gathers_over, outputs, inputs, self.name
            )
        else:
            self._all_gathers = self._gathers_over.gather(outputs, inputs, self.name)

    def fill_again(self) -> None:
        """Let the all-gather that follows write into full buffers, which stay where they are."""
        if self.state is State.UNSHARDED:
            self.state = State.SHARDED

    def finish_unshard(self) -> None:
        """Make the full buffers usable by compute."""
        if self.state is not State.UNSHARDING:
            return
        if self._copies_shards or self._copies_out:
            with self.streams.on_gather():
                self._wait()
                if self._copies_out:
                    # Where a unit was that may have been released since the all-gather began.
                    self.streams.gather_may_write()
                    self._copy_out()
            self.streams.compute_after_gather()
            self.drop_parts()
        elif self._all_gathers:
            # Orders compute behind the collective, which was itself ordered behind its inputs.
            self._wait()
        self.state = State.UNSHARDED

    def _copy_out(self) -> None:
        """Bring what was all-gathered from the order of ranks to that of parameters."""
        with torch.no_grad():
            held = self.parts.held if self.parts is not None else []
            for filled in held or self.full_buffers:
                filled.copy_out()

    def _wait(self) -> None:
        pending, self._all_gathers = self._all_gathers, []
        try:
            self._gathers_over.wait(*pending)
        except BaseException:
            # The collective may still write into these buffers: let them go unfreed.
            kept_alive.append((pending, self.full_buffers))
            for handle in self.handles:
                handle.forget_buffers()
            self.forget_views()
            self.full_buffers = []
            self.state = State.SHARDED
            raise

    def reshard(self, late: bool = False) -> None:
        """Show this rank's pieces, and give the full buffers back."""
        if self.shows_full:
            self.show_sharded()
        if self.state is State.SHARDED:
            return
        if self.state is State.UNSHARDING:
            if self.streams.capture_is_lost:
                self._all_gathers = []
            else:
                self.finish_unshard()
        buffers, self.full_buffers = self.full_buffers, []
        self.state = State.SHARDED
        if self.streams.runs_ahead:
            self.streams.give_back(buffers, late, self.options.limit_all_gathers)
        else:
            for buffer in buffers:
                buffer.release()

    def reshard_to_parts(self, late: bool = False) -> None:
        """Give the full buffers back, but for what this rank keeps for a few."""
        if self.state is State.UNSHARDED and self.parts is not None:
            self.parts.keep(self.full_buffers)
            self.shows_full, self._shown = False, []
        self.reshard(late)

    def drop_parts(self) -> None:
        """Forget what a forward has left to a few ranks: parameters may have changed since."""
        if self.parts is not None:
            self.parts.drop()

    # -- agreeing with other ranks --------------------------------------------------------------

    def begin_pass(self) -> None:
        """Agree with the other ranks that a pass begins with this unit."""
        kind = "forward" if torch.is_grad_enabled() else "evaluation"
        if not self.syncs_gradients:
            kind += " without synchronization"
        if self.joining is not None:
            self.joining.tell("begin", self, kind)
        self.agree_on_pass(kind)

    def agree_on_pass(self, kind: str) -> None:
        """Agree on this kind of pass, which may be one of other ranks."""
        self.shards.begin_pass(kind, self.name)
        if self.copies is not None:
            self.copies.begin_pass(kind, self.name)

    def agree_to_run(self) -> None:
        """Agree with the other ranks that the unit, which was prefetched on a guess, runs."""
        if self.joining is not None:
            self.joining.tell("run", self)
        if self.shards.checks_order:
            self.shards.agree("run", self.name)

    # -- showing parameters ---------------------------------------------------------------------

    def show_full_for_forward(self) -> None:
        """Put tracked full parameters in place, and let the forward that begins count as the last.

        Autograd then reaches the unit's reduce before what ran earlier: see ``autograd.py``.
        """
        self.show_full(tracked=True)
        for known in self._nodes.values():
            if known.node is not None:
                known.node.born_now()

    def show_full(self, tracked: bool) -> None:
        """Put full parameters in place; ``tracked`` ones lead autograd to the unit's reduce."""
        tensors = self._tracked() if tracked else [buffer.shown for buffer in self.full_buffers]
        for handle, full in zip(self.handles, tensors, strict=True):
            handle.show(full)
        self.shows_full, self._shown = True, tensors

    def show_sharded(self) -> None:
        """Put this rank's pieces in place."""
        if self.shows_full:
            for handle in self.handles:
                handle.show_sharded()
            self.shows_full, self._shown = False, []

    def shows_what_it_unsharded(self) -> bool:
        """True if nobody replaced the full parameters since they were put in place."""
        return all(
            handle.skip_writeback_check or handle.shows(full, buffer)
            for handle, full, buffer in zip(
                self.handles, self._shown, self.full_buffers, strict=True
            )
        )

    # -- changes by the user --------------------------------------------------------------------

    def remember_values(self) -> None:
        """Note how often the full parameters, which stay in place, have been changed by now."""
        self._changes = [buffer.flat._version for buffer in self.full_buffers]

    def keep_changes(self) -> None:
        """Before full parameters go that no backward has used: keep what was done to them."""
        for handle, buffer, changes in zip(
            self.handles, self.full_buffers, self._changes, strict=False
        ):
            if buffer.flat._version == changes:
                continue
            if buffer.flat.dtype != handle.dtypes.shard:
                raise AssertionError(
                    "FSDP does not support changing the parameters between forward and backward "
                    f"(unit {self.name!r}, which computes in {buffer.flat.dtype}: the change would "
                    "lose precision); change them before forward, or in summon_full_params"
                )
            handle.keep_changes(buffer)
        self._changes = []

    def keep_changes_so_far(self) -> None:
        """Let the shards have what was done to full parameters that stay in place."""
        if self._changes:
            self.keep_changes()
            self.remember_values()
            self.streams.gather_after_compute()

    def write_back(self) -> bool:
        """Take over what the user replaced; only while sharded parameters are shown.

        Returns whether the user replaced anything: full buffers that are filled already lack it.
        """
        replaced = False
        self.drop_parts()
        for handle in self.handles:
            replaced |= handle.write_back()
        if replaced:
            # Compute wrote into shards that an all-gather is about to read.
            self.streams.gather_after_compute()
        return replaced

    def take_replacements(self, notes_versions: bool) -> list[int] | None:
        """Before a prefetch: take over what the user replaced; the versions, if they are noted."""
        self.write_back()
        return self.versions() if notes_versions else None

    # -- full parameters as autograd knows them -------------------------------------------------

    def _tracked(self) -> list[list[torch.Tensor]]:
        """Per group, the full parameters as autograd knows them; frozen ones as plain views."""
        trainable: list[tuple[bool, ...]] = []
        for handle in self.handles:
            trainable.append(handle.trainable)
        # Autograd runs a node on the stream that it was made on: each stream has its own.
        stream = self.streams.number() if self.streams.runs_ahead else None
        key = (stream, self.full_precision, *trainable)
        known = self._nodes.get(key)
        if known is None:
            if len(self._nodes) == _PATTERNS_KEPT:
                # Graphs that lead to the oldest of them have all that they need.
                del self._nodes[next(iter(self._nodes))]
            known = self._nodes[key] = self._track(trainable)
        self.is_mixed = known.is_mixed
        return known.tensors

    def _track(self, trainable: Sequence[tuple[bool, ...]]) -> Tracked:
        # The node lives in autograd's graph, into which Python's garbage collector does not see: a
        # strong reference would keep the unit, and all its memory, for ever.
        reference = weakref.ref(self)

        def receive(gradients: Sequence[Gradients]) -> None:
            unit = reference()
            if unit is not None:
                assert unit._on_gradients is not None
                unit._on_gradients(unit, gradients)

        shown = [buffer.shown for buffer in self.full_buffers]
        tracked = track(shown, trainable, self.handles, receive)
        for buffer, tensors in zip(self.full_buffers, tracked.tensors, strict=True):
            buffer.follow(tensors)
        return tracked
