"""Copies values of a state dict into this rank's shards, and reports those that do not fit."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.overrides import is_tensor_like

from ...engine.params.handle import FlatParamHandle
from ...engine.runtime.unit import Unit
from .distributed_values import local_rows_of, part_of
from .gathering import store_own_part
from .sharded_tensors import gather_chunks, is_sharded, local_shard, own_numel, shape_of


class LoadReport(NamedTuple):
    """The lists in which ``nn.Module.load_state_dict`` collects missing keys and errors."""

    missing: list[str]
    unexpected: list[str]
    errors: list[str]


class _Chunked(NamedTuple):
    handle: FlatParamHandle
    position: int
    rows: torch.Tensor


class ShardLoader:
    """Loads one module's parameters from full values, or from sharded ones, into the shards."""

    def __init__(self, unit: Unit, report: LoadReport) -> None:
        self._unit = unit
        self._report = report
        self._full: list[tuple[FlatParamHandle, int, torch.Tensor]] = []
        self._chunked: list[_Chunked] = []

    def add(self, key: str, handle: FlatParamHandle, index: int, value: Any) -> None:
        """Add a value to be stored, or report that it does not fit the parameter."""
        shape = handle.whole_shape(index)
        if isinstance(value, torch.Tensor) and not is_sharded(value):
            try:
                value = handle.packed(index, value)
            except ValueError as error:
                self._report.errors.append(f"cannot load {key}: {error}")
                return
        if not isinstance(value, torch.Tensor) and is_tensor_like(value):
            # Some libraries' state dicts have objects that read their tensor when torch uses them.
            value = torch.detach(value)
        if not isinstance(value, torch.Tensor):
            self._report.errors.append(
                f'While copying the parameter named "{key}", expected torch.Tensor or Tensor-like '
                f"object from checkpoint but received {type(value)}"
            )
        elif tuple(shape_of(value)) != tuple(shape):
            # While parameters are summoned, nn.Module itself compares and reports.
            if not self._unit.summoned_everywhere or is_sharded(value):
                self._report.errors.append(
                    f"size mismatch for {key}: copying a param with shape {shape_of(value)} from "
                    f"checkpoint, the shape in current model is {shape}."
                )
        else:
            self._take(key, handle, index, value)

    def _take(self, key: str, handle: FlatParamHandle, index: int, value: Any) -> None:
        if self._unit.summoned_everywhere and is_sharded(value):
            raise RuntimeError(
                f"{key} is sharded, and cannot be loaded inside summon_full_params, where "
                "parameters are unsharded. Load it outside the context, or load a full state dict"
            )
        distribution = handle.distribution(index)
        try:
            rows = local_rows_of(value, self._unit, distribution)
        except ValueError as error:
            self._report.errors.append(f"cannot load the sharded parameter {key}: {error}")
            return
        if rows is None:
            self._full.append((handle, index, part_of(value, distribution)))
        else:
            self._chunked.append(_Chunked(handle, index, rows))

    def store(self) -> None:
        """Copy this rank's part of each added value into its shard."""
        for handle, index, value in self._full:
            store_own_part(handle, index, value)
        if self._chunked:
            unit = self._unit
            unit.shards.begin_pass("load", unit.name)
            shapes = [c.handle.layout.slots[c.position].shape for c in self._chunked]
            found = gather_chunks(
                unit.shards, unit.name, unit.device, shapes, [c.rows for c in self._chunked]
            )
            for chunked, full in zip(self._chunked, found, strict=True):
                store_own_part(chunked.handle, chunked.position, full)

    def store_shard(self, key: str, handle: FlatParamHandle, value: Any) -> None:
        """Copy a shard of a local state dict, or report that it has another size."""
        if self._unit.summoned_everywhere:
            raise RuntimeError(
                f"{key} is a shard, and cannot be loaded inside summon_full_params, where "
                "parameters are unsharded. Load it outside the context, or load a full state dict"
            )
        shard, expected = value, handle.shard_tensor
        if hasattr(value, "local_shards"):
            shard = local_shard(value)
            expected = expected[: own_numel(handle.layout.numel, self._unit.shards)]
        if shard.shape != expected.shape:
            self._report.errors.append(
                f"size mismatch for {key}: a local state dict can be loaded by the ranks and with "
                f"the wrapping that it was saved with. The saved shard has shape {shard.shape}, "
                f"this rank's shard {expected.shape}."
            )
        else:
            with torch.no_grad():
                expected.data.copy_(shard)
