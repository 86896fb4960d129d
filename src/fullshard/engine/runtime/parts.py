"""Full parameters that a forward reshards to a few ranks only, for the backward.

This lies between resharding to all ranks and not resharding: a few ranks, such as those of one
host, together keep one copy of the parameters, and backward's all-gather is among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..comm.collectives import Group
from ..comm.streams import HostStreams
from ..params.buffers import FullBuffer, Part
from ..params.handle import FlatParamHandle


class FewRanks(NamedTuple):
    """The ranks that keep full parameters together.

    ``mesh`` has two dimensions: the copies of the parts, and the few ranks. Without a mesh, users
    do not see the parts.
    """

    group: Group
    mesh: Any


class Parts:
    """This rank's part of one unit's full parameters, kept between forward and backward."""

    def __init__(
        self, handles: Sequence[FlatParamHandle], few: FewRanks, streams: HostStreams
    ) -> None:
        self.group = few.group
        self._few = few
        self._handles = handles
        self._streams = streams
        #: The parts that hold values now; none while the unit is sharded over all ranks.
        self.held: list[Part] = []
        self._known: dict[FlatParamHandle, tuple[Part, list[nn.Parameter] | None]] = {}
        self._written: Any = None

    @property
    def are_shown(self) -> bool:
        """True if users see the parts after a forward, instead of sharded parameters."""
        return self._few.mesh is not None

    def keep(self, buffers: Sequence[FullBuffer]) -> None:
        """Keep this rank's parts of the full parameters in ``buffers``, and show them."""
        with torch.no_grad():
            for handle, buffer in zip(self._handles, buffers, strict=True):
                known = self._known.get(handle)
                if known is None or known[0].full is not buffer:
                    part = handle.part(buffer, self.group.size, self.group.rank)
                    known = self._known[handle] = part, handle.shown_part(part, self._few.mesh)
                known[0].keep()
                self.held.append(known[0])
                if known[1] is None:
                    handle.show_sharded()
                else:
                    handle.show(known[1])
        self._written = self._streams.note_compute()

    def fit(self, buffers: Sequence[FullBuffer]) -> bool:
        """True if there are parts that fill these buffers; others are dropped."""
        if self.held and [part.full for part in self.held] != list(buffers):
            self.drop()
        return bool(self.held)

    def begin_gather(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The outputs and inputs of an all-gather over the few ranks; called on its stream."""
        self._streams.gather_after(self._written)
        for part in self.held:
            part.begin_gather()
        return [p.gather_output for p in self.held], [p.gather_input for p in self.held]

    def drop(self) -> None:
        """Release the parts, and show the parameters that are sharded over all ranks."""
        if not self.held:
            return
        held, self.held = self.held, []
        for handle, part in zip(self._handles, held, strict=True):
            handle.show_sharded()
            part.release()
