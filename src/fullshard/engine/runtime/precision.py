"""Casts a unit's inputs to compute precision, and its buffers to ``buffer_dtype``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .pytrees import replace_tensors, tensors_in


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with its floating-point tensors in ``dtype``; gradients flow back through it."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        # Most have it already; comparing takes a tenth of the time of calling ``to``.
        if tensor.dtype is dtype or not tensor.is_floating_point():
            return tensor
        return tensor.to(dtype)

    return replace_tensors(value, cast)


def cast_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A module's arguments with their floating-point tensors in ``dtype``."""
    if len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor and args[0].dtype is dtype:
        # As most units are called: by one that computes in the same dtype.
        return args, kwargs
    cast: tuple[tuple[Any, ...], dict[str, Any]] = cast_floating((args, kwargs), dtype)
    return cast


def floating_dtype(value: Any) -> torch.dtype | None:
    """The dtype of the first floating-point tensor in ``value``, if there is one."""
    floating = (t.dtype for t in tensors_in(value) if t.is_floating_point())
    return next(floating, None)


def move(value: Any, device: torch.device) -> Any:
    """``value`` with its tensors on ``device``."""
    return replace_tensors(value, lambda tensor: tensor.to(device, non_blocking=True))


class BufferPrecision:
    """Keeps a unit's buffers in their compute dtype, and knows the dtype they came in."""

    def __init__(self, modules: Iterable[nn.Module], dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._lowered = False
        self._original: list[tuple[nn.Module, str, torch.dtype]] = []
        if dtype is not None:
            self._original = [
                (module, name, buffer.dtype)
                for module in modules
                for name, buffer in module._buffers.items()
                if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype
            ]

    def registered(self, module: nn.Module) -> dict[str, torch.dtype]:
        """The dtypes in which the user registered those buffers of ``module`` that are cast."""
        return {name: dtype for owner, name, dtype in self._original if owner is module}

    def lower(self) -> None:
        """Cast buffers to the compute dtype."""
        if not self._lowered:
            self._cast([(module, name, self._dtype) for module, name, _ in self._original])
            self._lowered = True

    def restore(self) -> None:
        """Cast buffers back to the dtype in which the user registered them."""
        if self._lowered:
            self._cast(self._original)
            self._lowered = False

    @staticmethod
    def _cast(places: Iterable[tuple[nn.Module, str, torch.dtype | None]]) -> None:
        """Cast the buffers at ``places``; one that several modules share stays one."""
        cast: dict[torch.Tensor, torch.Tensor] = {}
        # A buffer that was made in inference mode could not take part in training later.
        with torch.inference_mode(False):
            for module, name, dtype in places:
                buffer = module._buffers[name]
                if buffer is not None:
                    if buffer not in cast:
                        cast[buffer] = buffer.to(dtype)
                    module._buffers[name] = cast[buffer]


#: For units whose buffers stay in the dtype in which the user registered them.
UNCHANGED_BUFFERS = BufferPrecision((), None)
