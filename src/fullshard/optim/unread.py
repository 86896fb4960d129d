"""Values of stand-ins are not there while an optimizer is made: reading them is an error."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class ReadingIsRefused(TorchDispatchMode):
    """Raises RuntimeError where the values of tensors without memory are read or written.

    ``names`` are those of the tensors. Operations that look at shapes alone are carried out.
    """

    def __init__(self, names: Mapping[torch.Tensor, str]) -> None:
        super().__init__()
        self._names = {_memory_of(tensor): name for tensor, name in names.items()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {**kwargs} if kwargs else {}
        if not _looks_at_shapes_alone(func):
            for leaf in tree_leaves((args, given)):
                name = self._names.get(_memory_of(leaf)) if _has_memory(leaf) else None
                if name is not None:
                    raise RuntimeError(
                        f"The values of parameter {name} were read or written by {func} while the "
                        "optimizer of whole tensors was made. Parameters have their values while "
                        "they are stepped only: let the optimizer make such state in its first step"
                    )
        return func(*args, **given)


def _looks_at_shapes_alone(func: Any) -> bool:
    name = func.overloadpacket.__name__
    return bool(func.is_view) or name == "detach" or name.startswith("new_") or "_like" in name


def _has_memory(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided


def _memory_of(tensor: torch.Tensor) -> int:
    """The same for all views of one memory."""
    return tensor.untyped_storage()._cdata


def unreadable(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of numbers that are none, all in the memory of one element: nobody is to read it.

    An optimizer that does, through a list of its own, gets numbers that show it; to write is an
    error of torch's.
    """
    return _not_a_number(dtype, device).expand(shape)


@functools.cache
def _not_a_number(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((), math.nan, dtype=dtype, device=device)
