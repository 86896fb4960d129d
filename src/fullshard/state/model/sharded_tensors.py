"""Parameters as ShardedTensor or DTensor: every rank holds a chunk of the first dimension's rows.

Chunks are those of ``torch.chunk``: ceil(rows / ranks) rows each, the last ones shorter or empty.
Parameters without dimensions or without elements stay plain tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...engine.comm.backends import is_gloo
from ...engine.comm.collectives import Group, group_for
from ...engine.runtime.unit import Unit


class SharedMesh:
    """A device mesh that deep copies share, and that pickles leave out."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedMesh:
        return self

    def __reduce__(self) -> Any:
        return SharedMesh, (None,)


class Rows(NamedTuple):
    """The rows of a parameter that one of several ranks holds."""

    start: int
    end: int

    @classmethod
    def of(cls, rows: int, rank: int, ranks: int) -> Rows:
        step = -(-rows // ranks)
        return cls(min(rank * step, rows), min((rank + 1) * step, rows))


def has_rows(shape: Sequence[int]) -> bool:
    """True if a parameter of this shape can be divided into chunks of rows."""
    return math.prod(shape) > 0 and len(shape) > 0


def chunk(full: torch.Tensor, group: Group, to_cpu: bool) -> torch.Tensor:
    """A copy of this rank's rows of a full parameter."""
    rows = Rows.of(full.shape[0], group.rank, group.size)
    device = torch.device("cpu") if to_cpu else full.device
    mine = full.detach()[rows.start : rows.end]
    copy = torch.empty(mine.shape, dtype=mine.dtype, device=device)
    return copy.copy_(mine)


def as_sharded_tensor(local: torch.Tensor, shape: Sequence[int], group: Group) -> Any:
    """The ShardedTensor of which ``local`` is this rank's chunk; made without communication."""
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import (
        ShardedTensorMetadata,
        TensorProperties,
    )
    from torch.distributed._shard.sharding_spec import ShardMetadata

    rest = list(shape[1:])
    chunks: list[Any] = []
    mine: list[Any] = []
    for rank in range(group.size):
        rows = Rows.of(shape[0], rank, group.size)
        if rows.end == rows.start:
            continue
        metadata = ShardMetadata(
            [rows.start] + [0] * len(rest),
            [rows.end - rows.start, *rest],
            _placement(rank, local.device, group),
        )
        chunks.append(metadata)
        if rank == group.rank:
            # A flat shard may end in padding.
            mine.append(Shard(local[: rows.end - rows.start], metadata))
    properties = TensorProperties(dtype=local.dtype)
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        mine,
        ShardedTensorMetadata(chunks, torch.Size(shape), properties),
        process_group=group.group,
    )


def _placement(rank: int, device: torch.device, group: Group) -> str:
    """The placement of a rank's chunk: on the rank's own device of the same type."""
    worldwide = dist.get_global_rank(group.group, rank)
    if device.type == "cpu":
        return f"rank:{worldwide}/cpu"
    if rank == group.rank:
        return f"rank:{worldwide}/{device}"
    index = worldwide % torch.accelerator.device_count()
    return f"rank:{worldwide}/{device.type}:{index}"


def as_dtensor(local: torch.Tensor, shape: Sequence[int], mesh: Any) -> Any:
    """The DTensor of which ``local`` is this rank's chunk; a 2-D mesh replicates it, too."""
    from torch.distributed.tensor import Replicate, Shard

    placements = (Replicate(), Shard(0)) if mesh.ndim == 2 else (Shard(0),)
    return dtensor_of(local, shape, mesh, placements)


def dtensor_of(local: torch.Tensor, shape: Sequence[int], mesh: Any, placements: Any) -> Any:
    """A DTensor around ``local``, on whichever device that is.

    ``DTensor.from_local`` would move a host tensor to the devices of the mesh.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    stride = torch.empty(tuple(shape), device="meta").stride()
    meta = TensorMeta(torch.Size(shape), stride, local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def empty_like(value: Any, dtype: torch.dtype) -> Any:
    """An uninitialised tensor in host memory of ``value``'s shape, sharded like ``value``."""
    if hasattr(value, "local_shards"):
        shape, shards = shape_of(value), value.local_shards()
        mine = shards[0].tensor.shape if shards else (0, *shape[1:])
        local = torch.empty(mine, dtype=dtype)
        return as_sharded_tensor(local, shape, group_for(value._process_group))
    if hasattr(value, "to_local"):
        local = torch.empty(value.to_local().shape, dtype=dtype)
        return dtensor_of(local, value.shape, value.device_mesh, value.placements)
    return torch.empty(value.shape, dtype=dtype)


def mesh_of(unit: Unit) -> Any:
    """A device mesh over the process groups of a unit that was constructed without a mesh.

    If the groups form no regular grid of ranks, there is no mesh of two dimensions, and the ranks
    of each copy get a mesh of their own.
    """
    from torch.distributed.device_mesh import DeviceMesh

    device_type = unit.device.type
    shards = unit.shards.group
    if unit.copies is None:
        return DeviceMesh.from_group(shards, device_type)
    copies = unit.copies.group
    row = dist.get_process_group_ranks(shards)
    column = dist.get_process_group_ranks(copies)
    grid = [[first + rank - row[0] for rank in row] for first in _firsts(row, column)]
    if not _is_grid(grid):
        return DeviceMesh.from_group(shards, device_type)
    return DeviceMesh.from_group(
        [copies, shards], device_type, mesh=grid, mesh_dim_names=("copies", "shards")
    )


def _firsts(row: list[int], column: list[int]) -> list[int]:
    """The first rank of each sharding group, assuming a regular grid of ranks."""
    me = next(iter(set(row) & set(column)))
    return [rank - me + row[0] for rank in column]


def _is_grid(ranks: list[list[int]]) -> bool:
    found = [rank for row in ranks for rank in row]
    return len(set(found)) == len(found) and set(found) <= set(range(dist.get_world_size()))


def is_sharded(value: Any) -> bool:
    """True for a ShardedTensor or a DTensor."""
    return hasattr(value, "local_shards") or hasattr(value, "to_local")


def shape_of(value: Any) -> torch.Size:
    """The full shape; a ShardedTensor's is read from its metadata, since ``.shape`` warns."""
    shape: torch.Size = value.metadata().size if hasattr(value, "local_shards") else value.shape
    return shape


def local_rows(value: Any, group: Group) -> torch.Tensor:
    """This rank's chunk of a sharded parameter; ValueError if the chunks are not ``torch.chunk``'s.

    All ranks of the group raise it or none does: otherwise some would wait for the others.
    """
    if hasattr(value, "to_local"):
        _check_placements(value, group)
        local: torch.Tensor = value.to_local()
        return local
    rows = [Rows.of(shape_of(value)[0], rank, group.size) for rank in range(group.size)]
    expected = [(start, end - start) for start, end in rows if end > start]
    shards = sorted(value.metadata().shards_metadata, key=lambda shard: shard.placement.rank())
    chunks = [(shard.shard_offsets[0], shard.shard_sizes[0]) for shard in shards]
    # torch's sharding specs also list the empty chunks of ranks that have no rows.
    found = [(first, rows) for first, rows in chunks if rows]
    if found != expected:
        raise ValueError(
            f"the {group.size} ranks that share the parameter expect (first row, rows) {expected} "
            f"as chunks, but the ShardedTensor has {found}"
        )
    return local_shard(value)


def _check_placements(value: Any, group: Group) -> None:
    """Raise ValueError for a DTensor whose rows are not sharded over the group's ranks in order."""
    mesh = value.device_mesh.mesh
    shardings = [
        (place, dim)
        for dim, place in enumerate(value.placements)
        if not place.is_replicate() and mesh.shape[dim] > 1
    ]
    if group.size == 1:
        fits = not shardings
    elif len(shardings) == 1 and shardings[0][0].is_shard(0):
        _, dim = shardings[0]
        groups = mesh.movedim(dim, -1).reshape(-1, mesh.shape[dim])
        fits = dist.get_process_group_ranks(group.group) in groups.tolist()
    else:
        fits = False
    if not fits:
        ranks = dist.get_process_group_ranks(group.group)
        raise ValueError(
            f"ranks {ranks} share the parameter and expect a chunk of its rows each, but the "
            f"DTensor has placements {value.placements} on a mesh of ranks {mesh.tolist()}"
        )


def local_shard(value: Any) -> torch.Tensor:
    """This rank's only shard of a ShardedTensor; an empty tensor if it has none."""
    shards = value.local_shards()
    if shards:
        shard: torch.Tensor = shards[0].tensor
        return shard
    return torch.empty(0, dtype=value.metadata().tensor_properties.dtype)


def own_numel(numel: int, group: Group) -> int:
    """The number of a flat tensor's elements in this rank's shard, without padding."""
    rows = Rows.of(numel, group.rank, group.size)
    return rows.end - rows.start


def gather_chunks(
    group: Group,
    name: str,
    device: torch.device,
    shapes: Sequence[Sequence[int]],
    locals_: Sequence[torch.Tensor],
) -> list[Any]:
    """All-gather tensors of these shapes on ``device`` from the chunks of all ranks, at once.

    ``name`` is that of the unit in the order check and in errors.
    """
    if group.size == 1:
        return list(locals_)
    outputs: list[torch.Tensor] = []
    inputs: list[torch.Tensor] = []
    for shape, local in zip(shapes, locals_, strict=True):
        step = -(-shape[0] // group.size) * math.prod(shape[1:])
        padded = torch.zeros(step, dtype=local.dtype, device=device)
        padded[: local.numel()].copy_(local.reshape(-1))
        inputs.append(padded)
        outputs.append(torch.empty(step * group.size, dtype=local.dtype, device=device))
    group.wait(*group.gather(outputs, inputs, name))
    return [
        output[: math.prod(shape)].view(shape)
        for output, shape in zip(outputs, shapes, strict=True)
    ]


def check_gatherable(value: Any) -> None:
    """Raise ValueError for a ShardedTensor that :func:`gather_full` cannot all-gather."""
    if hasattr(value, "local_shards"):
        local_rows(value, group_for(value._process_group))


def gather_full(value: Any, name: str, device: torch.device) -> torch.Tensor:
    """All-gather a sharded tensor on ``device``; all ranks that have chunks of it call this."""
    full: torch.Tensor
    if hasattr(value, "to_local"):
        full = value.to(_gathering_place(value.device_mesh)).full_tensor()
        return full.to(device)
    group = group_for(value._process_group)
    rows = local_rows(value, group)
    group.begin_pass("gather a sharded tensor", name)
    kinds = [kind.type for kind in group.group._device_types]
    place = device if device.type in kinds else torch.device(kinds[0])
    (full,) = gather_chunks(group, name, place, [shape_of(value)], [rows])
    return full.to(device)


def _gathering_place(mesh: Any) -> str:
    """The type of device on which a DTensor on ``mesh`` is all-gathered: one its backend reaches.

    DTensor's collectives over gloo end the process where tensors are in a GPU's memory.
    """
    over_gloo = all(map(is_gloo, mesh.get_all_groups()))
    kind: str = mesh.device_type
    return "cpu" if over_gloo else kind
