"""Handles of groups whose parameters are of classes that pack their elements: see ``packed.py``."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .buffers import FullBuffer
from .handle import FlatParamHandle
from .packed import Assembly, Packing, Packings
from .row_handle import RowHandle

if TYPE_CHECKING:
    _Base = FlatParamHandle
else:
    _Base = object


class _Packed(_Base):
    """The part that both handles of packed parameters share."""

    packings: Sequence[Packing]

    def _set_dtypes(self, dtype: torch.dtype) -> None:
        # Even if packed elements have a floating-point dtype: they encode other numbers.
        self._mixed_precision = (None, None)
        super()._set_dtypes(dtype)

    def presentations(self) -> Sequence[Any]:
        pairs = zip(self.packings, self.params, strict=True)
        return [Assembly(packing, kept) for packing, kept in pairs]

    def packed(self, index: int, value: torch.Tensor) -> torch.Tensor:
        try:
            return self.packings[index].pack(value)
        except ValueError as error:
            path = self.places[index][0].path
            raise ValueError(f"A new value of parameter {path!r} does not fit: {error}") from None

    def saved(self, index: int, value: torch.Tensor) -> Any:
        return self.packings[index].saved(value)

    def is_hidden(self, index: int) -> bool:
        return self.packings[index].is_hidden

    def adopt_replacement(self, index: int, new: nn.Parameter) -> None:
        self.packings[index].adopt(self.params[index], new)

    def shows(self, tensors: Sequence[torch.Tensor], buffer: FullBuffer) -> bool:
        # Objects that wrap inner tensors have no addresses to be compared.
        expected = map(tensors.__getitem__, self._indices)
        found = map(operator.getitem, self._containers, self._keys)
        return not any(map(operator.is_not, found, expected))

    def _move_facts(self) -> None:
        """Move the parts that are not sharded to the unit's device."""
        device = self.device if self.offload else self.shard_tensor.device
        for packing, kept in zip(self.packings, self.params, strict=True):
            packing.move(kept, device)


class PackedFlatHandle(_Packed, FlatParamHandle):
    """One group of packed parameters of a wrapper, with original parameters."""

    def __init__(self, params: Sequence[nn.Parameter], *args: Any, packings: Packings, **kw: Any):
        self.packings = [packings[parameter] for parameter in params]
        super().__init__(params, *args, **kw)
        self._move_facts()

    @property
    def _orig_param_dtype(self) -> torch.dtype:
        """The packed elements' dtype, in which they stay: accelerate assigns float32."""
        return self.dtypes.shard

    @_orig_param_dtype.setter
    def _orig_param_dtype(self, dtype: torch.dtype) -> None:
        self.adopt_shard(self.shard_tensor)

    def converted(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        def move(shard: torch.Tensor) -> torch.Tensor:
            # A conversion to another dtype would destroy packed elements.
            return shard.to(convert(shard.new_empty(0)).device)

        super().converted(move)
        self._move_facts()


class PackedRowHandle(_Packed, RowHandle):
    """One group of packed parameters of ``fully_shard``, of which every rank holds rows."""

    def __init__(self, params: Sequence[nn.Parameter], *args: Any, packings: Packings, **kw: Any):
        self.packings = [packings[parameter] for parameter in params]
        #: By parameter, the attributes that contain the parts that are not sharded.
        self._facts = [self._facts_of(i, parameter) for i, parameter in enumerate(params)]
        super().__init__(params, *args, **kw)
        self._move_facts()

    def _facts_of(self, index: int, parameter: nn.Parameter) -> dict[str, Any]:
        return {name: getattr(parameter, name) for name in self.packings[index].names()}

    def _as_sharded(self, index: int, parameter: Any) -> Any:
        if parameter.dtype != self.shard_tensor.dtype:
            # The conversion destroyed its packed elements; the shard still has them.
            own = self.sharded[index].to(parameter.device)
            parameter = nn.Parameter(self.shardings[index].assemble(own), requires_grad=False)
        return super()._as_sharded(index, parameter)

    def _bind(self) -> None:
        # Conversions exchange a DTensor's content, attributes included, for that of a new one.
        for parameter, facts in zip(self.params, self._facts, strict=True):
            for name, value in facts.items():
                if not hasattr(parameter, name):
                    setattr(parameter, name, value)
        super()._bind()

    def _adopt_locals(self, locals_: Sequence[torch.Tensor]) -> None:
        super()._adopt_locals(locals_)
        self._move_facts()

    def _move_facts(self) -> None:
        super()._move_facts()
        for packing, parameter in zip(self.packings, self.params, strict=True):
            vars(parameter).update(packing.aliases(parameter))
        self._facts = [self._facts_of(i, parameter) for i, parameter in enumerate(self.params)]
