"""Follows conversions of the whole model: ``.to()`` and its like, copies, and pickles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..comm.streams import streams_for
from ..encoding.encodings import Encoding
from .buffers import FullBuffer, ReduceBuffer
from .flat_parameter import FlatParameter, HandleReference
from .locations import ParameterLocation
from .replacements import refuse_replaced_views
from .unused_parameters import UsedParameterMarks

if TYPE_CHECKING:
    from .handle import Dtypes


class Conversion:
    """The part of a handle that moves, converts and copies it between steps."""

    module: nn.Module
    params: list[nn.Parameter]
    places: Sequence[Sequence[ParameterLocation]]
    use_orig_params: bool
    offload: bool
    device: torch.device
    dtypes: Dtypes
    flat_param: FlatParameter
    shard_tensor: torch.Tensor
    sharded: Sequence[torch.Tensor]
    full_buffers: dict[torch.dtype | Encoding, FullBuffer]
    reduce_buffers: dict[torch.dtype, ReduceBuffer]
    _used_marks: UsedParameterMarks | None

    if TYPE_CHECKING:

        def adopt_shard(self, shard: torch.Tensor) -> None: ...
        def forget_buffers(self) -> None: ...
        def _bind(self) -> None: ...
        def _describe(self, reference: HandleReference) -> None: ...
        def _reference(self) -> HandleReference: ...
        def _note_received(self) -> None: ...

    def rebind(self) -> None:
        """Point parameters at the shard again, after their data was set to other tensors."""
        self._describe(self._reference())
        self._bind()

    @property
    def _orig_param_dtype(self) -> torch.dtype:
        """The shard's dtype. Between wrapping and the first forward it may be assigned: that is
        how accelerate keeps a model in full precision that was loaded in a lower one.
        """
        return self.dtypes.shard

    @_orig_param_dtype.setter
    def _orig_param_dtype(self, dtype: torch.dtype) -> None:
        shard = self.shard_tensor.to(dtype)
        self.adopt_shard(streams_for(self.device).rest_on_host(shard) if self.offload else shard)

    def converted(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Follow ``module.to(...)`` and its like, which converted each parameter on its own."""
        for index, places in enumerate(self.places if self.use_orig_params else ()):
            found = places[0].module._parameters[places[0].name]
            if found is not None:
                self.params[index] = found
        if not self.use_orig_params:
            refuse_replaced_views(self.places, self.sharded)
            flat: Any = self.module._parameters["_flat_param"]
            self.flat_param = flat
        shard = convert(self.shard_tensor)
        if self.offload:
            shard = streams_for(self.device).rest_on_host(shard)
        else:
            self.device = shard.device
        self.forget_buffers()
        self._describe(self._reference())
        self.adopt_shard(shard)

    def __getstate__(self) -> dict[str, Any]:
        """The handle's state, without the views and buffers that follow from it."""
        buffers = {"full_buffers", "reduce_buffers", "_used_marks"}
        views = {"sharded", "_containers", "_keys", "_visible", "versioned", "_expected"}
        noted = {"_received", "receive", "forget_received", "_absent"}
        derived = {*buffers, *views, *noted}
        return {key: value for key, value in self.__dict__.items() if key not in derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.full_buffers, self.reduce_buffers, self._used_marks = {}, {}, None
        self._note_received()
        self.flat_param.data = self.shard_tensor
        self.rebind()
