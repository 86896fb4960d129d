"""The values of a state dict to load, which every rank has, or the first rank alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map

from ...engine.comm.collectives import Group
from ...engine.params.handle import FlatParamHandle
from ...engine.params.tensor_parallel import Distribution, is_distributed
from ..model.distributed_values import local_rows_of, part_of
from ..model.gathering import own_part
from ..model.sharded_tensors import (
    check_gatherable,
    gather_chunks,
    gather_full,
    is_sharded,
    shape_of,
)
from ..model.unit_state import UnitState
from .consensus import ALL_UNITS
from .params import OptimParam, OriginalParam


class Source(Protocol):
    """Hands this rank its part of saved values; all ranks ask for them in the same order."""

    def parts(
        self, unit: UnitState, handle: FlatParamHandle, values: Mapping[int, Any]
    ) -> dict[int, torch.Tensor]:
        """Return a flat copy of this rank's part of each per-element value, by parameter index."""

    def common(self, param: OptimParam, original: OriginalParam, value: Any) -> Any:
        """Return an entry that every rank needs all of."""


class EveryRank:
    """Values that every rank has: full tensors, or its chunks of sharded tensors."""

    def parts(
        self, unit: UnitState, handle: FlatParamHandle, values: Mapping[int, Any]
    ) -> dict[int, torch.Tensor]:
        full: dict[int, torch.Tensor] = {}
        chunks: dict[int, torch.Tensor] = {}
        for index, value in values.items():
            distribution = handle.distribution(index)
            rows = local_rows_of(value, unit.unit, distribution)
            if rows is None:
                full[index] = part_of(value, distribution)
            else:
                chunks[index] = rows
        if chunks:
            shapes = [handle.layout.slots[index].shape for index in chunks]
            group, name, device = unit.unit.shards, unit.unit.name, unit.unit.device
            found = gather_chunks(group, name, device, shapes, list(chunks.values()))
            full.update(zip(chunks, found, strict=True))
        device = handle.shard_tensor.device
        return {
            index: own_part(handle, index, value).to(device, copy=True)
            for index, value in full.items()
        }

    def common(self, param: OptimParam, original: OriginalParam, value: Any) -> Any:
        """Return the entry, all-gathered if it was saved in chunks, which all ranks have.

        It was if no unit manages the parameter any more, or if the entry has the parameter's shape
        by accident.
        """
        if not isinstance(value, torch.Tensor) or not is_sharded(value):
            return value
        if param.unit_state is None:
            return _for_unmanaged(param, value)
        if param.distribution(original) is not None:
            dtensor: Any = value  # Tensor-parallel parameters are saved as nothing else.
            return dtensor.full_tensor()
        unit = param.unit_state.unit
        rows = local_rows_of(value, unit, None)
        assert rows is not None
        unit.shards.begin_pass("load optimizer state", unit.name)
        (full,) = gather_chunks(unit.shards, unit.name, unit.device, [shape_of(value)], [rows])
        return full.to(rows.device)


def check_chunks(param: OptimParam, original: OriginalParam, value: Any) -> None:
    """Raise ValueError for a sharded entry whose chunks :class:`EveryRank` cannot all-gather."""
    if param.unit_state is None:
        check_gatherable(value)
    else:
        local_rows_of(value, param.unit_state.unit, param.distribution(original))


def _for_unmanaged(param: OptimParam, value: Any) -> Any:
    """A sharded entry for a parameter that every rank has all of, or that is a DTensor itself."""
    parameter: Any = param.parameter
    if not is_distributed(parameter):
        return gather_full(value, param.path, parameter.device)
    wanted = Distribution.of(parameter)
    if is_distributed(value) and value.device_mesh == wanted.mesh:
        return value.redistribute(wanted.mesh, wanted.placements)
    return wanted.distribute(gather_full(value, param.path, parameter.device))


class FirstRank:
    """Values that the first rank has in full; the other ranks know their shapes and dtypes.

    The first rank is that of the ``outermost`` unit. With tensor parallelism, it sends values to
    the first rank of each part (a rank that leads), which cuts them for the ranks that share the
    part. With hybrid sharding, the ranks of the first copy send them on to those of the others.
    """

    def __init__(self, outermost: UnitState) -> None:
        self._outermost = outermost
        unit = outermost.unit
        self._shards, self._copies, self._device = unit.shards, unit.copies, unit.device

    def announce(self, state_dict: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the first rank's state dict; on other ranks its tensors have no memory."""
        told = None
        if self._outermost.is_first:
            told = dict(state_dict or {})
            told["state"] = tree_map(_described, told.get("state"))
        if self._outermost.leads:
            for group in self._outermost.part_groups:
                group.begin_pass("send optimizer state to other parts", ALL_UNITS)
                told = group.broadcast_object(told, ALL_UNITS)
        if self._outermost.is_first_copy:
            self._shards.begin_pass("scatter optimizer state", ALL_UNITS)
            told = self._shards.broadcast_object(told, ALL_UNITS)
        if self._copies is not None:
            self._copies.begin_pass("copy optimizer state", ALL_UNITS)
            told = self._copies.broadcast_object(told, ALL_UNITS)
        if self._outermost.is_first:
            return dict(state_dict or {})
        assert told is not None
        return {**told, "state": tree_map(_without_memory, told["state"])}

    def parts(
        self, unit: UnitState, handle: FlatParamHandle, values: Mapping[int, Any]
    ) -> dict[int, torch.Tensor]:
        """Return this rank's parts, which the first rank scatters in one buffer per dtype."""
        if self._outermost.leads != unit.leads:
            raise RuntimeError(
                f"The first rank of unit {unit.unit.name!r} is not the first rank of the outermost "
                "unit, so it does not have the state dict to scatter. Give the full state dict to "
                "all ranks (shard_full_optim_state_dict, or rank0_only=False), or use a sharded one"
            )
        parts: dict[int, torch.Tensor] = {}
        for dtype in sorted({value.dtype for value in values.values()}, key=str):
            alike = {index: value for index, value in values.items() if value.dtype == dtype}
            shard = self._scatter(unit, handle, alike, dtype)
            for index in alike:
                piece = handle.pieces[index]
                mine = shard[piece.offset : piece.offset + piece.numel]
                parts[index] = mine.to(handle.shard_tensor.device, copy=True)
        return parts

    def common(self, param: OptimParam, original: OriginalParam, value: Any) -> Any:
        return tree_map(self._broadcast, value)

    def _scatter(
        self,
        unit: UnitState,
        handle: FlatParamHandle,
        values: Mapping[int, torch.Tensor],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return this rank's shard of a flat buffer that the ranks that lead fill with values."""
        leads = self._outermost.leads
        layout, shards, copies = handle.layout, unit.unit.shards, unit.unit.copies
        full = torch.zeros(layout.padded_numel if leads else 0, dtype=dtype, device=handle.device)
        for index, value in values.items() if leads else ():
            slot = layout.slots[index]
            if self._outermost.part_groups:
                value = part_of(self._to_other_parts(value), handle.distribution(index))
            full.as_strided(slot.shape, slot.stride, slot.offset).copy_(value)
        shard = torch.empty(layout.shard_numel, dtype=dtype, device=handle.device)
        if unit.is_first_copy and layout.padded_numel:
            if layout.world_size > 1:
                slices = full.view(layout.world_size, -1).unbind() if leads else ()
                sent = [_as_bytes(piece) for piece in slices]
                shards.scatter_from_first(_as_bytes(shard), sent, unit.unit.name)
            else:
                shard = full if leads else shard
                shards.broadcast([_as_bytes(shard)], unit.unit.name)
        if copies is not None and layout.padded_numel:
            copies.broadcast([_as_bytes(shard)], unit.unit.name)
        return shard

    def _broadcast(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            return leaf
        sent = self._to_other_parts(leaf)
        groups: list[Group | None] = [self._copies]
        if self._outermost.is_first_copy:
            groups.insert(0, self._shards)
        for group in filter(None, groups):
            group.broadcast([_as_bytes(sent)], ALL_UNITS)
        return sent

    def _to_other_parts(self, value: torch.Tensor) -> torch.Tensor:
        """Return the first rank's value on all ranks that lead, and empty memory on the others."""
        sent = torch.empty(value.shape, dtype=value.dtype, device=self._device)
        if self._outermost.is_first:
            sent.copy_(value)
        if self._outermost.leads:
            for group in self._outermost.part_groups:
                group.broadcast([_as_bytes(sent)], ALL_UNITS)
        return sent


@dataclasses.dataclass(frozen=True)
class _Described:
    """The shape and dtype of a tensor that is sent later."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _described(leaf: Any) -> Any:
    """A tensor's description; a tensor without dimensions is sent at once."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().cpu() if leaf.dim() == 0 else _Described(tuple(leaf.shape), leaf.dtype)


def _without_memory(leaf: Any) -> Any:
    if isinstance(leaf, _Described):
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
    return leaf


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """One-byte dtypes as the one that all backends support."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
