"""Data-parallel dimensions of a mesh on which parameters are DTensors already (``dp_mesh_dims``).

The model computes with DTensors on the whole mesh, replicated in its data-parallel dimensions. In
those, a gradient may be ``Partial``: a term of a sum that is not made yet. The engine's reduce
makes that sum, so such gradients are taken as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..engine.comm.process_groups import ALONE, ProcessGroups
from ..engine.params.row_sharding import RowSharding
from ..engine.params.tensor_parallel import Distribution
from .meshes import DataParallelMesh, _concatenate, _strided_shard
from .policies import DataParallelMeshDims


@dataclasses.dataclass(frozen=True)
class DimensionsOfMesh(DataParallelMesh):
    """The data-parallel dimensions of a mesh that has others, too.

    ``mesh`` is the mesh that users see, in which several dimensions of shards are one; ``whole`` is
    the mesh that was given, and ``reduced`` are its data-parallel dimensions.
    """

    whole: DeviceMesh
    reduced: tuple[int, ...]

    def sharding(
        self, parameter: nn.Parameter, dim: int, distribution: Distribution | None
    ) -> RowSharding:
        """The DTensor that users see of ``parameter``: as given, but for its shards."""
        assert distribution is not None
        assert self.whole.mesh_dim_names is not None
        assert self.mesh.mesh_dim_names is not None
        known: dict[str, Any] = dict(
            zip(self.whole.mesh_dim_names, distribution.placements, strict=True)
        )
        placements = [known.get(name, Replicate()) for name in self.mesh.mesh_dim_names]
        if self.shard_dim is not None:
            after = range(self.shard_dim + 1, self.mesh.ndim)
            parts = [self.mesh.size(i) for i in after if placements[i].is_shard(dim)]
            placements[self.shard_dim] = _strided_shard(dim, parts) if parts else Shard(dim)
        return RowSharding(
            self.mesh, tuple(placements), dim, distribution.shape, distribution.stride
        )


def dimensions_of(mesh: Any, dims: DataParallelMeshDims) -> DimensionsOfMesh:
    """The data-parallel dimensions ``dims`` of ``mesh``, checked."""
    names = getattr(mesh, "mesh_dim_names", None)
    if names is None:
        raise ValueError("mesh must have mesh_dim_names when dp_mesh_dims is provided")
    shard, copies = _as_tuple(dims.shard), _as_tuple(dims.replicate)
    for name in (*shard, *copies):
        if name not in names:
            raise ValueError(f"Mesh dim name {name!r} not found in mesh.mesh_dim_names {names}")
    if not (shard or copies) or len({*shard, *copies}) < len(shard) + len(copies):
        raise ValueError(
            f"dp_mesh_dims must name different dimensions of {names}, but shard is {shard} and "
            f"replicate is {copies}"
        )
    # Slices first: torch refuses names that are not in the mesh's order.
    groups = ProcessGroups(
        _flat(mesh, shard).get_group() if shard else ALONE,
        _flat(mesh, copies).get_group() if copies else None,
    )
    sharded = [names.index(name) for name in shard]
    others = [index for index in range(mesh.ndim) if index not in sharded]
    size = groups.shards.size()
    ranks = mesh.mesh.permute(*others, *sharded).reshape(-1, size).tolist()
    shown, shard_dim = _shown(mesh, names, shard, copies)
    reduced = tuple(names.index(name) for name in (*shard, *copies))
    return DimensionsOfMesh(shown, groups, shard_dim, ranks, mesh, reduced)


def _shown(
    mesh: DeviceMesh, names: tuple[str, ...], shard: tuple[str, ...], copies: tuple[str, ...]
) -> tuple[DeviceMesh, int | None]:
    """The mesh that users see, and its dimension of shards; several of those become one."""
    if not shard:
        return mesh, None
    if len(shard) == 1:
        return mesh, names.index(shard[0])
    rest = tuple(name for name in names if name not in (*shard, *copies))
    parts = [_slice(mesh, copies)] if copies else []
    parts.append(_flat(mesh, shard))
    if rest:
        parts.append(_slice(mesh, rest))
    return _concatenate(parts), len(copies)


def _slice(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh if names == mesh.mesh_dim_names else mesh[names]


def _flat(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    part = _slice(mesh, names)
    return part._flatten() if part.ndim > 1 else part


def _as_tuple(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else tuple(names)


def check_parameters(
    named: Iterable[tuple[str, nn.Parameter]], mesh: DimensionsOfMesh, dims: DataParallelMeshDims
) -> None:
    """Refuse (ValueError) parameters that are no DTensors on the mesh, replicated where they
    should be."""
    names = mesh.whole.mesh_dim_names or ()
    kinds = [("shard", name) for name in _as_tuple(dims.shard)]
    kinds += [("replicate", name) for name in _as_tuple(dims.replicate)]
    for path, parameter in named:
        if not isinstance(parameter, DTensor):
            raise ValueError(
                "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD "
                "mesh (e.g. via distribute_module). Got plain tensor for parameter "
                f"'{path.rpartition('.')[2]}' ({path!r})."
            )
        if parameter.device_mesh != mesh.whole:
            raise ValueError(
                "Expected param's DTensor mesh to be the same mesh passed to fully_shard, but got "
                f"different mesh objects: {path!r} is on {parameter.device_mesh}, and the mesh is "
                f"{mesh.whole}"
            )
        for kind, name in kinds:
            index = names.index(name)
            placement = parameter.placements[index]
            if not placement.is_replicate():
                raise ValueError(
                    f"Expected Replicate() on DP {kind} dim {name!r} (index {index}) but got "
                    f"{placement} (parameter {path!r})"
                )
