"""A parameter that is stepped as a whole tensor: its pieces on all ranks, and its stand-in.

Note: stand-ins
    The optimizer that steps whole tensors is made with a stand-in for each of them, on all ranks: a
    parameter of the whole shape whose storage has no memory. On a parameter's owner, the stand-in
    has the whole tensor and its gradient while a step lasts, and the optimizer steps it. On other
    ranks no optimizer has it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..engine.params.layout import Slot
from ..engine.params.row_handle import RowHandle
from ..engine.params.row_layout import RowLayout
from ..engine.params.tensor_parallel import is_distributed, local_part
from ..state.model.gathering import in_buffer_order
from .routes import Parcel
from .selection import Found
from .unread import unreadable


class WholeParameter:
    """One parameter of the model, with its owner among the ranks that share its pieces."""

    def __init__(self, found: Found, owner: int) -> None:
        self.name = found.name
        self.parameter: Any = found.parameter
        self.group = found.unit.shards
        self.owner = owner
        self.is_mine = owner == self.group.rank
        self.device = found.unit.device
        self.dtype = found.handle.dtypes.shard
        self._made_for = (self.dtype, found.handle.device)
        self.shape = tuple(found.shape)
        self.numel = math.prod(self.shape)
        #: What has the parameter, with others of its unit.
        self.handle = found.handle
        self._unit = found.unit
        self._index = found.index
        self._slot: Slot = found.handle.layout.slots[found.index]
        layout, index = found.handle.layout, found.index
        self.parcel = Parcel(owner, found.sizes, found.handle.is_sharded)
        self.holds_piece = self.parcel.sizes[self.group.rank] > 0
        #: Along which dimension rows are cut, if not along the first.
        self._dim = layout.chunks[index].dim if isinstance(layout, RowLayout) else 0
        self._stride = self._slot.stride
        empty = torch.empty_strided(self.shape, self._stride, dtype=self.dtype, device=self.device)
        empty.untyped_storage().resize_(0)
        self.stand_in = nn.Parameter(empty)
        self.stand_in.fqn = self.name  # type: ignore[attr-defined]

    def note_made(self) -> None:
        """Give the stand-in data that raises an error when read: the optimizer has been made.

        Until then the stand-in has the parameter's strides, and no memory behind them: reading it
        would crash the process.
        """
        self._nothing = unreadable(self.shape, self.dtype, self.device)
        self.stand_in.data = self._nothing

    @property
    def is_cut_in_rows(self) -> bool:
        """True if users see a DTensor."""
        return isinstance(self.handle, RowHandle)

    # -- pieces -------------------------------------------------------------------------------

    def piece(self) -> torch.Tensor:
        """This rank's piece, as a flat view of the parameter that the user holds."""
        return self._flat(local_part(self.parameter).detach())

    def gradient(self) -> torch.Tensor | None:
        """This rank's piece of the gradient, flat; None if there is none."""
        found = self.parameter.grad
        return None if found is None else self._flat(local_part(found).detach())

    def check(self) -> None:
        """Raise for what is so of all of its unit's parameters, and on all ranks."""
        if self._unit.summoned:
            raise RuntimeError(
                f"The values of {self.name} are those of summon_full_params, which replace the "
                "shards when it ends: a step of the shards would be lost. Step outside of it"
            )
        if self.handle.keeps_local_gradients:
            raise RuntimeError(
                f"The gradient of {self.name} is not reduced over the ranks yet, since the last "
                "backward was inside no_sync(). Step after a backward outside of it"
            )
        dtype, device = self.handle.dtypes.shard, self.handle.device
        if (dtype, device) != self._made_for:
            raise RuntimeError(
                f"The optimizer of whole tensors was made when parameter {self.name} was "
                f"{self._made_for[0]} on {self._made_for[1]}, and it is {dtype} on {device} now. "
                "Make the optimizer after the model has been moved or converted"
            )

    def check_is_the_models(self) -> None:
        """Raise if the model's parameter is another object now, which would not be stepped."""
        if self.handle.params[self._index] is not self.parameter:
            raise RuntimeError(
                f"Parameter {self.name} is another object than when the optimizer of whole tensors "
                "was made: load_state_dict(assign=True) and to_empty() replace parameters. Make "
                "the optimizer after that"
            )

    def _flat(self, piece: torch.Tensor) -> torch.Tensor:
        if piece.dim() == 1:
            return piece
        return piece.reshape(-1) if self.parcel.is_sharded else in_buffer_order(self._slot, piece)

    def as_piece(self, flat: torch.Tensor) -> torch.Tensor:
        """A flat piece of a state tensor as an optimizer over shards has it.

        That is the shape of the parameter's own piece: a DTensor where the parameter is one.
        """
        if self.is_cut_in_rows:
            from torch.distributed.tensor import DTensor

            local = flat.view(local_part(self.parameter).shape)
            return DTensor.from_local(
                local,
                self.parameter.device_mesh,
                self.parameter.placements,
                run_check=False,
                shape=self.parameter.shape,
                stride=self.parameter.stride(),
            )
        return flat if self.parcel.is_sharded else flat.as_strided(self.shape, self._stride)

    def from_piece(self, value: Any) -> torch.Tensor | None:
        """The flat piece in a state tensor that :meth:`as_piece` may have shaped, else None."""
        if is_distributed(value):
            if tuple(value.shape) != self.shape or not is_distributed(self.parameter):
                return None
            wanted = self.parameter
            return local_part(value.redistribute(wanted.device_mesh, wanted.placements)).reshape(-1)
        if not self.parcel.is_sharded or self.is_cut_in_rows or not self.holds_piece:
            return None
        return value if tuple(value.shape) == (self.parcel.sizes[self.group.rank],) else None

    # -- whole tensors ------------------------------------------------------------------------

    def whole(self, flat: torch.Tensor) -> torch.Tensor:
        """All pieces, one rank's after the other's, as a tensor of the parameter's shape."""
        if self._dim == 0:
            return flat.as_strided(self.shape, self._stride)
        before, after = self.shape[: self._dim], self.shape[self._dim + 1 :]
        chunks = flat.view(
            self.group.size, *before, self.shape[self._dim] // self.group.size, *after
        )
        return chunks.movedim(0, self._dim).reshape(self.shape)

    def pieces_of(self, whole: torch.Tensor) -> torch.Tensor:
        """The elements of a whole tensor, one rank's after the other's, flat."""
        if self._dim == 0:
            return in_buffer_order(self._slot, whole)
        chunks = whole.unflatten(self._dim, (self.group.size, -1))
        return chunks.movedim(self._dim, 0).reshape(-1)

    def cuts_of(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        """The pieces that travel from the owner: each rank's, or all of it at once."""
        if not self.parcel.is_sharded:
            return [flat]
        return flat.split([size for size in self.parcel.sizes if size])

    def put_in_place(self, value: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Give the stand-in the whole parameter and its gradient; on the owner."""
        self.stand_in.data = value
        self.stand_in.grad = gradient

    def take_away(self) -> torch.Tensor:
        """The stepped parameter, flat; its stand-in has no memory afterwards."""
        flat = self.pieces_of(self.stand_in.data)
        self.stand_in.grad = None
        self.stand_in.data = self._nothing
        return flat
