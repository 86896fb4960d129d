"""The sizes of a plan: elements and bytes per unit. Numbers only, no tensors and no text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullshard.wrap.plan import Decision, Plan

__all__ = ["Description", "UnitDescription", "describe_unit"]

#: With use_orig_params=True, each parameter of a flat buffer but the last is padded to this.
_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class UnitDescription:
    """The sizes of one unit that a policy creates.

    ``elements`` and ``bytes`` count the managed parameters in their current dtype.
    ``shard_elements`` and ``shard_bytes`` count one rank's shard, padding included; all ranks have
    the same. ``gathered_bytes`` is the size of the unit's full buffer while the unit is unsharded,
    in compute precision. ``places`` lists all paths under which the unit's module is registered.
    """

    path: str
    class_name: str
    places: tuple[str, ...]
    parameters: int
    elements: int
    bytes: int
    shard_elements: int
    shard_bytes: int
    gathered_bytes: int
    frozen_elements: int
    left_to_ancestor: int

    @property
    def name(self) -> str:
        """The unit's path, or ``(root)`` for the root, whose path is empty."""
        return self.path or "(root)"


@dataclass(frozen=True)
class Description:
    """The result of :func:`describe`, unit by unit; prints as the module tree with remarks.

    ``units`` begins with the root and follows the order of ``model.modules()``. The totals count
    every managed parameter once; ``ignored_elements`` belong to no unit.
    """

    model_class: str
    world_size: int
    units: tuple[UnitDescription, ...]
    ignored_elements: int
    remarks: tuple[str, ...]
    text: str

    @property
    def elements(self) -> int:
        """The elements that units manage."""
        return sum(unit.elements for unit in self.units)

    @property
    def bytes(self) -> int:
        """The bytes of the parameters that units manage, before sharding."""
        return sum(unit.bytes for unit in self.units)

    @property
    def frozen_elements(self) -> int:
        """The managed elements that need no gradient."""
        return sum(unit.frozen_elements for unit in self.units)

    @property
    def shard_elements(self) -> int:
        """The elements that one rank keeps, padding included."""
        return sum(unit.shard_elements for unit in self.units)

    @property
    def shard_bytes(self) -> int:
        """The bytes of parameters that one rank keeps, padding included."""
        return sum(unit.shard_bytes for unit in self.units)

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


@dataclass(frozen=True)
class _Group:
    """Parameters that share one flat buffer: same dtype and trainability."""

    numels: tuple[int, ...]
    item_bytes: int
    compute_item_bytes: int

    def buffer_elements(self, *, aligned: bool) -> int:
        """The number of elements in the unsharded flat buffer, without the padding at its end."""
        if not aligned:
            return sum(self.numels)
        step = max(_ALIGNMENT_BYTES // self.compute_item_bytes, 1)
        *padded, last = self.numels
        return sum(-(-numel // step) * step for numel in padded) + last


def _groups(
    parameters: Iterable[nn.Parameter], compute: torch.dtype | None, use_orig_params: bool
) -> list[_Group]:
    sorted_by_kind: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        # With use_orig_params=False the constructor rejects units that mix both.
        trainable = parameter.requires_grad if use_orig_params else None
        sorted_by_kind.setdefault((parameter.dtype, trainable), []).append(parameter)
    return [
        _Group(
            numels=tuple(parameter.numel() for parameter in members),
            item_bytes=members[0].element_size(),
            compute_item_bytes=(compute or members[0].dtype).itemsize,
        )
        for members in sorted_by_kind.values()
    ]


def describe_unit(plan: Plan, decision: Decision, world_size: int) -> UnitDescription:
    """Compute the sizes of the unit of ``decision``, sharded over ``world_size`` ranks."""
    arguments: Mapping[str, Any] = decision.arguments
    precision = arguments.get("mixed_precision")
    compute = None if precision is None else precision.param_dtype
    aligned = bool(arguments.get("use_orig_params", False))
    groups = _groups(decision.managed, compute, aligned)
    shards = [-(-group.buffer_elements(aligned=aligned) // world_size) for group in groups]
    paths = [plan.graph.path(plan.graph.index_of[place.parent]) for place in decision.places]
    return UnitDescription(
        path=decision.path,
        class_name=type(decision.module).__name__,
        places=tuple(
            f"{path}.{place.name}" if path else place.name
            for path, place in zip(paths, decision.places, strict=True)
        ),
        parameters=len(decision.managed),
        elements=sum(parameter.numel() for parameter in decision.managed),
        bytes=sum(p.numel() * p.element_size() for p in decision.managed),
        shard_elements=sum(shards),
        shard_bytes=sum(s * g.item_bytes for s, g in zip(shards, groups, strict=True)),
        gathered_bytes=sum(
            s * world_size * g.compute_item_bytes for s, g in zip(shards, groups, strict=True)
        ),
        frozen_elements=sum(p.numel() for p in decision.managed if not p.requires_grad),
        left_to_ancestor=len(decision.left_to_ancestor),
    )
