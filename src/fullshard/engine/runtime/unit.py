"""A unit: one wrapped module, its groups, and how they change between sharded and gathered.

The unit knows *how*; ``policy.py`` decides *when*, and ``forward.py`` and ``backward.py`` carry
that out. What becomes of its gradients is known by its ``reduction``. Its state is one of

    SHARDED ──start_gather──▶ GATHERING ──finish_gather──▶ GATHERED ──release──▶ SHARDED

and, apart from it, what the module's code finds under its parameters' names: a rank's pieces or
full parameters (``shows_full``).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ..comm.collectives import Group
from ..comm.pending_work import PendingWork, lost
from ..comm.streams import streams_for
from ..grads.gradients import Gradients
from ..grads.reduction import Reduction
from ..params.buffers import FullBuffer
from ..params.flat_param import FlatParamHandle
from .autograd import ParameterNode, is_handed_out
from .policy import UnitOptions, policy_for

if TYPE_CHECKING:
    from ..join.joining import Joining

#: How many sets of trainable parameters a unit remembers nodes for.
_PATTERNS_KEPT = 8


class State(Enum):
    """Where a unit's full parameters are."""

    SHARDED = auto()
    GATHERING = auto()
    GATHERED = auto()


class _Tracked(NamedTuple):
    """Full parameters as autograd knows them, per group, and the node that they come from."""

    node: ParameterNode | None
    tensors: list[list[torch.Tensor]]
    #: Whether some of them are frozen.
    is_mixed: bool


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
        self.device = device
        self.state = State.SHARDED
        self.shows_full = False
        #: Whether the gathered parameters are in the shards' own precision.
        self.exact = False
        #: Whether backward reduces gradients (False inside ``no_sync``).
        self.synchronizes = True
        #: Called with all full gradients of the unit (one per parameter) when they are there.
        self.on_gradients: Callable[[Unit, Sequence[Gradients]], None] | None = None
        #: The user's functions that are called before a forward of the unit.
        self.pre_hooks: Mapping[int, Any] = {}
        #: The units that the user asked to be prefetched when a backward reaches this one.
        self.prefetch_in_backward: Sequence[Unit] | None = None
        self.reduction = Reduction(self)
        self._gathers: list[PendingWork] = []
        #: Whether the gather in flight fills a buffer without a collective.
        self._copies_shards = False
        #: Whether what the gather in flight brings has to be copied to the full parameters.
        self._copies_out = False
        #: The full buffers in use, one per group; empty while sharded.
        self.gathered: list[FullBuffer] = []
        #: Whether full parameters are shown by ``summon_full_params``.
        self.summoned = False
        #: How many ``summon_full_params`` the unit is inside of, also if it has nothing to show.
        self.summoning = 0
        #: Whether they are shown on every rank that shares the shards.
        self.summoned_everywhere = False
        #: Whether some of the full parameters that were last tracked are frozen.
        self.is_mixed = False
        self._nodes: dict[Any, _Tracked] = {}
        #: Tells ranks that have run out of data what is done to the unit; inside of ``Join``.
        self.joining: Joining | None = None
        self._changes: list[int] = []
        #: The full parameters in place, one list per group.
        self._shown: list[list[torch.Tensor]] = []

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: what a unit is, without what it is in the middle of."""
        return {
            **self.__dict__,
            "on_gradients": None,
            "prefetch_in_backward": None,
            "pre_hooks": {},
            "joining": None,
            "_gathers": [],
            "gathered": [],
            "_nodes": {},
            "_changes": [],
            "_shown": [],
        }

    @property
    def device(self) -> torch.device:
        """Where the unit computes."""
        return self._device

    @device.setter
    def device(self, device: torch.device) -> None:
        self._device = device
        self.streams = streams_for(device)
        #: What is decided for this unit, on this kind of device, by its options.
        self.plan = policy_for(device.type).plan(self.options)

    @functools.cached_property
    def world_size(self) -> int:
        """Ranks that gradients are averaged over."""
        return self.shards.size * (self.copies.size if self.copies else 1)

    @functools.cached_property
    def offloads(self) -> bool:
        """Whether shards and gradients rest on the host, away from where the unit computes."""
        return any(handle.offload for handle in self.handles)

    @property
    def is_sharded(self) -> bool:
        """Whether a rank keeps a part of the parameters only."""
        return self.options.is_sharded

    @property
    def has_trainable(self) -> bool:
        return any(handle.has_trainable for handle in self.handles)

    def versions(self) -> list[int]:
        """Counts of in-place changes to the parameters that the user holds."""
        return [version for handle in self.handles for version in handle.versions()]

    def forget_views(self) -> None:
        """Drop what was derived from buffers that no longer exist."""
        self._nodes.clear()

    # -- gathering ----------------------------------------------------------------------------

    def start_gather(self, exact: bool = False) -> None:
        """Begin to fill the full buffers; no-op when they are full or being filled."""
        if self.state is not State.SHARDED:
            return
        if self.joining is not None:
            self.joining.tell("gather", self, exact)
        streams = self.streams
        self.exact = exact
        self.gathered = [handle.buffer(self._dtype(handle, exact)) for handle in self.handles]
        outputs: list[torch.Tensor] = []
        inputs: list[torch.Tensor] = []
        self._copies_shards = self._copies_out = False
        streams.take_again(self.gathered)
        streams.gather_may_write()
        with streams.on_gather():
            for handle, buffer in zip(self.handles, self.gathered, strict=True):
                buffer.allocate()
                if handle.layout.world_size == 1:
                    if not buffer.is_standing:
                        handle.gather_input(buffer)
                        self._copies_shards = True
                elif handle.layout.padded_numel > 0:
                    inputs.append(handle.gather_input(buffer))
                    outputs.append(buffer.gather_output)
                    self._copies_out = self._copies_out or buffer.is_copied_out
            if outputs:
                self._gathers = self.shards.gather(outputs, inputs, self.name)
        self.state = State.GATHERING

    def fill_again(self) -> None:
        """Let the gather that follows write into full buffers, which stay where they are."""
        if self.state is State.GATHERED:
            self.state = State.SHARDED

    def finish_gather(self) -> None:
        """Make the full buffers usable by compute."""
        if self.state is not State.GATHERING:
            return
        if self._copies_shards or self._copies_out:
            with self.streams.on_gather():
                self._wait()
                if self._copies_out:
                    self._copy_out()
            self.streams.compute_after_gather()
        elif self._gathers:
            # Orders compute behind the collective, which was itself ordered behind its inputs.
            self._wait()
        self.state = State.GATHERED

    def _copy_out(self) -> None:
        """Bring what was gathered from the order of ranks to that of parameters."""
        with torch.no_grad():
            for buffer in self.gathered:
                buffer.copy_out()

    @property
    def holds_a_copy(self) -> bool:
        """Whether what is gathered is a copy, in another precision or place, of whole shards."""
        return not self.is_sharded and any(not buffer.is_standing for buffer in self.gathered)

    def release(self, late: bool = False) -> None:
        """Give the full buffers back; the module must not be showing them."""
        if self.state is State.SHARDED:
            return
        self.finish_gather()
        streams = self.streams
        streams.give_back(self.gathered, late, self.options.limit_all_gathers)
        self.gathered = []
        self.state = State.SHARDED

    def _wait(self) -> None:
        gathers, self._gathers = self._gathers, []
        try:
            self.shards.wait(*gathers)
        except BaseException:
            # The collective may still write into these buffers: let them go unfreed.
            lost.append((gathers, self.gathered))
            for handle in self.handles:
                handle.forget_buffers()
            self.forget_views()
            self.gathered = []
            self.state = State.SHARDED
            raise

    def _dtype(self, handle: FlatParamHandle, exact: bool) -> torch.dtype:
        return handle.dtypes.shard if exact else handle.dtypes.compute

    # -- showing ------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """Agree with the other ranks that a pass begins with this unit."""
        kind = "forward" if torch.is_grad_enabled() else "evaluation"
        if not self.synchronizes:
            kind += " without synchronization"
        if self.joining is not None:
            self.joining.tell("begin", self, kind)
        self.agree_on_pass(kind)

    def agree_on_pass(self, kind: str) -> None:
        """Agree on this kind of pass, which may be one of other ranks."""
        for group in filter(None, (self.shards, self.copies)):
            group.begin_pass(kind, self.name)

    def agree_to_run(self) -> None:
        """Agree with the other ranks that the unit, which was gathered on a guess, runs."""
        if self.joining is not None:
            self.joining.tell("run", self)
        self.shards.agree("run", self.name)

    def show_full(self, tracked: bool) -> None:
        """Put full parameters in place; ``tracked`` ones lead autograd to the unit's reduce."""
        tensors = self._tracked() if tracked else [buffer.shown for buffer in self.gathered]
        for handle, full in zip(self.handles, tensors, strict=True):
            handle.show(full)
        self.shows_full, self._shown = True, tensors

    def show_sharded(self) -> None:
        if self.shows_full:
            for handle in self.handles:
                handle.show_sharded()
            self.shows_full, self._shown = False, []

    def shows_what_it_gathered(self) -> bool:
        """Whether nobody replaced the full parameters since they were put in place."""
        return all(
            handle.skip_writeback_check or handle.shows(full, buffer)
            for handle, full, buffer in zip(self.handles, self._shown, self.gathered, strict=True)
        )

    def lends(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in memory that goes when the full parameters go."""
        return any(buffer.holds(tensor) for buffer in self.gathered)

    def made(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` may lead autograd into this unit, and is not a parameter."""
        return tensor.grad_fn is not None and not (is_handed_out(tensor) or self.lends(tensor))

    def remember_values(self) -> None:
        """Note how often the full parameters, which stay in place, have been changed by now."""
        self._changes = [buffer.flat._version for buffer in self.gathered]

    def keep_changes(self) -> None:
        """Before full parameters go that no backward has used: keep what was done to them."""
        for handle, buffer, changes in zip(
            self.handles, self.gathered, self._changes, strict=False
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

        Returns whether there was anything: what is gathered already does not have it.
        """
        replaced = [handle.write_back() for handle in self.handles]
        if not any(replaced):
            return False
        # Compute wrote into shards that a gather is about to read.
        self.streams.gather_after_compute()
        return True

    def _tracked(self) -> list[list[torch.Tensor]]:
        """Per group, the full parameters as autograd knows them; frozen ones as plain views."""
        trainable = [handle.trainable for handle in self.handles]
        key = (self.exact, *trainable)
        known = self._nodes.get(key)
        if known is None:
            if len(self._nodes) == _PATTERNS_KEPT:
                # Graphs that lead to the oldest of them have all that they need.
                del self._nodes[next(iter(self._nodes))]
            known = self._nodes[key] = self._make_node(trainable)
        self.is_mixed = known.is_mixed
        return known.tensors

    def count_as_run_now(self) -> None:
        """Let autograd reach the unit's reduce before what ran earlier: see ``autograd.py``."""
        for known in self._nodes.values():
            if known.node is not None:
                known.node.born_now()

    def _make_node(self, trainable: list[tuple[bool, ...]]) -> _Tracked:
        tensors = [list(buffer.shown) for buffer in self.gathered]
        places = [(g, i) for g, flags in enumerate(trainable) for i, on in enumerate(flags) if on]
        is_mixed = len(places) < sum(map(len, trainable))
        if not places:
            return _Tracked(None, tensors, is_mixed)
        distributed = [
            (group, index, distribution)
            for group, index in places
            if (distribution := self.handles[group].distribution(index)) is not None
        ]

        # The node lives in autograd's graph, into which Python's garbage collector does not see: a
        # strong reference would keep the unit, and all its memory, for ever.
        reference = weakref.ref(self)

        def receive(found: tuple[torch.Tensor | None, ...]) -> None:
            unit = reference()
            if unit is None:
                return
            assert unit.on_gradients is not None
            if len(trainable) == 1 and not (is_mixed or distributed):
                # As most are: what was found is what there is.
                unit.on_gradients(unit, [found])
                return
            gradients: list[list[torch.Tensor | None]] = [[None] * len(t) for t in trainable]
            for (group, index), gradient in zip(places, found, strict=True):
                gradients[group][index] = gradient
            for group, index, distribution in distributed:
                gradients[group][index] = distribution.local_gradient(gradients[group][index])
            unit.on_gradients(unit, gradients)

        node = ParameterNode([tensors[g][i] for g, i in places], receive)
        for (group, index), output in zip(places, node.outputs, strict=True):
            tensors[group][index] = output
        return _Tracked(node, tensors, is_mixed)
