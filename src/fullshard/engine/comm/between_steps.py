"""Collectives between steps: to and from a single rank, and of objects.

Initialisation, state dicts, checkpoints and clipping use them. Those of a step are in
``collectives.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .announcement import Announcements, announcements_of
from .messages import bytes_of, own_alias


class BetweenSteps:
    """The part of a :class:`Group` that no forward and no backward uses."""

    group: Any
    rank: int
    size: int

    if TYPE_CHECKING:

        def agree(self, verb: str, unit: str, *tensors: torch.Tensor) -> None: ...
        def pending(self, work: Any, *tensors: torch.Tensor) -> Any: ...
        def wait(self, *pending: Any) -> None: ...
        def wait_for_other(self, work: Any) -> None: ...

    @functools.cached_property
    def _announcements(self) -> Announcements | None:
        """Small messages over the group, in which ranks that are gone are noticed."""
        return announcements_of(self.group)

    def gather_to_first(
        self, outputs: Sequence[torch.Tensor], piece: torch.Tensor, unit: str
    ) -> None:
        """Fill ``outputs`` on the group's first rank, one per rank, with all ranks' pieces."""
        self.agree("gather to the first rank", unit, piece)
        options = dist.GatherOptions()
        options.rootRank = 0
        received = list(map(own_alias, outputs)) if self.rank == 0 else []
        piece = own_alias(piece)
        outputs_of_first = [received] if self.rank == 0 else []
        # Not in a variable: only the object that is waited for may hold the work.
        self.wait(
            self.pending(self.group.gather(outputs_of_first, [piece], options), piece, *received)
        )

    def broadcast(self, tensors: Sequence[torch.Tensor], unit: str) -> None:
        """Overwrite each tensor, which must be contiguous, with that of the group's first rank."""
        if self.size == 1:
            return
        self.agree("broadcast", unit, *tensors)
        options = broadcast_from(0)
        for tensor in map(bytes_of, tensors):
            self.wait(self.pending(self.group.broadcast([tensor], options), tensor))

    def broadcast_by(self, owner: int, tensor: torch.Tensor, unit: str) -> None:
        """Overwrite ``tensor``, which must be contiguous, with that of rank ``owner``."""
        if self.size == 1:
            return
        self.agree(f"broadcast from rank {owner}", unit, tensor)
        tensor = bytes_of(tensor)
        self.wait(self.pending(self.group.broadcast([tensor], broadcast_from(owner)), tensor))

    def scatter_from_first(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], unit: str
    ) -> None:
        """Fill ``output`` on each rank with the first rank's input for it, one per rank."""
        self.agree("scatter from the first rank", unit, output)
        options = dist.ScatterOptions()
        options.rootRank = 0
        sent = list(map(own_alias, inputs)) if self.rank == 0 else []
        output = own_alias(output)
        inputs_of_first = [sent] if self.rank == 0 else []
        self.wait(
            self.pending(self.group.scatter([output], inputs_of_first, options), output, *sent)
        )

    def gather_objects(self, value: Any, unit: str) -> list[Any]:
        """Every rank's ``value``. For small facts: they are pickled."""
        if self.size > 1:
            self.agree("gather facts", unit)
        return self.gather_objects_anywhere(value)

    def gather_objects_anywhere(self, value: Any) -> list[Any]:
        """Every rank's ``value``; ranks need not be at the same operation when they call this."""
        if self.size == 1:
            return [value]
        if self._announcements is not None:
            return self._announcements.objects_of_all(value, self.wait_for_other)
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def broadcast_object(self, value: Any, unit: str) -> Any:
        """The first rank's ``value``. For small facts: it is pickled."""
        if self.size == 1:
            return value
        self.agree("broadcast facts", unit)
        if self._announcements is not None:
            return self._announcements.object_of_first(value, self.wait_for_other)
        held = [value]
        dist.broadcast_object_list(held, dist.get_global_rank(self.group, 0), group=self.group)
        return held[0]


def broadcast_from(rank: int) -> Any:
    """Options of a broadcast by a group's ``rank``."""
    options = dist.BroadcastOptions()
    options.rootRank = rank
    return options
