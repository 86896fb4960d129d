"""State of the unwrapped model's optimizer as that of this rank's: cut, gathered or received."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map

from ...engine.params.handle import FlatParamHandle
from ...engine.params.tensor_parallel import Distribution, is_distributed
from ..model.distributed_values import part_of, rows_here
from ..model.gathering import own_part
from ..model.sharded_tensors import (
    check_gatherable,
    gather_chunks,
    gather_whole,
    is_sharded,
    shape_of,
)
from ..model.state_hooks import ModelState
from .consensus import equal
from .params import Groups, Original, Owned, in_model_order, units_of

SavedState = Mapping[str, Mapping[str, Any]]

#: What torch's optimizers call their numbers: a step count, and what NAdam and ASGD derive from it.
_NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})


class Arrival(Protocol):
    """How saved values reach this rank. All ranks ask for the same things in the same order."""

    def parts(
        self, unit: ModelState, handle: FlatParamHandle, values: Mapping[int, Any]
    ) -> dict[int, torch.Tensor]:
        """This rank's part of each value (by the parameter's index), flattened, a copy."""

    def whole(self, value: Any) -> Any:
        """An entry that is not sharded."""


class Here:
    """Values that this rank has: whole ones, or its chunks of sharded tensors."""

    def parts(
        self, unit: ModelState, handle: FlatParamHandle, values: Mapping[int, Any]
    ) -> dict[int, torch.Tensor]:
        whole: dict[int, torch.Tensor] = {}
        chunks: dict[int, torch.Tensor] = {}
        for index, value in values.items():
            distribution = handle.distribution(index)
            rows = rows_here(value, unit.unit, distribution)
            if rows is None:
                whole[index] = part_of(value, distribution)
            else:
                chunks[index] = rows
        if chunks:
            shapes = [handle.layout.slots[index].shape for index in chunks]
            group, name, device = unit.unit.shards, unit.unit.name, unit.unit.device
            found = gather_chunks(group, name, device, shapes, list(chunks.values()))
            whole.update(zip(chunks, found, strict=True))
        device = handle.shard_tensor.device
        return {
            index: own_part(handle, index, value).to(device, copy=True)
            for index, value in whole.items()
        }

    def whole(self, value: Any) -> Any:
        return value


class Loading:
    """One call that turns saved state, by names, into the state that an optimizer can load."""

    def __init__(self, groups: Groups, saved: SavedState, arrival: Arrival) -> None:
        self._groups = groups
        self._saved = saved
        self._arrival = arrival
        self._found: dict[Owned, dict[str, Any]] = {}
        self._per_element = _entries_per_element(groups, saved)

    def problems(self) -> list[str]:
        """What does not fit the model, in words; without communication."""
        errors: list[str] = []
        for owned, original, state in self._entries():
            shape = owned.shape_of(original)
            for key, value in state.items():
                if not isinstance(value, torch.Tensor):
                    continue
                if key in self._per_element and tuple(shape_of(value)) != shape:
                    errors.append(
                        f"size mismatch for {key!r} of {original.name}: it has shape "
                        f"{tuple(shape_of(value))}, the parameter in the model {shape}"
                    )
                elif is_sharded(value):
                    try:
                        _check_cut(owned, original, value)
                    except ValueError as error:
                        errors.append(f"cannot load {key!r} of {original.name}: {error}")
        return errors

    def run(self) -> dict[Owned, dict[str, Any]]:
        """The state of each parameter that this rank's optimizer is to have state for."""
        for unit, owns in units_of(self._groups).items():
            for handle in unit.unit.handles:
                members = [owned for owned in owns if owned.handle is handle]
                self._place_parts(unit, handle, members)
        for owned in in_model_order(self._groups):
            self._place_common(owned)
        return {owned: state for owned, state in self._found.items() if owned.is_here}

    def _entries(self) -> list[tuple[Owned, Original, Mapping[str, Any]]]:
        return [
            (owned, original, state)
            for owned in in_model_order(self._groups)
            for original in owned.originals
            if (state := original.find(self._saved)) is not None
        ]

    # -- entries with a value per element -----------------------------------------------------

    def _place_parts(
        self, unit: ModelState, handle: FlatParamHandle, members: Sequence[Owned]
    ) -> None:
        places = {o.index: (owned, o) for owned in members for o in owned.originals}
        wanted: dict[str, dict[int, Any]] = {}
        for index, (_, original) in sorted(places.items()):
            state = original.find(self._saved) or {}
            for key, value in state.items():
                if key in self._per_element and isinstance(value, torch.Tensor):
                    wanted.setdefault(key, {})[index] = value
        if wanted:
            unit.unit.shards.begin_pass("load optimizer state", unit.unit.name)
        for key in sorted(wanted):
            parts = self._arrival.parts(unit, handle, wanted[key])
            if handle.use_orig_params:
                for index, part in parts.items():
                    owned, _ = places[index]
                    self._found.setdefault(owned, {})[key] = self._shaped(owned, part)
            else:
                (owned,) = members
                self._found.setdefault(owned, {})[key] = self._joined(owned, key, parts)

    def _shaped(self, owned: Owned, part: torch.Tensor) -> torch.Tensor:
        slot = owned.slot(owned.originals[0])
        return part if owned.is_spread else part.as_strided(slot.shape, slot.stride)

    def _joined(self, owned: Owned, key: str, parts: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The parts of all originals as they lie in the shard of a flat parameter."""
        handle = owned.handle
        assert handle is not None
        missing = [o.name for o in owned.originals if o.index not in parts]
        if missing:
            warnings.warn(
                f"There is no saved {key!r} of {missing}, which share the flat parameter "
                f"{owned.path} with parameters that have one; they begin with zeros. With "
                "use_orig_params every parameter has state of its own",
                UserWarning,
                stacklevel=2,
            )
        first = next(iter(parts.values()))
        shard = torch.zeros(handle.layout.shard_numel, dtype=first.dtype, device=first.device)
        for index, part in parts.items():
            piece = handle.pieces[index]
            if piece.in_shard:
                shard[piece.offset : piece.offset + piece.numel].copy_(part)
        return shard

    # -- everything else ------------------------------------------------------------------------

    def _place_common(self, owned: Owned) -> None:
        values: dict[str, tuple[str, Any]] = {}
        for original in owned.originals:
            state = original.find(self._saved) or {}
            for key, value in state.items():
                if owned.handle is None or not self._is_part(key, value):
                    value = self._arrival.whole(_unsharded(owned, original, value))
                    name, known = values.setdefault(key, (original.name, value))
                    if name != original.name and not equal(known, value):
                        raise RuntimeError(
                            f"{key!r} is {known} for {name} and {value} for {original.name}, but "
                            f"both are part of the flat parameter {owned.path}, which has one: set "
                            "use_orig_params to load state that differs inside a unit"
                        )
        for key, (_, value) in values.items():
            self._found.setdefault(owned, {})[key] = tree_map(_cloned, value)

    def _is_part(self, key: str, value: Any) -> bool:
        return key in self._per_element and isinstance(value, torch.Tensor)


def _entries_per_element(groups: Groups, saved: SavedState) -> set[str]:
    """The entries that have a value for each element: see the note on whose state counts."""
    votes: Counter[str] = Counter()
    undecided: set[str] = set()
    for owned in (owned for group in groups for owned in group):
        for original in owned.originals:
            shape = owned.shape_of(original)
            for key, value in (original.find(saved) or {}).items():
                if not isinstance(value, torch.Tensor):
                    continue
                if shape == () or math.prod(shape) == 0:
                    undecided.add(key)
                elif is_sharded(value) or tuple(value.shape) == shape:
                    votes[key] += 1
                else:
                    votes[key] -= 1
    decided = {key for key, count in votes.items() if count > 0}
    # A parameter that is a number has state that is a number, as its count of steps is: where there
    # are no others to tell by, the name tells.
    return decided | {key for key in undecided if key not in votes and key not in _NUMBERS}


def _check_cut(owned: Owned, original: Original, value: Any) -> None:
    """Refuse (ValueError) a sharded entry whose chunks the ranks cannot put together."""
    if owned.unit is None:
        check_gatherable(value)
    else:
        rows_here(value, owned.unit.unit, owned.distribution(original))


def _unsharded(owned: Owned, original: Original, value: Any) -> Any:
    """An entry that this rank's optimizer needs all of, though it was saved in chunks.

    No unit manages the parameter any more, or the entry has its shape by accident and was cut as
    the parameter is. All ranks that have chunks of it call this.
    """
    if not isinstance(value, torch.Tensor) or not is_sharded(value):
        return value
    if owned.unit is None:
        return _for_unmanaged(owned, value)
    if owned.distribution(original) is not None:
        joint: Any = value  # A DTensor: nothing else is known of tensor-parallel parameters.
        return joint.full_tensor()
    unit = owned.unit.unit
    rows = rows_here(value, unit, None)
    assert rows is not None
    unit.shards.begin_pass("load optimizer state", unit.name)
    (whole,) = gather_chunks(unit.shards, unit.name, unit.device, [shape_of(value)], [rows])
    return whole.to(rows.device)


def _for_unmanaged(owned: Owned, value: Any) -> Any:
    """A sharded entry for a parameter that every rank has all of, or that is a DTensor itself."""
    parameter: Any = owned.parameter
    if not is_distributed(parameter):
        return gather_whole(value, owned.path, parameter.device)
    wanted = Distribution.of(parameter)
    if is_distributed(value) and value.device_mesh == wanted.mesh:
        return value.redistribute(wanted.mesh, wanted.placements)
    return wanted.distribute(gather_whole(value, owned.path, parameter.device))


def _cloned(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
