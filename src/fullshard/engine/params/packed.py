"""Frozen parameters of classes that pack their elements: quantised weights.

Note: packed elements are sharded, and objects are made from them
    Such a parameter consists of packed elements and of metadata: scales, the original shape, a
    code. A unit lays out, shards and all-gathers the packed elements; it never casts or reduces
    them, since their dtype says nothing about the numbers that they encode. From views of the full
    buffer, a :class:`Packing` makes, once per buffer, the object of the parameter's class with
    which the module computes. The class decides where the metadata is kept. A subclass whose
    instances have memory of their own (bitsandbytes) remains the parameter that users hold, with
    its attributes, which are whole on every rank. One that wraps inner tensors (torchao) is
    replaced by a plain parameter that contains all their bytes, so its scales are sharded, too.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

#: Inner tensors begin at multiples of this many bytes, as views of any dtype have to.
_ALIGNMENT = 16


class Packing:
    """The class of one frozen parameter, and how its packed elements become an object of it."""

    #: Whether users see a plain parameter of packed elements instead of the original outside of
    #: compute.
    is_hidden = False

    def assemble(self, packed: torch.Tensor, kept: Any) -> Any:
        """The whole parameter made from all its ``packed`` elements, whose memory it shares.

        ``kept`` is the parameter that users hold; it has the parts that are not sharded.
        """
        raise NotImplementedError

    def pack(self, value: torch.Tensor) -> torch.Tensor:
        """The packed elements of a whole parameter; raises ValueError if it is of another kind."""
        return value

    def saved(self, packed: torch.Tensor) -> Any:
        """The value in a full state dict, made from packed elements that nothing else uses."""
        return packed

    def names(self) -> Sequence[str]:
        """The names of the attributes that contain the parts that are not sharded."""
        return ()

    def aliases(self, kept: Any) -> Mapping[str, Any]:
        """Properties of the class's objects, to be set as attributes on a parameter of another
        class.

        ``torch.distributed.checkpoint`` follows names in state dicts from attribute to attribute.
        """
        return {}

    def tensors(self, kept: Any) -> list[torch.Tensor]:
        """The tensors that are whole on every rank, to be broadcast from one rank."""
        return []

    def move(self, kept: Any, device: torch.device) -> None:
        """Move the parts that are not sharded to the device that the unit computes on."""

    def adopt(self, kept: Any, new: Any) -> None:
        """Copy the metadata of ``new``, a parameter that users put in place of ``kept``, to
        ``kept``.
        """


@dataclasses.dataclass(frozen=True)
class _Inner:
    """The position of an inner tensor among the bytes of its parameter."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    start: int
    nbytes: int

    def of(self, packed: torch.Tensor) -> torch.Tensor:
        return packed[self.start : self.start + self.nbytes].view(self.dtype).view(self.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class InnerTensors(Packing):
    """A tensor subclass that wraps inner tensors: all their bytes, one after another."""

    kind: type[Any]
    inner: tuple[_Inner, ...]
    context: Any
    shape: torch.Size
    stride: tuple[int, ...]

    is_hidden = True

    @classmethod
    def of(cls, value: Any) -> InnerTensors:
        """The packing of ``value``; raises ValueError if its inner tensors are not plain ones."""
        names, context = value.__tensor_flatten__()
        inner: list[_Inner] = []
        end = 0
        for name in names:
            tensor = getattr(value, name)
            if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
                raise ValueError(f"its inner tensor {name!r} is a {type(tensor).__name__}")
            start = math.ceil(end / _ALIGNMENT) * _ALIGNMENT
            nbytes = tensor.numel() * tensor.itemsize
            inner.append(_Inner(name, tensor.dtype, tensor.shape, start, nbytes))
            end = start + nbytes
        return cls(type(value), tuple(inner), context, value.shape, value.stride())

    @functools.cached_property
    def numel(self) -> int:
        """The number of packed bytes."""
        return self.inner[-1].start + self.inner[-1].nbytes if self.inner else 0

    def assemble(self, packed: torch.Tensor, kept: Any) -> Any:
        inner = {each.name: each.of(packed) for each in self.inner}
        return self.kind.__tensor_unflatten__(inner, self.context, self.shape, self.stride)

    def pack(self, value: torch.Tensor) -> torch.Tensor:
        if type(value) is not self.kind:
            return value
        given = InnerTensors.of(value)
        if (given.inner, given.shape) != (self.inner, self.shape):
            raise ValueError(
                f"it is a {self.kind.__name__} of shape {tuple(given.shape)} with inner tensors "
                f"{_told(given.inner)}, and the model's has shape {tuple(self.shape)} and "
                f"{_told(self.inner)}"
            )
        tensors: Any = value
        packed = torch.zeros(self.numel, dtype=torch.uint8, device=value.device)
        for each in self.inner:
            each.of(packed).copy_(getattr(tensors, each.name))
        return packed

    def saved(self, packed: torch.Tensor) -> Any:
        return self.assemble(packed, None)


def _told(inner: Sequence[_Inner]) -> str:
    return ", ".join(f"{each.name} {each.dtype} {tuple(each.shape)}" for each in inner)


Packings = Mapping[nn.Parameter, Packing]


@dataclasses.dataclass(frozen=True, eq=False)
class Assembly:
    """Makes the object that a module computes with, of a view of the full buffer."""

    packing: Packing
    kept: nn.Parameter

    def assemble(self, view: torch.Tensor) -> Any:
        """The whole parameter of its packed elements."""
        return self.packing.assemble(view, self.kept)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor, whatever its class."""
    return tensor.detach().as_subclass(torch.Tensor)
