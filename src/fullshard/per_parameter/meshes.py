"""From a device mesh to the ranks that share parameters, and to the placements that users see."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from ..engine.comm.collectives import group_for
from ..engine.comm.process_groups import ALONE, ProcessGroups, group_among, is_alive
from ..engine.params.row_sharding import RowSharding
from ..engine.params.tensor_parallel import Distribution
from ..engine.runtime.parts import FewRanks


@dataclasses.dataclass(frozen=True)
class DataParallelMesh:
    """The ranks over which parameters are sharded or copied, and the mesh that users see.

    ``shard_dim`` is the dimension of ``mesh`` in which ranks share parameters by rows; None if
    every rank has all rows. ``ranks`` are those of each group that holds one copy.
    """

    mesh: DeviceMesh
    groups: ProcessGroups
    shard_dim: int | None
    ranks: Sequence[Sequence[int]]

    @property
    def is_hybrid(self) -> bool:
        return self.groups.copies is not None

    @property
    def shard_size(self) -> int:
        return len(self.ranks[0])

    @property
    def mesh_of_gathers(self) -> DeviceMesh:
        """The mesh of shards alone, which tensor subclasses get."""
        if self.mesh.ndim == 1 or self.shard_dim is None:
            return self.mesh
        names = self.mesh.mesh_dim_names
        assert names is not None
        return self.mesh[names[self.shard_dim]]

    def device(self) -> torch.device:
        """The device of this rank: for all but the CPU, the current one of its type."""
        kind = self.mesh.device_type
        if kind == "cpu":
            return torch.device("cpu")
        return torch.device(kind, torch.get_device_module(kind).current_device())

    def few_ranks(self, size: int) -> FewRanks:
        """The group of ``size`` neighbouring ranks, in the dimension of shards, with this rank."""
        shards = self.groups.shards
        cut = [torch.tensor(ranks).view(-1, size) for ranks in self.ranks]
        copies = [ranks for rows in cut for ranks in rows.T.tolist()]
        few = [ranks for rows in cut for ranks in rows.tolist()]
        groups = [
            group_among(copies, shards, "copies of parts"),
            group_among(few, shards, "parts"),
        ]
        mesh = DeviceMesh.from_group(
            groups,
            self.mesh.device_type,
            mesh=next(rows for rows in cut if dist.get_rank() in rows),
            mesh_dim_names=("copies", "few"),
        )
        return FewRanks(group_for(groups[1], self.device()), mesh)

    def sharding(
        self, parameter: nn.Parameter, dim: int, distribution: Distribution | None
    ) -> RowSharding:
        """The DTensor that users see of ``parameter``, which tensor parallelism may have cut."""
        own = [self._own_placement(index, dim) for index in range(self.mesh.ndim)]
        if distribution is None:
            whole = torch.empty(parameter.shape, device="meta")
            return RowSharding(self.mesh, tuple(own), dim, whole.shape, whole.stride())
        mesh = _concatenate([self.mesh, _beside(self.mesh, distribution.mesh)])
        pairs = zip(distribution.placements, distribution.mesh.shape, strict=True)
        parts = [size for placement, size in pairs if placement.is_shard(dim)]
        if parts and self.shard_dim is not None:
            own[self.shard_dim] = _strided_shard(dim, parts)
        placements = (*own, *distribution.placements)
        return RowSharding(mesh, placements, dim, distribution.shape, distribution.stride)

    def _own_placement(self, index: int, dim: int) -> Any:
        return Shard(dim) if index == self.shard_dim else Replicate()


def _strided_shard(dim: int, parts: list[int]) -> Any:
    """Rows of what tensor parallelism has cut before, although its mesh dimensions come after."""
    from torch.distributed.tensor.placement_types import _StridedShard

    factor = math.prod(parts)
    return Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)


def _beside(mesh: DeviceMesh, other: DeviceMesh) -> DeviceMesh:
    """The same as ``other``, as a part of the mesh that ``mesh`` is a part of, if that has it.

    DTensor's operations may return parts of an earlier mesh, which compare equal.
    """
    root, names = _root_of(mesh), other.mesh_dim_names
    if _root_of(other) == root or names is None or not {*names} <= {*(root.mesh_dim_names or ())}:
        return other
    found: DeviceMesh = root[names]
    return found if found == other else other


def _concatenate(meshes: list[DeviceMesh]) -> DeviceMesh:
    """One mesh of the dimensions of all, which must be parts of the same one."""
    names = [name for mesh in meshes for name in mesh.mesh_dim_names or ()]
    roots: list[Any] = [_root_of(mesh) for mesh in meshes]
    if any(root != roots[0] for root in roots) or len(names) != sum(m.ndim for m in meshes):
        raise ValueError(
            "FSDP requires the DP and model parallel TP/EP mesh to have the same parent mesh but "
            f"got: \nDP's global mesh: {roots[0]}\nTP/EP's global mesh: {roots[-1]}"
        )
    if len(meshes) == 1:
        return meshes[0]
    concatenate: Any = getattr(DeviceMesh, "_concatenate", None)
    if concatenate is not None:
        return concatenate(meshes)
    return roots[0][tuple(names)]


def _root_of(mesh: Any) -> Any:
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources  # torch 2.11

    return _mesh_resources.get_root_mesh(mesh)


#: The meshes over all ranks, by name, and their process groups: modules of one model share them.
_over_all: dict[str | None, tuple[Any, Any, DeviceMesh]] = {}


def _mesh_over_all(name: str | None) -> DeviceMesh:
    """A mesh over all ranks, with this name of its dimension.

    It may have a process group of its own: over gloo, torch makes one for GPUs.
    """
    if not dist.is_initialized():
        raise ValueError(
            "Default process group has not been initialized, please call "
            "torch.distributed.init_process_group() first, or pass mesh="
        )
    world: Any = dist.group.WORLD
    known = _over_all.get(name)
    if known is None or known[0] is not world or not is_alive(known[1]):
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        kind = "cpu" if accelerator is None else accelerator.type
        names = None if name is None else (name,)
        mesh = init_device_mesh(kind, (world.size(),), mesh_dim_names=names)
        known = _over_all[name] = (world, mesh.get_group(), mesh)
    return known[2]


def mesh_of_shards(mesh: Any) -> DataParallelMesh:
    """The mesh that was given to ``fully_shard``, or one over all ranks, checked."""
    if mesh is None:
        mesh = _mesh_over_all(None)
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh expects a DeviceMesh, but got {mesh!r} of type {type(mesh)}")
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertionError("Please init the 2D mesh for HSDP with mesh_dim_names specified")
    ranks = mesh.mesh.reshape(-1, mesh.size(-1)).tolist()
    if mesh.ndim == 2:
        groups = ProcessGroups(mesh.get_group(1), mesh.get_group(0))
        return DataParallelMesh(mesh, groups, 1, ranks)
    return DataParallelMesh(mesh, ProcessGroups(mesh.get_group(), None), 0, ranks)


def mesh_of_copies(mesh: Any) -> DataParallelMesh:
    """The mesh that was given to ``replicate``, or one over all ranks, checked."""
    if mesh is None:
        mesh = _mesh_over_all("replicate")
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh expects a DeviceMesh, but got {mesh!r} of type {type(mesh)}")
    if mesh.ndim != 1:
        raise ValueError(f"replicate expects a 1D DeviceMesh but got {mesh}")
    ranks = mesh.mesh.reshape(-1, 1).tolist()
    return DataParallelMesh(mesh, ProcessGroups(ALONE, mesh.get_group()), None, ranks)
