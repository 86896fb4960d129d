"""ExtendedRowHandle: parameters of tensor subclasses that decide what is all-gathered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..encoding.encodings import Encoding, Encodings
from .buffers import FullBuffer
from .extended_buffers import ExtendedBuffer
from .row_handle import RowHandle

_METHODS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


def is_extended(parameter: torch.Tensor) -> bool:
    """True if a parameter's class defines both all-gather methods; AssertionError if only one."""
    found = [name for name in _METHODS if hasattr(parameter, name)]
    if len(found) == 1:
        raise AssertionError(
            f"Both {' and '.join(_METHODS)} should be defined if one is, but "
            f"{type(parameter).__name__} has {found[0]} only"
        )
    return bool(found)


class ExtendedRowHandle(RowHandle):
    """Like its base class, but the rows of each parameter are a tensor of the user's class.

    There is no flat shard. Gradients are plain, and are reduced like all others.
    """

    def __init__(
        self, *args: Any, mesh: Any, policy: Any, encodings: Encodings | None, **options: Any
    ) -> None:
        # The subclass decides what is all-gathered, so encodings are ignored.
        super().__init__(*args, **options)
        self._mesh, self._policy = mesh, policy
        # Objects of subclasses have no address of their own that could be compared.
        self.skip_writeback_check = True

    def _shard_originals(self, originals: Sequence[nn.Parameter]) -> None:
        self.params = []
        locals_: list[torch.Tensor] = []
        with torch.no_grad():
            for index, original in enumerate(originals):
                rows = self.own_rows(index, original)
                local = rows.new_zeros(rows.shape)
                local.copy_(rows)
                whole = self.shardings[index].assemble(local)
                parameter = nn.Parameter(whole, requires_grad=original.requires_grad)
                for name, value in vars(original).items():
                    if name not in vars(parameter) and name not in _inner_names(original):
                        setattr(parameter, name, value)
                self.params.append(parameter)
                locals_.append(local)
        self.sharded = locals_
        self._adopt_locals(locals_)

    def _adopt_locals(self, locals_: Sequence[torch.Tensor]) -> None:
        if self.offload:
            locals_ = [local.to("cpu") for local in locals_]
        first = locals_[0]
        self.sharded = list(locals_)
        #: Empty; it has the dtype and the device of the rows.
        self.shard_tensor = torch.empty(0, dtype=first.dtype, device=first.device)
        self.forget_buffers()
        self._set_dtypes(first.dtype)
        self._bind()

    def _remember(self) -> None:
        super()._remember()
        self.versioned = [*self.params, *self.sharded]

    def buffer(self, gathered_in: torch.dtype | Encoding) -> FullBuffer:
        """The full parameters in a dtype, made at their first use."""
        assert isinstance(gathered_in, torch.dtype)
        buffer = self.full_buffers.get(gathered_in)
        if buffer is None:
            arguments = [
                (self._mesh, sharding.shape, sharding.stride, places[0].module, self._policy)
                for sharding, places in zip(self.shardings, self.places, strict=True)
            ]
            buffer = self.full_buffers[gathered_in] = ExtendedBuffer(
                lambda: self.sharded,
                arguments,
                gathered_in,
                self.device,
                self.layout.world_size,
                self.distributions,
            )
        return buffer

    def keep_changes(self, buffer: FullBuffer) -> None:
        """Do nothing: changes to full parameters of a subclass do not reach the rows."""


def _inner_names(tensor: Any) -> Sequence[str]:
    """The attributes in which a subclass keeps its inner tensors."""
    names: Sequence[str] = tensor.__tensor_flatten__()[0]
    return names
