"""The parts and settings of a unit, and facts that follow from them.

``unit.py`` adds what a step does with it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ..comm.collectives import Group
from ..comm.streams import streams_for
from ..grads.gradients import Gradients
from ..grads.reduction import Reduction
from ..params.buffers import FullBuffer
from ..params.handle import FlatParamHandle
from .autograd import Tracked
from .parts import FewRanks, Parts
from .policy import UnitOptions, policy_for

if TYPE_CHECKING:
    from ..join.joining import Joining
    from .unit import Unit

#: Takes a unit and, per group, one full gradient or None for each parameter.
OnGradients = Callable[["Unit", Sequence[Gradients]], None]


class State(Enum):
    """The state of a unit's full parameters."""

    SHARDED = auto()
    UNSHARDING = auto()
    UNSHARDED = auto()


class UnitBase:
    """One unit's parts and settings; see :class:`Unit`, which all units are."""

    if TYPE_CHECKING:

        def drop_parts(self) -> None: ...

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
        #: Whether a backward leaves full parameters in place for the next forward, if no graph
        #: captures it: a graph that began with the next forward would contain no all-gather.
        self.stays_between_passes = False
        #: Whether backward computes with the full parameters (an embedding's does not).
        self.unshards_in_backward = True
        #: What the user brings to all-gather with.
        self._gather_comm: Any = None
        self.reduction = Reduction(cast("Unit", self))
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
        #: How often what the user replaced was taken over.
        self._replacements = 0
        #: The full parameters in place, one list per group.
        self._shown: list[list[torch.Tensor]] = []

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: the unit without the state of a running step."""
        return {
            **self.__dict__,
            "prefetch_in_backward": None,
            "pre_hooks": {},
            "joining": None,
            "_on_gradients": None,
            "_all_gathers": [],
            "_gathers_over": self.shards,
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
        """Send what is done to the unit to ranks that have run out of data; None: no longer."""
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
        """Choose whether backward unshards the unit; the user may know that it need not."""
        self.unshards_in_backward = enabled

    def keep_parts(self, few: FewRanks | None) -> None:
        """Set the few ranks that share full parameters between forward and backward, or None."""
        self.drop_parts()
        self.parts = None if few is None else Parts(self.handles, few, self.streams)

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
        """Count the ``summon_full_params`` contexts that the unit is inside of."""
        self.summoning += 1
        try:
            yield
        finally:
            self.summoning -= 1

    # -- facts ------------------------------------------------------------------------------------

    @property
    def groups(self) -> list[Group]:
        """The groups that the unit communicates over."""
        few = None if self.parts is None else self.parts.group
        found = (self.shards, self.copies, self.reduction.own_group, few)
        return [*dict.fromkeys(group for group in found if group is not None)]

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
    def holds_a_copy(self) -> bool:
        """True if the full buffers are a copy, in another precision or place, of whole shards."""
        return not self.is_sharded and any(
            not buffer.is_shard_backed for buffer in self.full_buffers
        )
