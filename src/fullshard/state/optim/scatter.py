"""Optimizer state that the first rank alone has, on its way to the others, a unit at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ...engine.comm.collectives import Group
from ...engine.params.handle import FlatParamHandle
from ..model.distributed_values import part_of
from ..model.state_hooks import ModelState

_EVERYTHING = "(all)"


class Scattered:
    """Values that the first rank has whole; the others know their shapes and dtypes only.

    ``outermost`` is the unit by whose groups the first rank is found.
    """

    def __init__(self, outermost: ModelState) -> None:
        self._outermost = outermost
        unit = outermost.unit
        self._shards, self._copies, self._device = unit.shards, unit.copies, unit.device

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that has the values."""
        return self._outermost.is_first

    @property
    def _leads(self) -> bool:
        """Whether the values come to this rank whole, to be cut for others that share its parts."""
        return self._outermost.leads

    def announce(self, state_dict: Mapping[str, Any] | None) -> dict[str, Any]:
        """The first rank's state dict; elsewhere its tensors have no memory behind them."""
        told = None
        if self.is_first:
            told = dict(state_dict or {})
            told["state"] = tree_map(_described, told.get("state"))
        if self._leads:
            for group in self._outermost.part_groups:
                group.begin_pass("send optimizer state to other parts", _EVERYTHING)
                told = group.broadcast_object(told, _EVERYTHING)
        if self._outermost.is_first_copy:
            self._shards.begin_pass("scatter optimizer state", _EVERYTHING)
            told = self._shards.broadcast_object(told, _EVERYTHING)
        if self._copies is not None:
            self._copies.begin_pass("copy optimizer state", _EVERYTHING)
            told = self._copies.broadcast_object(told, _EVERYTHING)
        if self.is_first:
            return dict(state_dict or {})
        assert told is not None
        return {**told, "state": tree_map(_empty_like, told["state"])}

    def parts(
        self, unit: ModelState, handle: FlatParamHandle, values: Mapping[int, Any]
    ) -> dict[int, torch.Tensor]:
        """This rank's part of each value; the first rank builds one buffer and sends slices."""
        self._check_same_first(unit)
        parts: dict[int, torch.Tensor] = {}
        for dtype in sorted({value.dtype for value in values.values()}, key=str):
            alike = {index: value for index, value in values.items() if value.dtype == dtype}
            shard = self._received(unit, handle, alike, dtype)
            for index in alike:
                piece = handle.pieces[index]
                mine = shard[piece.offset : piece.offset + piece.numel]
                parts[index] = mine.to(handle.shard_tensor.device, copy=True)
        return parts

    def whole(self, value: Any) -> Any:
        """An entry that every rank has all of."""
        return tree_map(self._broadcast, value)

    def _received(
        self,
        unit: ModelState,
        handle: FlatParamHandle,
        values: Mapping[int, torch.Tensor],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        layout, shards, copies = handle.layout, unit.unit.shards, unit.unit.copies
        size = layout.padded_numel if self._leads else 0
        whole = torch.zeros(size, dtype=dtype, device=handle.device)
        for index, value in values.items() if self._leads else ():
            slot = layout.slots[index]
            if self._outermost.part_groups:
                value = part_of(self._across_parts(value), handle.distribution(index))
            whole.as_strided(slot.shape, slot.stride, slot.offset).copy_(value)
        shard = torch.empty(layout.shard_numel, dtype=dtype, device=handle.device)
        if unit.is_first_copy and layout.padded_numel:
            if layout.world_size > 1:
                slices = whole.view(layout.world_size, -1).unbind() if self._leads else ()
                sent = [_bytes(piece) for piece in slices]
                shards.scatter_from_first(_bytes(shard), sent, unit.unit.name)
            else:
                shard = whole if self._leads else shard
                shards.broadcast([_bytes(shard)], unit.unit.name)
        if copies is not None and layout.padded_numel:
            copies.broadcast([_bytes(shard)], unit.unit.name)
        return shard

    def _broadcast(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            return leaf
        sent = self._across_parts(leaf)
        groups: list[Group | None] = [self._copies]
        if self._outermost.is_first_copy:
            groups.insert(0, self._shards)
        for group in filter(None, groups):
            group.broadcast([_bytes(sent)], _EVERYTHING)
        return sent

    def _across_parts(self, value: torch.Tensor) -> torch.Tensor:
        """The first rank's value on all ranks that lead, and memory for it on the others."""
        sent = torch.empty(value.shape, dtype=value.dtype, device=self._device)
        if self.is_first:
            sent.copy_(value)
        if self._leads:
            for group in self._outermost.part_groups:
                group.broadcast([_bytes(sent)], _EVERYTHING)
        return sent

    def _check_same_first(self, unit: ModelState) -> None:
        if self._leads != unit.leads:
            raise RuntimeError(
                f"Unit {unit.unit.name!r} uses other ranks than the outermost unit, and the first "
                "of them is another: give the whole state dict to all ranks "
                "(shard_full_optim_state_dict, or rank0_only=False), or use sharded state"
            )


def _described(leaf: Any) -> Any:
    """A tensor without its memory, unless it is but a number."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().cpu() if leaf.dim() == 0 else _Described(leaf)


class _Described:
    """What to say about a tensor that is sent later."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype


def _empty_like(leaf: Any) -> Any:
    if isinstance(leaf, _Described):
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
    return leaf


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Types that are a byte wide as the one that backends know."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
