"""State of tensor-parallel parameters, as DTensors on a joint mesh with the unit's ranks.

Note: tensor parallelism comes first in the joint mesh
    A DTensor is sharded by the dimensions of its mesh in order. Tensor parallelism sharded the
    parameter first, and the unit then sharded each part, so the joint mesh has the dimensions of
    tensor parallelism before those of the unit. Each placement is then a plain ``Shard``, also if
    both shard the same dimension of the parameter, and if they do not divide it evenly.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

from ...engine.params.tensor_parallel import Distribution, is_distributed
from ...engine.runtime.unit import Unit
from .sharded_tensors import dtensor_of, is_sharded, local_rows, mesh_of

_meshes: weakref.WeakKeyDictionary[Unit, dict[Any, Any]] = weakref.WeakKeyDictionary()


def joint_mesh(unit: Unit, distribution: Distribution) -> Any:
    """The mesh of tensor parallelism and sharding, made of the existing process groups."""
    known = _meshes.setdefault(unit, {})
    if distribution.mesh not in known:
        known[distribution.mesh] = _make_joint_mesh(unit, distribution.mesh)
    return known[distribution.mesh]


def _make_joint_mesh(unit: Unit, parts: Any) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    own = mesh_of(unit)
    # Ranks form a regular grid: the distance of two ranks in one mesh is the same at every point
    # of the other.
    steps = parts.mesh - dist.get_rank()
    grid = steps.reshape(*parts.shape, *(1,) * own.ndim) + own.mesh
    groups = [mesh.get_group(i) for mesh in (parts, own) for i in range(mesh.ndim)]
    names = [f"parts_{i}" for i in range(parts.ndim)] + ["copies", "shards"][-own.ndim :]
    return DeviceMesh.from_group(groups, parts.device_type, mesh=grid, mesh_dim_names=tuple(names))


def joint_placements(unit: Unit, distribution: Distribution) -> tuple[Any, ...]:
    """The placements on the joint mesh: each rank has a chunk of the rows of its part."""
    from torch.distributed.tensor import Replicate, Shard

    copies = () if unit.copies is None else (Replicate(),)
    return (*distribution.placements, *copies, Shard(0))


def as_joint_dtensor(local: torch.Tensor, unit: Unit, distribution: Distribution) -> Any:
    """The DTensor of which ``local`` is this rank's chunk."""
    mesh, placements = joint_mesh(unit, distribution), joint_placements(unit, distribution)
    return dtensor_of(local, distribution.shape, mesh, placements)


def local_rows_of(value: Any, unit: Unit, distribution: Distribution | None) -> torch.Tensor | None:
    """This rank's chunk of a value that is sharded over the unit's ranks; None for a full value.

    Raises ValueError for a value whose chunks the unit's ranks cannot all-gather.
    """
    if distribution is None:
        return local_rows(value, unit.shards) if is_sharded(value) else None
    if not is_distributed(value):
        if is_sharded(value):
            raise ValueError(
                "the parameter is tensor-parallel in this model, which a ShardedTensor cannot "
                "represent. Load a DTensor or a full tensor"
            )
        return None
    found: Any = value.placements, value.device_mesh
    if found != (joint_placements(unit, distribution), joint_mesh(unit, distribution)):
        return None
    rows: torch.Tensor = value.to_local()
    return rows


def part_of(value: Any, distribution: Distribution | None) -> torch.Tensor:
    """The tensor-parallel part, which the unit's ranks share, of a value that is not in chunks.

    A DTensor with other placements is all-gathered first, by all ranks of its mesh.
    """
    if distribution is None:
        full: torch.Tensor = value
        return full
    if not is_distributed(value):
        return distribution.part(value)
    if value.device_mesh == distribution.mesh and value.placements == distribution.placements:
        local: torch.Tensor = value.to_local()
        return local
    return distribution.part(value.full_tensor())
