"""The wrapped module, seen through its wrapper: attributes, items, parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .engine.params.locations import WRAPPED_MODULE, clean_tensor_name
from .engine.params.replacements import refuse_attribute_beside_flat_param
from .engine.runtime.forward import Schedule
from .engine.runtime.unit import Unit


class WrappedModule(nn.Module):
    """The names and attributes of the wrapped module, as a wrapper shows them."""

    _unit: Unit
    _schedule: Schedule | None

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._modules[WRAPPED_MODULE]  # type: ignore[return-value]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED_MODULE:
                raise
            return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor) and "_unit" in self.__dict__:
            for handle in self._unit.handles:
                if not handle.use_orig_params:
                    refuse_attribute_beside_flat_param(self.module, name, handle.places)
        super().__setattr__(name, value)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under the names they have in the unwrapped model."""
        for name, parameter in self._registered_parameters(prefix, recurse, remove_duplicate):
            yield clean_tensor_name(name), parameter

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The parameters alone: clipping asks for them in every step, and names take longer."""
        for _, parameter in self._registered_parameters(recurse=recurse):
            yield parameter

    def _registered_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under the names they are registered by, wrappers' prefixes included."""
        if self._schedule is not None:
            self._schedule.await_clean_up()
        yield from super().named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Buffers under the names they have in the unwrapped model."""
        for name, buffer in super().named_buffers(prefix, recurse, remove_duplicate):
            yield clean_tensor_name(name), buffer
