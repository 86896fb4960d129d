"""Parameters that tensor parallelism has distributed (DTensors) before their module is wrapped.

Note: a unit shards the local part
    A DTensor consists of a rank's local part and of placements, which say how the parts of all
    ranks of its mesh form the whole. When a unit is built, each DTensor parameter is replaced by a
    plain one that holds the local part; it is laid out, sharded, gathered, reduced and stepped like
    any other, among the ranks that have the same part. A :class:`Distribution` keeps the mesh and
    the placements. The module computes with DTensors again: views of the full buffer, made once
    with the buffer, that lead autograd to the same node as plain parameters. Their gradients are
    DTensors, maybe with partial placements; they are redistributed to the parameter's own
    placements before they are reduced like all others.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..comm.collectives import Group, group_for
from ..comm.process_groups import ProcessGroups
from .locations import find_locations


@dataclasses.dataclass(frozen=True, eq=False)
class Distribution:
    """The way in which local parts of a parameter, one per rank of ``mesh``, make up the whole."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    #: Dimensions of the mesh over which the unit itself sums partial gradients.
    unreduced: tuple[int, ...] = ()

    @classmethod
    def of(cls, tensor: Any, unreduced: tuple[int, ...] = ()) -> Distribution:
        """The distribution of a DTensor."""
        mesh, stride = tensor.device_mesh, tensor.stride()
        return cls(mesh, tensor.placements, tensor.shape, stride, unreduced)

    def __deepcopy__(self, memo: dict[int, Any]) -> Distribution:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "A unit with tensor-parallel parameters cannot be pickled: their device mesh consists "
            "of process groups that another process would not know. Save a state dict"
        )

    @functools.cached_property
    def groups(self) -> tuple[Group, ...]:
        """This rank's group in each of the mesh's dimensions."""
        device = torch.device(self.mesh.device_type)
        return tuple(group_for(self.mesh.get_group(i), device) for i in range(self.mesh.ndim))

    @functools.cached_property
    def parts(self) -> tuple[Group, ...]:
        """Those of the groups whose ranks have different parts; in the others all are the same."""
        pairs = zip(self.groups, self.placements, strict=True)
        return tuple(group for group, placement in pairs if placement.is_shard())

    def assemble(self, local: torch.Tensor) -> Any:
        """The DTensor of which ``local`` is this rank's part; shares its memory."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            local.detach(),
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )

    def whole(self, local: torch.Tensor) -> torch.Tensor:
        """The whole parameter, from the local parts of all ranks of the mesh, which all call it."""
        whole: torch.Tensor = self.assemble(local).full_tensor()
        return whole

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole parameter, as a view."""
        for placement, count, position in zip(
            self.placements, self.mesh.shape, self.mesh.get_coordinate(), strict=True
        ):
            if placement.is_shard():
                chunks = whole.chunk(count, placement.dim)
                nothing = whole.narrow(placement.dim, 0, 0)
                whole = chunks[position] if position < len(chunks) else nothing
        return whole

    def distribute(self, whole: torch.Tensor) -> Any:
        """A whole parameter, which every rank has, as a DTensor; one of another shape as it is."""
        if whole.shape != self.shape:
            return whole
        return self.assemble(self.part(whole))

    def local_gradient(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """This rank's part of a gradient, summed where the mesh has only computed terms of it."""
        if gradient is None or not is_distributed(gradient):
            return gradient
        return local_part(self.placed(gradient))

    def placed(self, gradient: Any) -> Any:
        """A DTensor gradient, distributed as the parameter is."""
        placements = list(self.placements)
        for dim in self.unreduced:
            if gradient.placements[dim].is_partial():
                placements[dim] = gradient.placements[dim]
        with torch.no_grad():
            return gradient.redistribute(self.mesh, placements)


#: One entry per parameter of a group, or none at all where no parameter is distributed.
Distributions = Sequence[Distribution | None]


def is_distributed(tensor: Any) -> bool:
    """True if ``tensor`` is a DTensor; if the program has not imported them, there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Any) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    local: torch.Tensor = tensor._local_tensor.detach() if is_distributed(tensor) else tensor
    return local


#: What makes the object that a module computes with of a view, with ``assemble``; as above.
Presentations = Sequence[Any]


def as_shown(views: list[torch.Tensor], presentations: Presentations) -> list[torch.Tensor]:
    """Full parameters as the module's code expects them: distributed ones as DTensors."""
    if not presentations:
        return views
    return [
        view if presentation is None else presentation.assemble(view)
        for view, presentation in zip(views, presentations, strict=True)
    ]


# -- when a unit is built -------------------------------------------------------------------------


def localize(
    module: nn.Module,
    parameters: list[nn.Parameter],
    groups: ProcessGroups,
    unreduced: tuple[int, ...] = (),
) -> tuple[list[nn.Parameter], dict[nn.Parameter, Distribution]]:
    """Replace DTensors among the ``parameters`` of ``module`` by plain ones that hold local parts.

    Returns the parameters after that, and how each of the new ones is distributed; in the
    ``unreduced`` dimensions of their mesh nothing but the unit sums their gradients.
    """
    found = [parameter for parameter in parameters if is_distributed(parameter)]
    if not found:
        return parameters, {}
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    distributions: dict[nn.Parameter, Distribution] = {}
    for parameter, places in find_locations(module, found).items():
        _check(parameter, places[0].path, groups)
        local = nn.Parameter(local_part(parameter), requires_grad=parameter.requires_grad)
        local.__dict__.update(parameter.__dict__)
        for place in places:
            place.module._parameters[place.name] = local
        replaced[parameter] = local
        distributions[local] = Distribution.of(parameter, unreduced)
    return [replaced.get(p, p) for p in parameters], distributions


def distributions_of(
    parameters: Sequence[nn.Parameter], known: Mapping[nn.Parameter, Distribution]
) -> Distributions:
    """The ``known`` distribution of each parameter; nothing where none has any."""
    found = tuple(map(known.get, parameters))
    return found if any(found) else ()


def _check(parameter: Any, path: str, groups: ProcessGroups) -> None:
    from torch.distributed.tensor import Replicate, Shard

    for placement in parameter.placements:
        # Exactly these: in some versions of torch other kinds of Shard are derived from it.
        if type(placement) not in (Replicate, Shard):
            raise ValueError(
                f"Parameter {path!r} is a DTensor with placements {parameter.placements}; a "
                "parameter to be sharded must be placed by Shard and Replicate alone. "
                "Redistribute it before wrapping"
            )
    mesh = parameter.device_mesh
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"Parameter {path!r} is a DTensor on {mesh}, which rank {dist.get_rank()} is not part "
            "of; every rank that wraps the module must be"
        )
    theirs = set(mesh.mesh.flatten().tolist())
    for group in groups.shards, groups.copies:
        if isinstance(group, dist.ProcessGroup):
            ours = dist.get_process_group_ranks(group)
            common = sorted(theirs.intersection(ours))
            if common != [dist.get_rank()]:
                raise ValueError(
                    f"Parameter {path!r} is a DTensor over ranks {sorted(theirs)}, and sharding "
                    f"it over ranks {sorted(ours)} would share ranks {common}, which hold "
                    "different parts of it. Tensor parallelism and sharding need dimensions of "
                    "their own in one mesh: parallelize_module(model, mesh['tp'], ...), then "
                    "FullyShardedDataParallel(model, device_mesh=mesh['dp'])"
                )
