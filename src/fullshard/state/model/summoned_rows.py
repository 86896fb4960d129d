"""The full parameters of a group that ``fully_shard`` keeps as DTensors, while they are summoned.

A DTensor cannot become a plain tensor, so others are registered in its place. Optimizers and users
keep the DTensors, which have what was written back when the context is left.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ...engine.grads.gradients import set_gradient
from ...engine.params.buffers import FullBuffer
from ...engine.params.replacements import check_shape, parameter_at
from ...engine.params.row_handle import RowHandle
from ...engine.params.tensor_parallel import as_shown, local_part


class SummonedRows:
    """One group of a summoned unit, of which every rank holds rows."""

    def __init__(self, handle: RowHandle, buffer: FullBuffer, to_cpu: bool) -> None:
        self._handle = handle
        self._views = [view.to("cpu") if to_cpu else view for view in buffer.views]
        self._parameters = [
            # Of a class of parameters already, whose attributes a new one would lack.
            shown
            if isinstance(shown, nn.Parameter)
            else nn.Parameter(shown, requires_grad=parameter.requires_grad)
            for shown, parameter in zip(
                as_shown(self._views, handle.presentations()), handle.params, strict=True
            )
        ]
        handle.show(self._parameters)
        self._with_gradient: set[int] = set()
        self._shows_gradients = False

    def show_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Let the full parameters have full gradients."""
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self._with_gradient.add(index)
                parameter = self._parameters[index]
                gradient = gradient.to(parameter.device)
                distribution = self._handle.distribution(index)
                if distribution is not None:
                    gradient = distribution.assemble(gradient)
                set_gradient(parameter, gradient)
        self._shows_gradients = True

    def reshard(self, writeback: bool) -> None:
        """Register the DTensors again, with the changes that were made if they are kept."""
        try:
            if writeback:
                found = [self._registered(index) for index in range(len(self._parameters))]
                self._store(found)
                if self._shows_gradients:
                    self._store_gradients(found)
        finally:
            self._handle.show_sharded()

    def _registered(self, index: int) -> nn.Parameter:
        """The parameter that is registered now; a replacement in any of a shared one's places."""
        shown = self._parameters[index]
        found = [parameter_at(place) for place in self._handle.places[index]]
        return next((parameter for parameter in found if parameter is not shown), shown)

    def _store(self, found: Sequence[nn.Parameter]) -> None:
        handle = self._handle
        for index, parameter in enumerate(found):
            local = handle.packed(index, local_part(parameter))
            # All of it, on every rank, so that all ranks raise the error.
            check_shape("parameter", handle.places[index][0], self._views[index], local)
            if parameter is not self._parameters[index]:
                handle.adopt_replacement(index, parameter)
            handle.store(index, local)
            handle.params[index].requires_grad_(parameter.requires_grad)

    def _store_gradients(self, found: Sequence[nn.Parameter]) -> None:
        for index, parameter in enumerate(found):
            kept = self._handle.params[index]
            if parameter.grad is None:
                kept.grad = None
                continue
            rows = self._handle.own_rows(index, local_part(parameter.grad))
            if kept.grad is not None:
                self._handle.local_gradient(kept).copy_(rows)
            elif index not in self._with_gradient:
                set_gradient(kept, self._handle.distributed(kept, rows.clone()))
