"""Takes over DTensors, and their local parts, that the user replaced between steps."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..comm.streams import streams_for
from .replacements import parameter_at
from .row_layout import RowLayout
from .row_sharding import RowSharding
from .tensor_parallel import Distributions, is_distributed
from .write_back import WriteBack

_LOCAL = operator.attrgetter("_local_tensor")


class RowWriteBack(WriteBack):
    """The part of a row handle that compares the registered DTensors with those it registered.

    The flat handle's compares addresses; this one, which objects the local parts are.
    """

    device: torch.device
    offload: bool
    layout: RowLayout
    shardings: Sequence[RowSharding]
    distributions: Distributions

    if TYPE_CHECKING:

        def adopt_shard(self, shard: torch.Tensor) -> None: ...
        def own_rows(self, index: int, whole: torch.Tensor) -> torch.Tensor: ...
        def _views_of(self, shard: torch.Tensor) -> list[torch.Tensor]: ...
        def _bind(self) -> None: ...

    def write_back(self) -> bool:
        """Take over parameters, or their local parts, that the user replaced since the last use.

        ``load_state_dict(assign=True)``, ``to_empty`` and ``to`` do, and users may. Returns whether
        there were any.
        """
        found = map(operator.getitem, self._containers, self._keys)
        try:
            same = not any(map(operator.is_not, found, self._visible))
        except KeyError:
            # Something was removed; what, is told below.
            same = False
        if same and not any(map(operator.is_not, map(_LOCAL, self.params), self.sharded)):
            return False
        self._take_over_parameters()
        return True

    def _take_over_parameters(self) -> None:
        with torch.no_grad():
            locals_: list[torch.Tensor] = []
            for index, places in enumerate(self.places):
                old = self.params[index]
                found = [parameter_at(place) for place in places]
                new = next((parameter for parameter in found if parameter is not old), old)
                self.params[index] = self._as_sharded(index, new)
                locals_.append(_LOCAL(self.params[index]))
            self._adopt_locals(locals_)

    def _as_sharded(self, index: int, parameter: Any) -> Any:
        """``parameter`` if it is sharded as its place wants it, or its own rows if it is whole."""
        sharding, path = self.shardings[index], self.places[index][0].path
        if is_distributed(parameter):
            same = parameter.device_mesh == sharding.mesh
            if not same or tuple(parameter.placements) != sharding.placements:
                raise RuntimeError(
                    f"Parameter {path!r} was replaced by a DTensor with placements "
                    f"{parameter.placements} on {parameter.device_mesh}, but fully_shard placed "
                    f"it with {sharding.placements} on {sharding.mesh}. Redistribute it: "
                    "new.redistribute(old.device_mesh, old.placements)"
                )
            self._check_shape(path, sharding.shape, parameter.shape)
            return parameter
        if self.distributions and self.distributions[index] is not None:
            raise RuntimeError(
                f"Parameter {path!r}, which is tensor-parallel, was replaced by a plain tensor: "
                "replace it by a DTensor with the mesh and placements of the old one"
            )
        self._check_shape(path, sharding.shape, parameter.shape)
        local = self.own_rows(index, parameter).clone()
        return nn.Parameter(sharding.assemble(local), requires_grad=parameter.requires_grad)

    @staticmethod
    def _check_shape(path: str, expected: torch.Size, given: torch.Size) -> None:
        if expected != given:
            raise RuntimeError(
                f"Parameter {path!r} was replaced by one of shape {tuple(given)}, but "
                f"fully_shard sharded one of shape {tuple(expected)}: shapes cannot change"
            )

    def _adopt_locals(self, locals_: Sequence[torch.Tensor]) -> None:
        """Copy local parts into the shard, or a new one where dtype or device are others."""
        kinds = {(local.dtype, local.device) for local in locals_}
        if len(kinds) > 1:
            told = ", ".join(f"{dtype} on {device}" for dtype, device in sorted(kinds, key=str))
            raise RuntimeError(
                f"The parameters of {type(self.module).__name__} that fully_shard keeps together "
                f"became {told}: they must stay of one dtype, on one device"
            )
        ((dtype, device),) = kinds
        shard = self.shard_tensor
        if (dtype, device) == (shard.dtype, shard.device):
            for view, local in zip(self.sharded, locals_, strict=True):
                if local is not view:
                    # Into the memory that full parameters are gathered from.
                    view.data.copy_(local)
            self._bind()
            return
        shard = streams_for(device).lasting_zeros(self.layout.shard_numel, dtype)
        if device.type != "meta":
            for view, local in zip(self._views_of(shard), locals_, strict=True):
                view.copy_(local)
        if self.offload:
            shard = streams_for(self.device).rest_on_host(shard)
        self.adopt_shard(shard)

    def converted(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Follow ``module.to(...)`` and its like, which converted each parameter on its own."""
        self.write_back()
