"""State of tensor-parallel parameters: DTensors over their own mesh and the unit's ranks at once.

Note: the mesh of the parts comes first
    A DTensor is cut by its mesh's dimensions in order. A parameter was cut by tensor parallelism
    first, and each part then by the ranks that share it, so the joint mesh has the dimensions of
    tensor parallelism before those of sharding. Every cut is then a plain ``Shard``, also where
    both cut the same dimension and where they do not divide it.
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
    """A mesh of tensor parallelism by sharding, of the process groups that there are already."""
    known = _meshes.setdefault(unit, {})
    if distribution.mesh not in known:
        known[distribution.mesh] = _make_joint_mesh(unit, distribution.mesh)
    return known[distribution.mesh]


def _make_joint_mesh(unit: Unit, parts: Any) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    own = mesh_of(unit)
    # Ranks are counted regularly: a step in one mesh is the same step everywhere in the other.
    steps = parts.mesh - dist.get_rank()
    grid = steps.reshape(*parts.shape, *(1,) * own.ndim) + own.mesh
    groups = [mesh.get_group(i) for mesh in (parts, own) for i in range(mesh.ndim)]
    names = [f"parts_{i}" for i in range(parts.ndim)] + ["copies", "shards"][-own.ndim :]
    return DeviceMesh.from_group(groups, parts.device_type, mesh=grid, mesh_dim_names=tuple(names))


def joint_placements(unit: Unit, distribution: Distribution) -> tuple[Any, ...]:
    """How a parameter's chunks lie on the joint mesh: rows of its part on every rank."""
    from torch.distributed.tensor import Replicate, Shard

    copies = () if unit.copies is None else (Replicate(),)
    return (*distribution.placements, *copies, Shard(0))


def as_joint_dtensor(local: torch.Tensor, unit: Unit, distribution: Distribution) -> Any:
    """The DTensor of which ``local`` is this rank's chunk of its part."""
    mesh, placements = joint_mesh(unit, distribution), joint_placements(unit, distribution)
    return dtensor_of(local, distribution.shape, mesh, placements)


def rows_here(value: Any, unit: Unit, distribution: Distribution | None) -> torch.Tensor | None:
    """This rank's chunk of a value that the unit's ranks have chunks of; None if they have not.

    Refuses (ValueError) a value that is cut in a way that they cannot put together.
    """
    if distribution is None:
        return local_rows(value, unit.shards) if is_sharded(value) else None
    if not is_distributed(value):
        if is_sharded(value):
            raise ValueError(
                "it is tensor-parallel here, which a ShardedTensor cannot express; load a DTensor "
                "or a whole tensor"
            )
        return None
    cut: Any = value.placements, value.device_mesh
    if cut != (joint_placements(unit, distribution), joint_mesh(unit, distribution)):
        return None
    rows: torch.Tensor = value.to_local()
    return rows


def part_of(value: Any, distribution: Distribution | None) -> torch.Tensor:
    """What the unit's ranks share of a value that they have no chunks of, on each of them.

    A DTensor of another cut is put together first, by all ranks of its mesh.
    """
    if distribution is None:
        whole: torch.Tensor = value
        return whole
    if not is_distributed(value):
        return distribution.part(value)
    if value.device_mesh == distribution.mesh and value.placements == distribution.placements:
        local: torch.Tensor = value.to_local()
        return local
    return distribution.part(value.full_tensor())
