"""``describe``: the units and sizes that a policy leads to. Needs no process group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import get_args

from torch import nn

from fullshard.api import MixedPrecision
from fullshard.wrap.description import Description, Layout, UnitDescription, describe_unit
from fullshard.wrap.graph import walk
from fullshard.wrap.ignored import resolve_ignored
from fullshard.wrap.marker import is_in_place
from fullshard.wrap.plan import Plan, decide, units_in_place
from fullshard.wrap.render import render_tree, size_text
from fullshard.wrap.selection import Policy

__all__ = ["SMALL_GATHER_BYTES", "describe"]

#: The time of an all-gather smaller than this is dominated by latency. A rule of thumb: starting a
#: collective takes some tens of microseconds, in which fast links move about a mebibyte.
SMALL_GATHER_BYTES = 1024 * 1024


def describe(
    model: nn.Module,
    policy: Policy | None = None,
    world_size: int = 8,
    *,
    ignored_modules: Iterable[nn.Module] | None = None,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
    mixed_precision: MixedPrecision | None = None,
    use_orig_params: bool = False,
    layout: Layout = "flat",
) -> Description:
    """Describe the units that ``policy`` would create in ``model`` on ``world_size`` ranks.

    The result prints as the module tree with its units, their sizes, and remarks on likely
    mistakes; programs can read the same from its fields. Nothing is wrapped or allocated, and the
    model may be on the meta device. Pass the options that you will pass to the constructor.

    With ``layout="rows"`` the units are those of ``fully_shard``, applied to each module that the
    policy matches and then to the model: ranks hold rows of each parameter. So they are if the
    model has been sharded in this way already; its units are then described as they are, for any
    number of ranks.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> describe(model, world_size=3).units[0].shard_elements
    14
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model expects an nn.Module, but got {model!r} of type {type(model).__name__}"
        )
    if world_size < 1:
        raise ValueError(f"world_size expects at least 1 rank, but got {world_size}")
    if layout not in get_args(Layout):
        raise ValueError(f"layout expects 'flat' or 'rows', but got {layout!r}")
    ignored = resolve_ignored(model, ignored_modules, ignored_states)
    precision = mixed_precision
    if any(map(is_in_place, walk(model))):
        _check_no_policy(policy)
        layout = "rows"
        plan = units_in_place(model, ignored=ignored, root_arguments={"mixed_precision": precision})
    else:
        arguments = {"mixed_precision": precision, "use_orig_params": use_orig_params}
        plan = decide(model, policy, ignored=ignored, root_arguments=arguments)
    separates_frozen = use_orig_params or layout == "rows"
    decisions = sorted((plan.root, *plan.decisions), key=lambda d: plan.graph.index_of[d.module])
    units = tuple(describe_unit(plan, decision, world_size, layout) for decision in decisions)
    ignored_elements = sum(p.numel() for p in _parameters(model) if p in plan.ignored.parameters)
    remarks = tuple(_remarks(plan, units, separates_frozen))
    tree = render_tree(plan, {unit.path: unit for unit in units})
    text = "\n".join([tree, "", *_totals(units, ignored_elements, world_size), *_bulleted(remarks)])
    return Description(type(model).__name__, world_size, units, ignored_elements, remarks, text)


def _check_no_policy(policy: Policy | None) -> None:
    if policy is not None:
        raise ValueError(
            "fully_shard has been applied to the model, whose units are described as they are: "
            "leave policy out, or describe the model before"
        )


def _parameters(model: nn.Module) -> set[nn.Parameter]:
    return {p for m in walk(model) for p in m._parameters.values() if p is not None}


def _totals(units: Sequence[UnitDescription], ignored: int, world_size: int) -> list[str]:
    elements = sum(unit.elements for unit in units)
    kept = sum(unit.shard_bytes for unit in units)
    largest = max(units, key=lambda unit: unit.gathered_bytes)
    lines = [
        f"{_managing(len(units))} {elements:,} parameters "
        f"({size_text(sum(unit.bytes for unit in units))}); "
        f"each of {world_size:,} ranks keeps {size_text(kept)} of them.",
        f"The largest all-gather is {size_text(largest.gathered_bytes)}, for {largest.name}.",
    ]
    frozen = sum(unit.frozen_elements for unit in units)
    if frozen:
        lines.append(f"{frozen:,} of the parameters are frozen.")
    if ignored:
        lines.append(f"{ignored:,} parameters are ignored: every rank keeps full copies of them.")
    return lines


def _managing(units: int) -> str:
    return "1 unit manages" if units == 1 else f"{units:,} units manage"


def _bulleted(remarks: Sequence[str]) -> list[str]:
    if not remarks:
        return []
    return ["", "Remarks", *("- " + remark.replace("\n", "\n  ") for remark in remarks)]


def _remarks(plan: Plan, units: Sequence[UnitDescription], separates_frozen: bool) -> list[str]:
    remarks = list(plan.warnings)
    nested = units[1:]
    small = [u for u in nested if u.elements and u.gathered_bytes < SMALL_GATHER_BYTES]
    if small:
        limit = size_text(SMALL_GATHER_BYTES)
        shown = [f"{_these(u, n)} {size_text(u.gathered_bytes)}" for u, n in _by_class(small)]
        remarks.append(
            f"Units that all-gather less than {limit} ({len(small):,}): {'; '.join(shown)}. Below "
            f"{limit} the time of a collective is mostly latency, which costs more than the memory "
            "saved is worth. Do not wrap these modules, or wrap a larger module around them."
        )
    empty = [u for u in nested if not u.elements]
    if empty:
        shown = [_these(unit, count) for unit, count in _by_class(empty)]
        remarks.append(
            f"Units without parameters ({len(empty):,}): {'; '.join(shown)}. They shard nothing; "
            "leave them out of the policy."
        )
    for example, count in _by_class([u for u in units if 0 < u.frozen_elements < u.elements]):
        consequence = (
            "they are sharded separately, and the frozen ones take no gradient memory"
            if separates_frozen
            else "the constructor rejects this unless use_orig_params=True"
        )
        remarks.append(
            f"{_these(example, count)} has frozen ({example.frozen_elements:,}) and trainable "
            f"({example.elements - example.frozen_elements:,}) parameters: {consequence}."
        )
    remarks.extend(_remarks_on_modules_never_called(plan, units))
    remarks.extend(_remarks_on_sharing(plan, units))
    return remarks


def _remarks_on_modules_never_called(plan: Plan, units: Sequence[UnitDescription]) -> list[str]:
    """Remarks on units that never all-gather, because nothing calls their module's forward."""
    by_path = {unit.path: unit for unit in units}
    managing = [decision for decision in plan.decisions if decision.managed]
    containers = [
        by_path[decision.path]
        for decision in managing
        if isinstance(decision.module, nn.ModuleList | nn.ModuleDict)
    ]
    inside_attention = [
        by_path[decision.path]
        for decision in managing
        if any(isinstance(place.parent, nn.MultiheadAttention) for place in decision.places)
    ]
    return [
        f"{_these(example, count)} becomes a unit, but a container is never called, so it never "
        "all-gathers its parameters. Wrap the modules in it instead."
        for example, count in _by_class(containers)
    ] + [
        f"{_these(example, count)} becomes a unit, but nn.MultiheadAttention reads its parameters "
        "without calling it, so it never all-gathers them. Wrap the attention instead."
        for example, count in _by_class(inside_attention)
    ]


def _remarks_on_sharing(plan: Plan, units: Sequence[UnitDescription]) -> list[str]:
    remarks = [
        f"{unit.places[0]} is registered under {len(unit.places)} names "
        f"({', '.join(unit.places)}): it becomes one unit, registered under all of them."
        for unit in units
        if len(unit.places) > 1
    ]
    left = {parameter for decision in plan.decisions for parameter in decision.left_to_ancestor}
    for decision in (*plan.decisions, plan.root):
        for name, parameter in zip(decision.managed_names, decision.managed, strict=True):
            if parameter in left:
                remarks.append(
                    f"{name} is used in several units, so {decision.path or '(root)'}, which "
                    "contains all of these units, manages it."
                )
    return remarks


def _by_class(units: Sequence[UnitDescription]) -> list[tuple[UnitDescription, int]]:
    """The first unit of each class with the number of its units, for one remark per class."""
    counted: dict[str, tuple[UnitDescription, int]] = {}
    for unit in units:
        example, count = counted.get(unit.class_name, (unit, 0))
        counted[unit.class_name] = (example, count + 1)
    return list(counted.values())


def _these(example: UnitDescription, count: int) -> str:
    if count == 1:
        return f"{example.name} ({example.class_name})"
    return f"{example.name} (like {count - 1} more of class {example.class_name})"
