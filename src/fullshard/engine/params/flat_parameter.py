"""FlatParameter, the one parameter of a group, and its reference to the group's handle."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .layout import Piece

if TYPE_CHECKING:
    from .handle import FlatParamHandle


class _FlatParameterMeta(type(nn.Parameter)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor) and getattr(instance, "_is_flat_param", False)


class FlatParameter(nn.Parameter, metaclass=_FlatParameterMeta):
    """The parameter that contains a whole group; its data is this rank's shard.

    The object is a plain ``nn.Parameter`` with facts attached, because optimizers choose their
    fast paths by exact type; ``isinstance(p, FlatParameter)`` tells one from the others.
    ``_fqns``, ``_shapes``, ``_numels`` and ``_params`` describe the original parameters
    (``_params`` is None unless the originals stay visible).
    """

    _fqns: tuple[str, ...]
    _shapes: tuple[torch.Size, ...]
    _numels: tuple[int, ...]
    _params: list[nn.Parameter] | None
    _shard_param_infos: tuple[Piece, ...]

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True) -> FlatParameter:
        flat: Any = nn.Parameter(data, requires_grad=requires_grad)
        flat._is_flat_param = True
        return flat


class HandleReference:
    """A weak reference from a flat parameter to its handle; copies of it are empty."""

    def __init__(self, handle: FlatParamHandle | None = None) -> None:
        self._handle = None if handle is None else weakref.ref(handle)

    def __call__(self) -> FlatParamHandle | None:
        return None if self._handle is None else self._handle()

    def __reduce__(self) -> Any:
        return HandleReference, ()
