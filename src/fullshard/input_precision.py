"""The precision and device of a forward's inputs, and the precision of buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .api import MixedPrecision
from .engine.runtime.precision import (
    BufferPrecision,
    cast_floating,
    cast_inputs,
    floating_dtype,
    move,
)
from .engine.runtime.unit import Unit
from .engine.runtime.untraced import untraced


class InputPrecision(nn.Module):
    """Moves inputs to the unit's device, and casts them and buffers, before a forward."""

    mixed_precision: MixedPrecision
    _unit: Unit
    _buffer_precision: BufferPrecision
    _is_root: bool | None
    _full_precision_in_eval: bool
    #: Whether the module keeps full precision among modules that compute in a lower one.
    _exempt: bool

    #: Whether inputs or buffers may have to be cast or moved before a forward.
    _adapts_inputs = True

    #: The dtype in which an exempt module was called, and to which its output is cast back.
    _outside_dtype: torch.dtype | None = None

    @untraced
    def _adapt_inputs(
        self, full_precision: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move inputs to the unit's device, and cast inputs and buffers as its precision says."""
        unit, precision = self._unit, self.mixed_precision
        if unit.device.type != "cpu" and self._is_root:
            args, kwargs = move((args, kwargs), unit.device)
        if full_precision:
            self._buffer_precision.restore()
        else:
            self._buffer_precision.lower()
            dtype = precision.param_dtype
            casts = precision.cast_forward_inputs or (
                self._is_root and precision.cast_root_forward_inputs
            )
            if dtype is not None and casts:
                args, kwargs = cast_inputs(args, kwargs, dtype)
        if self._exempt and self._own_dtype is not None:
            self._outside_dtype = floating_dtype((args, kwargs))
            args, kwargs = cast_floating((args, kwargs), self._own_dtype)
        return args, kwargs

    @property
    def _changes_precision_or_place(self) -> bool:
        """True if inputs or buffers of the unit may have to be cast or moved before a forward."""
        precision = self.mixed_precision
        return (
            self._unit.device.type != "cpu"
            or precision.param_dtype is not None
            or precision.buffer_dtype is not None
            or self._exempt
            or self._full_precision_in_eval
        )

    @property
    def _own_dtype(self) -> torch.dtype | None:
        """The dtype in which an exempt module computes: its parameters', or its statistics'."""
        if self._unit.handles:
            return self._unit.handles[0].dtypes.shard
        return floating_dtype(list(self.buffers()))
