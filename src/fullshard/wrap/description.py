"""The sizes of a plan: elements and bytes per unit. Numbers only, no tensors and no text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import nn

from fullshard.wrap.plan import Decision, Plan

__all__ = ["Description", "Layout", "UnitDescription", "describe_unit"]

#: How ranks share a unit's parameters: equal parts of a flat buffer, or rows of each.
Layout = Literal["flat", "rows"]

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
    """Parameters that are all-gathered together: same dtype and trainability.

    A parameter's ``rows`` are the size of the dimension along which ``fully_shard`` cuts it.
    """

    numels: tuple[int, ...]
    rows: tuple[int, ...]
    item_bytes: int
    compute_item_bytes: int

    def flat_shard(self, ranks: int, *, aligned: bool) -> int:
        """The elements of a rank's equal part of a flat buffer, padding included."""
        elements = self._packed(self.numels) if aligned else sum(self.numels)
        return -(-elements // ranks)

    def row_shard(self, ranks: int) -> int:
        """The elements of a rank's rows of every parameter, as many as the first rank has."""
        rows = zip(self.numels, self.rows, strict=True)
        return self._packed([-(-count // ranks) * (n // max(count, 1)) for n, count in rows])

    def _packed(self, numels: Sequence[int]) -> int:
        step = max(_ALIGNMENT_BYTES // self.compute_item_bytes, 1)
        *padded, last = numels
        return sum(-(-numel // step) * step for numel in padded) + last


def _groups(
    parameters: Iterable[nn.Parameter], compute: torch.dtype | None, use_orig_params: bool
) -> list[_Group]:
    sorted_by_kind: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        # With use_orig_params=False the constructor rejects units that mix both.
        trainable = parameter.requires_grad if use_orig_params else None
        kind = (_stored(parameter).dtype, trainable, _is_packed(parameter))
        sorted_by_kind.setdefault(kind, []).append(parameter)
    return [
        _Group(
            numels=tuple(_stored(parameter).numel() for parameter in members),
            rows=tuple(_rows(_stored(parameter)) for parameter in members),
            item_bytes=_stored(members[0]).element_size(),
            compute_item_bytes=(
                (None if _is_packed(members[0]) else compute) or _stored(members[0]).dtype
            ).itemsize,
        )
        for members in sorted_by_kind.values()
    ]


def _is_packed(parameter: Any) -> bool:
    """True for a quantised weight, whose packed elements are sharded as they are."""
    if type(parameter) is nn.Parameter or parameter.requires_grad:
        return False
    of_bitsandbytes = type(parameter).__module__.partition(".")[0] == "bitsandbytes"
    others = ("placements", "fsdp_pre_all_gather")  # of DTensors, and of other mechanisms
    wraps = hasattr(parameter, "__tensor_flatten__")
    return of_bitsandbytes or (wraps and not any(hasattr(parameter, name) for name in others))


def _stored(parameter: Any) -> torch.Tensor:
    """The tensors of a parameter that are sharded: itself, or the bytes of its inner tensors."""
    if not (_is_packed(parameter) and hasattr(parameter, "__tensor_flatten__")):
        return cast(torch.Tensor, parameter)
    inner = [getattr(parameter, name) for name in parameter.__tensor_flatten__()[0]]
    end = 0
    for tensor in inner:
        end = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES + tensor.numel() * tensor.itemsize
    return torch.empty(end, dtype=torch.uint8, device="meta")


def _rows(parameter: Any) -> int:
    """The size of the dimension that ranks share: that of a DTensor's shards, or the first."""
    if parameter.dim() == 0:
        return 1
    placements = getattr(parameter, "placements", ())
    dims = [placement.dim for placement in placements if hasattr(placement, "dim")]
    rows: int = parameter.shape[dims[0] if dims else 0]
    return rows


def describe_unit(
    plan: Plan, decision: Decision, world_size: int, layout: Layout = "flat"
) -> UnitDescription:
    """Compute the sizes of the unit of ``decision``, sharded over ``world_size`` ranks."""
    arguments: Mapping[str, Any] = decision.arguments
    precision = arguments.get("mixed_precision")
    compute = None if precision is None else precision.param_dtype
    by_rows = layout == "rows"
    aligned = bool(arguments.get("use_orig_params", False))
    groups = _groups(decision.managed, compute, aligned or by_rows)
    if by_rows:
        shards = [group.row_shard(world_size) for group in groups]
    else:
        shards = [group.flat_shard(world_size, aligned=aligned) for group in groups]
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
        bytes=sum(s.numel() * s.element_size() for s in map(_stored, decision.managed)),
        shard_elements=sum(shards),
        shard_bytes=sum(s * g.item_bytes for s, g in zip(shards, groups, strict=True)),
        gathered_bytes=sum(
            s * world_size * g.compute_item_bytes for s, g in zip(shards, groups, strict=True)
        ),
        frozen_elements=sum(p.numel() for p in decision.managed if not p.requires_grad),
        left_to_ancestor=len(decision.left_to_ancestor),
    )
