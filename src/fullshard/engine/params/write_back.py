"""Takes over parameters, and their data, that the user replaced between steps."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .flat_parameter import FlatParameter
from .locations import ParameterLocation
from .replacements import check_shape, parameter_at, refuse_replaced_views

_GRADIENT = operator.attrgetter("grad")


class WriteBack:
    """The part of a handle that compares the registered parameters with those it registered."""

    module: nn.Module
    params: list[nn.Parameter]
    places: Sequence[Sequence[ParameterLocation]]
    use_orig_params: bool
    skip_writeback_check: bool
    #: Whether the gradients that the user sees are unreduced ones (see ``no_sync``).
    local_gradients: bool
    flat_param: FlatParameter
    shard_tensor: torch.Tensor
    sharded: Sequence[torch.Tensor]
    #: The parameters through which the user, or an optimizer, changes the shard.
    optimizer_params: Sequence[nn.Parameter]
    _containers: Sequence[Any]
    _keys: Sequence[str]
    _visible: Sequence[Any]
    _expected: Sequence[torch.Tensor]
    _addresses: Sequence[int]

    if TYPE_CHECKING:

        def _remember(self) -> None: ...
        def show_sharded(self) -> None: ...

    def write_back(self) -> bool:
        """Take over parameters, or their data, that the user replaced since the last use.

        Returns whether there were any.

        When nothing was replaced this takes two passes in C: over the identity and the addresses of
        the parameters that the user can reach. Replaced gradients are in place already; only their
        shapes are checked.
        """
        if self.skip_writeback_check:
            return False
        if not self.local_gradients:
            self._check_gradients()
        if list(map(torch.Tensor.data_ptr, self.optimizer_params)) == self._addresses:
            found = map(operator.getitem, self._containers, self._keys)
            try:
                if not any(map(operator.is_not, found, self._visible)):
                    return False
            except KeyError:
                # A parameter was removed: the error is raised below.
                pass
        if self.use_orig_params:
            self._take_over_parameters()
        else:
            self._take_over_flat()
        return True

    def _check_gradients(self) -> None:
        for index, gradient in enumerate(map(_GRADIENT, self.optimizer_params)):
            if gradient is not None and gradient.shape != self._expected[index].shape:
                where = self.where(self.optimizer_params[index])
                check_shape("gradient", where, self._expected[index], gradient)

    def where(self, parameter: nn.Parameter) -> ParameterLocation | nn.Module:
        """A parameter's location for error messages, or the module if it is a flat parameter."""
        places = (p for p, own in zip(self.places, self.params, strict=False) if own is parameter)
        return next((each[0] for each in places), self.module)

    def _take_over_flat(self) -> None:
        refuse_replaced_views(self.places, self.sharded)
        flat = self.flat_param.data
        check_shape("parameter", self.module, self.shard_tensor, flat)
        # In place: full parameters, and tensors that autograd saved, may lie in this memory.
        self.shard_tensor.data.copy_(flat)
        self.flat_param.data = self.shard_tensor

    def _take_over_parameters(self) -> None:
        with torch.no_grad():
            replaced: list[tuple[int, nn.Parameter, torch.Tensor]] = []
            for index, (places, view) in enumerate(zip(self.places, self.sharded, strict=True)):
                old = self.params[index]
                found = [parameter_at(place) for place in places]
                new = next((parameter for parameter in found if parameter is not old), old)
                if new is old and old.data_ptr() == view.data_ptr():
                    continue
                check_shape("parameter", places[0], view, new)
                value = new.detach()
                if value.untyped_storage().data_ptr() == view.untyped_storage().data_ptr():
                    # It lies in another parameter's piece, which may be overwritten as well.
                    value = value.clone()
                replaced.append((index, new, value))
            for index, new, value in replaced:
                self.sharded[index].data.copy_(value)
                new.data = self.sharded[index]
                self.params[index] = new
        self._remember()
        self.show_sharded()
