"""The placement of parameters: the dimension that each is cut along, and the ranks.

``shard_placement_fn`` may name another mesh for some parameters of a module than for the others, as
for experts. Each mesh gets a unit of its own; the units of one module run one inside the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard

from ..engine.params.locations import find_locations
from .meshes import DataParallelMesh, mesh_of_shards

PlacementOf = Callable[[nn.Parameter], Any]


@dataclasses.dataclass(frozen=True)
class Share:
    """The parameters of a module that are shared over the same mesh, and what each is cut along."""

    mesh: DataParallelMesh
    parameters: list[nn.Parameter]
    asked: list[int]

    def dims(self, root: nn.Module, parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, int]:
        """The dimension along which each parameter is cut, of those that stand for the originals.

        They are this rank's parts of tensor-parallel ones.
        """
        dims: dict[nn.Parameter, int] = {}
        for (name, parameter), dim in zip(named(root, parameters), self.asked, strict=True):
            dim = dim + parameter.dim() if dim < 0 else dim
            size = self.mesh.shard_size
            if dim != 0 and parameter.shape[dim] % size:
                raise NotImplementedError(
                    f"FSDP does not support uneven sharding on dim {dim}: {parameter.size()} "
                    f"(world size: {size}), parameter {name}"
                )
            dims[parameter] = dim
        return dims


def shares_of(
    root: nn.Module,
    parameters: Sequence[nn.Parameter],
    default: DataParallelMesh,
    placement_of: PlacementOf | None,
) -> list[Share]:
    """The parameters by the mesh that shares them, those on the ``default`` one first.

    Without any parameter on the default mesh, the first of the others stands for it.
    """
    shares: list[Share] = [Share(default, [], [])]
    for name, parameter in named(root, parameters):
        if parameter.dim() == 0:
            raise ValueError(
                "fully_shard doesn't support scalar parameters. Change "
                f"{name} to a 1D tensor with numel equal to 1."
            )
        asked: Any = None if placement_of is None else placement_of(parameter)
        share = shares[0]
        if hasattr(asked, "mesh_info") and hasattr(asked, "placement"):
            share, asked = _share_over(asked.mesh_info, shares, name), asked.placement
        if asked is not None and not isinstance(asked, Shard):
            raise ValueError(
                f"Invalid shard_placement_fn result: {asked} (for {name}; it may return "
                "Shard(dim), None for Shard(0), or a ShardPlacementResult of one of both and a "
                "mesh)"
            )
        dim = 0 if asked is None else asked.dim
        if not -parameter.dim() <= dim < parameter.dim():
            raise AssertionError(
                f"Shard dim {dim} is invalid for {parameter.dim()}D tensor: {parameter.shape} "
                f"(parameter {name!r}): shard_placement_fn has to name a dimension that it has"
            )
        share.parameters.append(parameter)
        share.asked.append(dim)
    return [share for share in shares if share.parameters] or shares


def _share_over(info: Any, shares: list[Share], name: str) -> Share:
    """The share of parameters on the mesh of ``info``, an ``FSDPMeshInfo`` of torch's."""
    mesh = info.mesh
    dims = (info.replicate_mesh_dim, info.shard_mesh_dim)
    if dims != ((None, 0) if mesh.ndim == 1 else (0, 1)) or info.dp_mesh_dims is not None:
        raise NotImplementedError(
            f"shard_placement_fn gave parameter {name!r} {info}: pass FSDPMeshInfo(mesh, "
            "shard_mesh_dim=0) with a mesh of one dimension, or HSDPMeshInfo(mesh, "
            "shard_mesh_dim=1, replicate_mesh_dim=0) with one of two"
        )
    known = next((share for share in shares if share.mesh.mesh == mesh), None)
    if known is None:
        known = Share(mesh_of_shards(mesh), [], [])
        shares.append(known)
    return known


def named(
    root: nn.Module, parameters: Sequence[nn.Parameter]
) -> Iterable[tuple[str, nn.Parameter]]:
    """The parameters with their paths below ``root``."""
    places = find_locations(root, parameters)
    return [(places[parameter][0].path, parameter) for parameter in parameters]
