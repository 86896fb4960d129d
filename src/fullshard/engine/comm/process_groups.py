"""Derives the groups of shards and of copies from the user's process groups or mesh."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...api import HYBRID_STRATEGIES, ShardingStrategy

_GROUP_METHODS = ("rank", "size")


class ProcessGroups(NamedTuple):
    """``shards`` split a unit between them; ``copies``, if any, hold the same shard."""

    shards: Any
    copies: Any | None

    @property
    def argument(self) -> Any:
        """The ``process_group`` argument with which a nested unit uses the same groups."""
        return self.shards if self.copies is None else (self.shards, self.copies)


class Alone:
    """Stands for a process group of this rank, where nothing is shared with others."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


ALONE = Alone()


def resolve_groups(
    process_group: Any, device_mesh: Any, strategy: ShardingStrategy
) -> ProcessGroups:
    """Read the groups off a process group, a pair of them, a device mesh, or the default."""
    if process_group is not None and device_mesh is not None:
        raise ValueError(
            "Cannot pass both process_group and device_mesh at the same time. Please just pass "
            "only one of them."
        )
    if process_group is not None or device_mesh is not None:
        _check_kinds(process_group, device_mesh)
    if strategy in HYBRID_STRATEGIES:
        return _hybrid(process_group, device_mesh, strategy)
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise ValueError(
                f"{strategy} takes a 1-D device mesh, but got one of {device_mesh.ndim} "
                "dimensions; pass the dimension to shard over (mesh['name']), or use HYBRID_SHARD"
            )
        return ProcessGroups(device_mesh.get_group(), None)
    if isinstance(process_group, tuple):
        raise ValueError(
            f"{strategy} takes one process group, but got a pair of them; a pair (shards, copies) "
            "is for HYBRID_SHARD and _HYBRID_SHARD_ZERO2"
        )
    if process_group is None:
        process_group = _default_group()
    return ProcessGroups(process_group, None)


def strategy_for(strategy: ShardingStrategy, groups: ProcessGroups) -> ShardingStrategy:
    """``strategy``; or, with a warning, ``NO_SHARD`` if there is only one rank."""
    alone = groups.shards.size() == 1 and (groups.copies is None or groups.copies.size() == 1)
    if not alone or strategy is ShardingStrategy.NO_SHARD:
        return strategy
    warnings.warn(
        f"FSDP is switching to use `NO_SHARD` instead of {strategy} since the world size is 1.",
        UserWarning,
        stacklevel=3,
    )
    return ShardingStrategy.NO_SHARD


def _check_kinds(process_group: Any, device_mesh: Any) -> None:
    given = process_group if isinstance(process_group, tuple) else (process_group,)
    for group in given:
        if group is not None and not all(callable(getattr(group, n, None)) for n in _GROUP_METHODS):
            raise TypeError(
                "process_group expects a process group, or a pair of them for the hybrid "
                f"strategies, but got {group!r} of type {type(group).__name__}"
            )
    if device_mesh is not None and not hasattr(device_mesh, "ndim"):
        raise TypeError(
            "device_mesh expects a DeviceMesh, but got "
            f"{device_mesh!r} of type {type(device_mesh).__name__}"
        )


def _hybrid(process_group: Any, device_mesh: Any, strategy: ShardingStrategy) -> ProcessGroups:
    if device_mesh is not None:
        if device_mesh.ndim != 2:
            raise ValueError(
                f"Expected device_mesh to have ndim=2 but got {device_mesh.ndim}: {strategy} takes "
                "a 2-D device mesh (copies by shards)"
            )
        return ProcessGroups(device_mesh.get_group(1), device_mesh.get_group(0))
    if process_group is None:
        world = _default_group()
        return _by_node(world, _node_size(world.size()))
    if isinstance(process_group, tuple) and len(process_group) == 2:
        return ProcessGroups(*process_group)
    raise ValueError(
        "Expected process_group to be passed in as either None or "
        f"Tuple[dist.ProcessGroup, dist.ProcessGroup] but got {type(process_group)}: {strategy} "
        "takes a pair of groups, of those that share shards and of those that hold copies"
    )


def _default_group() -> Any:
    if not dist.is_initialized():
        raise ValueError(
            "Default process group has not been initialized, please call "
            "torch.distributed.init_process_group() first, or pass process_group="
        )
    return dist.group.WORLD


def groups_by_node(world: Any, node_size: int) -> ProcessGroups:
    """Groups for shards inside nodes of ``node_size`` consecutive ranks, and for copies across
    nodes.

    All ranks call this. Later calls return the groups of the first one.
    """
    if node_size < 1 or world.size() % node_size:
        raise ValueError(
            f"The world size ({world.size()}) must be divisible by 'group_size={node_size}'"
        )
    return _by_node(world, node_size)


_node_groups: dict[tuple[Any, int], ProcessGroups] = {}


def _by_node(world: Any, node: int) -> ProcessGroups:
    """Shards inside a node, copies across nodes; made once, since all ranks must take part."""
    size, rank = world.size(), world.rank()
    known = _node_groups.get((world, node))
    if known is None or not all(map(is_alive, known)):
        shards = copies = None
        for first in range(0, size, node):
            group = dist.new_group(list(range(first, first + node)))
            shards = group if first <= rank < first + node else shards
        for local in range(node):
            group = dist.new_group(list(range(local, size, node)))
            copies = group if rank % node == local else copies
        known = _node_groups[world, node] = ProcessGroups(shards, copies)
    return known


_made: dict[tuple[Any, str, tuple[int, ...]], Any] = {}


def group_among(parts: Sequence[Sequence[int]], like: Any, purpose: str) -> Any:
    """This rank's process group among those of ``parts``, with the backend of ``like``.

    The ranks of all parts call this. Later calls return the group of the first one. ``purpose``
    distinguishes groups that have the same ranks and communicate at the same time.
    """
    own = next(ranks for ranks in parts if dist.get_rank() in ranks)
    key = (dist.group.WORLD, purpose, tuple(own))
    known = _made.get(key)
    if known is None or not is_alive(known):
        known = _made[key] = _make_among(parts, own, dist.get_backend_config(like))
    return known


def _make_among(parts: Sequence[Sequence[int]], own: Sequence[int], backend: str) -> Any:
    if sum(map(len, parts)) < dist.get_world_size():
        # The other ranks may do something else now.
        return dist.new_group(list(own), backend=backend, use_local_synchronization=True)
    groups = [dist.new_group(list(ranks), backend=backend) for ranks in parts]
    return next(group for group, ranks in zip(groups, parts, strict=True) if ranks is own)


def is_alive(group: Any) -> bool:
    """True if ``group`` is a process group that has not been destroyed."""
    return group in dist.distributed_c10d._world.pg_map


def _node_size(world_size: int) -> int:
    size = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    if not size and torch.accelerator.is_available():
        size = torch.accelerator.device_count()
    size = min(size or world_size, world_size)
    if world_size % size:
        raise ValueError(
            f"HYBRID_SHARD needs nodes of equal size, but {world_size} ranks do not divide into "
            f"nodes of {size}; pass a pair of process groups or a 2-D device mesh"
        )
    return size
