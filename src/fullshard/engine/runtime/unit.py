"""A unit: one wrapped module, its groups, and how they change between sharded and unsharded.

The unit knows *how*; ``policy.py`` decides *when*, and ``forward.py`` and ``backward.py`` carry
that out. Its ``reduction`` takes the unit's gradients. Its state is one of

    SHARDED ──start_unshard──▶ UNSHARDING ──finish_unshard──▶ UNSHARDED ──reshard──▶ SHARDED

and, apart from it, ``shows_full`` says what the module's code finds under its parameters' names:
this rank's pieces or full parameters.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from itertools import chain
from typing import NoReturn

import torch

from ..comm.custom import gather_by
from ..comm.pending_work import kept_alive
from ..grads.gradients import Gradients
from ..params.buffers import FullBuffer, any_holds
from ..params.handle import REQUIRES_GRAD
from .autograd import Tracked, is_handed_out, track
from .unit_base import OnGradients, State, UnitBase

__all__ = ["OnGradients", "State", "Unit"]

#: How many sets of trainable parameters a unit remembers nodes for.
_PATTERNS_KEPT = 8

_VERSION = operator.attrgetter("_version")
_VERSIONED = operator.attrgetter("versioned")
_OPTIMIZER_PARAMS = operator.attrgetter("optimizer_params")


class Unit(UnitBase):
    """One unit's mechanism. ``handles`` has one entry per group, none if it has no parameters."""

    # -- parameters -------------------------------------------------------------------------------

    @property
    def has_trainable(self) -> bool:
        return True in map(REQUIRES_GRAD, chain.from_iterable(map(_OPTIMIZER_PARAMS, self.handles)))

    def versions(self) -> list[int]:
        """Counts of changes to the parameters that the user holds: in place, and replacements."""
        versioned = chain.from_iterable(map(_VERSIONED, self.handles))
        return [self._replacements, *map(_VERSION, versioned)]

    def was_changed_since(self, versions: list[int] | None) -> bool:
        """True if parameters were changed in place since ``versions`` were noted, if they were."""
        return versions is not None and versions != self.versions()

    def lends(self, tensor: torch.Tensor) -> bool:
        """True if ``tensor`` lies in the full buffers, and so is lost when they are released."""
        return any_holds(self.full_buffers, tensor)

    def made(self, tensor: torch.Tensor) -> bool:
        """True if ``tensor`` may lead autograd into this unit, and is not a parameter."""
        return tensor.grad_fn is not None and not (is_handed_out(tensor) or self.lends(tensor))

    def forget_views(self) -> None:
        """Drop autograd nodes that were made from buffers that no longer exist."""
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
            kind = handle.dtypes.shard if full_precision else handle.gathered_in
            buffers.append(handle.full_buffers.get(kind) or handle.buffer(kind))
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
        """Allocate the full buffers, and all-gather shards (or parts of a few ranks) into them."""
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
            if buffer.prepares_gather:
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
            elif not buffer.is_shard_backed:
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
        """Count as sharded, but keep the full buffers' memory for the next all-gather to fill."""
        if self.state is State.UNSHARDED:
            self.state = State.SHARDED

    def finish_unshard(self) -> None:
        """Make the full buffers usable by compute."""
        if self.state is not State.UNSHARDING:
            return
        if self.joining is not None:
            self.joining.tell("await", self)
        if self._copies_shards or self._copies_out:
            with self.streams.on_gather():
                self._wait()
                if self._copies_out:
                    # The copy may write where a unit was that was released since the all-gather
                    # began.
                    self.streams.gather_may_write()
                    self._copy_out()
            self.streams.compute_after_gather()
            if self.parts is not None:
                self.parts.drop()
        elif self._all_gathers:
            # Orders compute behind the collective, which was itself ordered behind its inputs.
            self._wait()
        self.state = State.UNSHARDED

    def _copy_out(self) -> None:
        """Copy, or decode, all-gathered data into the full parameters."""
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
        if self.joining is not None and self.parts is not None:
            self.joining.tell("reshard", self)
        buffers, self.full_buffers = self.full_buffers, []
        self.state = State.SHARDED
        if self.streams.runs_ahead:
            self.streams.give_back(buffers, late, self.options.limit_all_gathers)
        else:
            for buffer in buffers:
                buffer.release()

    def reshard_to_parts(self, late: bool = False) -> None:
        """Keep this rank's part of the full parameters, which a few ranks share, and reshard."""
        if self.state is State.UNSHARDED and self.parts is not None:
            if self.joining is not None:
                self.joining.tell("keep parts", self)
            self.parts.keep(self.full_buffers)
            self.shows_full, self._shown = False, []
        self.reshard(late)

    def drop_parts(self) -> None:
        """Forget what a forward has left to a few ranks: parameters may have changed since."""
        if self.parts is None or not self.parts.held:
            return
        if self.state is State.UNSHARDING and not self.streams.capture_is_lost:
            # An all-gather is reading them; they go when it has ended.
            self.finish_unshard()
            return
        if self.joining is not None:
            self.joining.tell("drop parts", self)
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
        """Put tracked full parameters in place; their autograd nodes count as made now.

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

    def check_summoned(self) -> None:
        """Raise an error if the forward of this unit, which is summoned, would have gradients."""
        if torch.is_grad_enabled() and self.has_trainable:
            raise RuntimeError(
                f"Forward of unit {self.name!r} inside summon_full_params would leave its "
                "gradients unreduced; run it under torch.no_grad(), or outside of the context"
            )

    def refuse_backward(self) -> NoReturn:
        """The backward has come to this unit, which is summoned."""
        raise ValueError(
            f"Backward of unit {self.name!r} inside summon_full_params: expected to be in "
            "states [<TrainingState.IDLE: 1>] but current state is "
            "TrainingState.SUMMON_FULL_PARAMS. Run it before, or after, the context"
        )

    def check_unchanged(self) -> None:
        """Raise an error if full parameters were replaced that a backward is about to use."""
        if not self.shows_what_it_unsharded():
            self.forget_views()
            raise AssertionError(
                "FSDP does not support changing the parameters between forward and backward "
                f"(unit {self.name!r} under {self.options.strategy}); change them after backward, "
                "or use a strategy that frees parameters after forward"
            )

    # -- changes by the user --------------------------------------------------------------------

    def note_full_versions(self) -> None:
        """Note how often the full parameters, which stay in place, have been changed by now."""
        self._changes = [buffer.flat._version for buffer in self.full_buffers]

    def keep_changes(self) -> None:
        """Copy the user's changes to full parameters into the shards, before these are released."""
        for handle, buffer, changes in zip(
            self.handles, self.full_buffers, self._changes, strict=False
        ):
            if buffer.flat._version == changes:
                continue
            if buffer.flat.dtype != handle.dtypes.shard or buffer.is_lossy:
                encoded = " of encoded parameters" if buffer.is_lossy else ""
                raise AssertionError(
                    "FSDP does not support changing the parameters between forward and backward "
                    f"(unit {self.name!r}, which computes in {buffer.flat.dtype}{encoded}: the "
                    "change would lose precision); change them before forward, or in "
                    "summon_full_params"
                )
            handle.keep_changes(buffer)
        self._changes = []

    def keep_changes_so_far(self) -> None:
        """Copy the user's changes to full parameters into the shards; full ones stay in place."""
        if self._changes:
            self.keep_changes()
            self.note_full_versions()
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
            self._replacements += 1
            # Compute wrote into shards that an all-gather is about to read.
            self.streams.gather_after_compute()
        return replaced

    def take_replacements(self, notes_versions: bool) -> list[int] | None:
        """Before a prefetch, take over what the user replaced; return versions if noted."""
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
