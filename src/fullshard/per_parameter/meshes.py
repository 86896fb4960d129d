"""From a device mesh to the ranks that share parameters, and to the placements that users see."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from ..engine.comm.collectives import group_for
from ..engine.comm.process_groups import ProcessGroups, group_among, is_alive
from ..engine.params.row_handle import RowSharding
from ..engine.params.tensor_parallel import Distribution
from ..engine.runtime.parts import FewRanks


@dataclasses.dataclass(frozen=True)
class DataParallelMesh:
    """A mesh over which parameters are sharded: 1-D, or 2-D, with copies in its first dimension."""

    mesh: DeviceMesh

    @property
    def is_hybrid(self) -> bool:
        return self.mesh.ndim == 2

    @property
    def shard_size(self) -> int:
        return self.mesh.size(-1)

    @property
    def groups(self) -> ProcessGroups:
        if self.is_hybrid:
            return ProcessGroups(self.mesh.get_group(1), self.mesh.get_group(0))
        return ProcessGroups(self.mesh.get_group(), None)

    def ranks_by_shards(self) -> list[list[int]]:
        """The ranks of each group that shares one copy of the parameters."""
        found: list[list[int]] = self.mesh.mesh.reshape(-1, self.shard_size).tolist()
        return found

    def device(self) -> torch.device:
        """The device of this rank: for all but the CPU, the current one of its type."""
        kind = self.mesh.device_type
        if kind == "cpu":
            return torch.device("cpu")
        return torch.device(kind, torch.get_device_module(kind).current_device())

    def few_ranks(self, size: int) -> FewRanks:
        """Those of ``size`` neighbours that this rank is one of, in the dimension of shards."""
        shards = self.groups.shards
        cut = [torch.tensor(ranks).view(-1, size) for ranks in self.ranks_by_shards()]
        copies = [ranks for rows in cut for ranks in rows.T.tolist()]
        few = [ranks for rows in cut for ranks in rows.tolist()]
        groups = [
            group_among(copies, shards, "copies of parts"),
            group_among(few, shards, "parts"),
        ]
        by_few = next(rows for rows in cut if dist.get_rank() in rows)
        mesh = DeviceMesh.from_group(
            groups, self.mesh.device_type, mesh=by_few, mesh_dim_names=("copies", "few")
        )
        return FewRanks(group_for(groups[1]), mesh)

    def sharding(
        self, parameter: nn.Parameter, dim: int, distribution: Distribution | None
    ) -> RowSharding:
        """How users see ``parameter``, of which tensor parallelism may have left a local part."""
        own: tuple[Any, ...] = (Shard(dim),)
        if self.is_hybrid:
            own = (Replicate(), *own)
        if distribution is None:
            whole = torch.empty(parameter.shape, device="meta")
            return RowSharding(self.mesh, own, dim, whole.shape, whole.stride())
        mesh = _concatenate(self.mesh, distribution.mesh)
        pairs = zip(distribution.placements, distribution.mesh.shape, strict=True)
        parts = [size for placement, size in pairs if placement.is_shard(dim)]
        if parts:
            own = (*own[:-1], _strided_shard(dim, parts))
        placements = (*own, *distribution.placements)
        return RowSharding(mesh, placements, dim, distribution.shape, distribution.stride)


def _strided_shard(dim: int, parts: list[int]) -> Any:
    """Rows of what tensor parallelism has cut before, although its mesh dimensions come after."""
    from torch.distributed.tensor.placement_types import _StridedShard

    factor = 1
    for size in parts:
        factor *= size
    return _StridedShard(dim, split_factor=factor)


def _concatenate(data_parallel: DeviceMesh, tensor_parallel: DeviceMesh) -> DeviceMesh:
    """One mesh of the dimensions of both, which must be parts of the same one."""
    names = (*(data_parallel.mesh_dim_names or ()), *(tensor_parallel.mesh_dim_names or ()))
    root: Any = _root_of(data_parallel)
    if root != _root_of(tensor_parallel) or len(names) != data_parallel.ndim + tensor_parallel.ndim:
        raise ValueError(
            "FSDP requires the DP and model parallel TP/EP mesh to have the same parent mesh but "
            f"got: \nDP's global mesh: {root}\nTP/EP's global mesh: {_root_of(tensor_parallel)}"
        )
    concatenate: Any = getattr(DeviceMesh, "_concatenate", None)
    if concatenate is not None:
        return concatenate([data_parallel, tensor_parallel])
    return root[names]


def _root_of(mesh: Any) -> Any:
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources  # torch 2.11

    return _mesh_resources.get_root_mesh(mesh)


#: The mesh over all ranks, and their process group: modules of one model share it.
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
        accelerator = torch.accelerator.current_accelerator()
        kind = "cpu" if accelerator is None else accelerator.type
        names = None if name is None else (name,)
        mesh = init_device_mesh(kind, (world.size(),), mesh_dim_names=names)
        known = _over_all[name] = (world, mesh.get_group(), mesh)
    return known[2]


def resolve_mesh(mesh: Any) -> DataParallelMesh:
    """The mesh that was given, or one over all ranks, checked."""
    if mesh is None:
        mesh = _mesh_over_all(None)
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh expects a DeviceMesh, but got {mesh!r} of type {type(mesh)}")
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertionError("Please init the 2D mesh for HSDP with mesh_dim_names specified")
    return DataParallelMesh(mesh)
