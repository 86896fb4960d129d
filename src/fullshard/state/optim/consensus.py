"""Ranks agree on the entries of each parameter's optimizer state before they send tensors.

Note: per-element or common
    A full state dict has one value for each entry of a parameter's state. A per-element tensor
    (``exp_avg``) has the shape of the rank's part of the parameter; the parts are all-gathered.
    Every other entry (a step count, a history, a word) is common: all ranks must have the same
    tensors, and the first rank that holds a part of the parameter gives the value.

    One shape alone does not tell: a history of four values has the shape of a part of four
    elements by accident. So an entry is per-element if its tensors have the shape of the parts
    under all parameters and on all ranks. If some have another shape, the entry is common, and
    ranks also compare the contents of the tensors whose shape matches by accident.

Note: ranks without a part
    A rank without a part of a parameter has no state for it, or state that was made ahead of time
    and never updated, which is ignored. But an optimizer may keep state of all parameters under
    its first one (LBFGS). If that state was updated, it is compared like that of the other ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ...engine.comm.collectives import Group
from .params import OptimParam

States = Mapping[OptimParam, Mapping[str, Any]]

#: The name in the order check of what ranks do for all units at once.
ALL_UNITS = "(all)"


class Fact(NamedTuple):
    """One rank's description of one entry.

    ``dtype`` is None unless the entry is a tensor. ``tensors`` has the shape and digest of the
    tensor, or of each tensor inside a list or dict; no digest where the shape is that of the rank's
    part (``matches``). ``value`` is the number in a tensor without dimensions, or an entry without
    tensors.
    """

    dtype: torch.dtype | None
    on_host: bool
    matches: bool
    tensors: tuple[tuple[tuple[int, ...], str | None], ...]
    value: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a tensor with dimensions; empty for any other entry."""
        return self.tensors[0][0] if self.dtype is not None and self.tensors else ()


class Report(NamedTuple):
    """One rank's facts about one parameter's state, by entry."""

    holds_part: bool
    facts: dict[str, Fact]


class Entry(NamedTuple):
    """An entry that all ranks agree on; ``value``, in host memory, is None if it is per-element."""

    is_per_element: bool
    dtype: torch.dtype | None
    on_host: bool
    value: Any


def agree_on_entries(
    group: Group, params: Sequence[OptimParam], states: States
) -> dict[OptimParam, dict[str, Entry]]:
    """The entries of each parameter's state, on all ranks of ``group``, which share the parameters.

    A parameter for which no rank has state has no entries.
    """
    group.begin_pass("optimizer state", ALL_UNITS)
    mine = _reports(params, states)
    told = group.gather_objects(([param.path for param in params], mine), ALL_UNITS)
    paths, reports = zip(*told, strict=True)
    _check_same_parameters(paths)
    common = _common_entries(reports)
    if any(fact.matches and key in common for key, fact in _all_facts(reports)):
        mine = _reports(params, states, common)
        reports = tuple(group.gather_objects(mine, ALL_UNITS))
    holders = [
        (param, *_compare_reports(param, found, common))
        for param, *found in zip(params, *reports, strict=True)
    ]
    values = _common_tensors(group, states, holders, common)
    return {
        param: {
            key: _entry(fact, _is_per_element(key, fact, common), values.get((param, key)))
            for key, fact in facts.items()
        }
        for param, _, facts in holders
    }


# -- each rank's report ---------------------------------------------------------------------------


def _reports(
    params: Sequence[OptimParam], states: States, common: Collection[str] = ()
) -> list[Report | None]:
    """This rank's report about each parameter; None where its state does not count.

    Entries that are known to be ``common`` get a digest also where their shape is a part's.
    """
    numbers = _numbers(params, states)
    return [
        Report(
            param.is_in_shard,
            {
                key: _fact(value, param.local_shape, numbers.get((param, key)), key in common)
                for key, value in states.get(param, {}).items()
            },
        )
        if param.is_in_shard or _was_updated(states.get(param, {}))
        else None
        for param in params
    ]


def _was_updated(state: Mapping[str, Any]) -> bool:
    """True for state that has tensors with elements, and no step count or a count above zero."""
    leaves = (leaf for leaf in tree_leaves(dict(state)) if isinstance(leaf, torch.Tensor))
    if not any(leaf.dim() and leaf.numel() for leaf in leaves):
        return False
    counts = [value for key, value in state.items() if key == "step" or type(value) is int]
    return not counts or any(counts)


def _numbers(params: Sequence[OptimParam], states: States) -> dict[tuple[OptimParam, str], Any]:
    """The values of all tensors without dimensions, copied from a device in one piece per dtype."""
    alike: dict[Any, list[tuple[tuple[OptimParam, str], torch.Tensor]]] = {}
    for param in params:
        for key, value in states.get(param, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() == 0:
                alike.setdefault((value.dtype, value.device), []).append(((param, key), value))
    found: dict[tuple[OptimParam, str], Any] = {}
    for items in alike.values():
        read = torch.stack([value.detach() for _, value in items]).tolist()
        found.update(zip((key for key, _ in items), read, strict=True))
    return found


def _fact(value: Any, local_shape: tuple[int, ...], number: Any, is_common: bool) -> Fact:
    if not isinstance(value, torch.Tensor):
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        matches = any(leaf.dim() and tuple(leaf.shape) == local_shape for leaf in tensors)
        described = tuple((tuple(leaf.shape), _digest(leaf)) for leaf in tensors)
        return Fact(None, True, matches, described, None if tensors else value)
    on_host, shape = value.device.type == "cpu", tuple(value.shape)
    if not shape:
        return Fact(value.dtype, on_host, False, (), number)
    matches = shape == local_shape
    digest = None if matches and not is_common else _digest(value)
    return Fact(value.dtype, on_host, matches, ((shape, digest),))


def _digest(value: torch.Tensor) -> str:
    content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(content.numpy().tobytes()).hexdigest()


# -- from reports to entries ----------------------------------------------------------------------


def _all_facts(reports: Sequence[Sequence[Report | None]]) -> list[tuple[str, Fact]]:
    found = (report for rank in reports for report in rank if report is not None)
    return [item for report in found for item in report.facts.items()]


def _common_entries(
    reports: Sequence[Sequence[Report | None]],
) -> dict[str, set[tuple[int, ...]]]:
    """The names of common tensors, with the shapes that are not those of parts.

    See the note on per-element and common entries.
    """
    found: dict[str, set[tuple[int, ...]]] = {}
    for key, fact in _all_facts(reports):
        if fact.shape and not fact.matches:
            found.setdefault(key, set()).add(fact.shape)
    return found


def _check_same_parameters(found: Sequence[Sequence[str]]) -> None:
    """Refuse optimizers that hold other parameters than that of rank 0.

    ``found`` has the names of each rank's parameters in the model's order.
    """
    first = found[0]
    for rank, other in enumerate(found):
        if list(other) == list(first):
            continue
        missing = [path for path in first if path not in other]
        extra = [path for path in other if path not in first]
        raise RuntimeError(
            "FSDP currently requires each rank to have at least the optimizer states needed by "
            "rank 0's optimizer but some ranks are missing some of those states: of the ranks that "
            f"share parameters, the optimizer of rank {rank} lacks {missing[:10]} and has "
            f"{extra[:10]} in addition to those of rank 0. Give the optimizers of all ranks the "
            "same parameters, in any order"
        )


def _compare_reports(
    param: OptimParam,
    reports: Sequence[Report | None],
    common: Mapping[str, set[tuple[int, ...]]],
) -> tuple[int, dict[str, Fact]]:
    """The rank whose state counts, and its facts, which are empty if no rank has state.

    Raises RuntimeError if the ranks' reports contradict each other.
    """
    found = [(rank, report) for rank, report in enumerate(reports) if report is not None]
    if not found:
        return 0, {}
    found.sort(key=lambda item: not item[1].holds_part)
    (first, (_, facts)), others = found[0], found[1:]
    for rank, other in others:
        if other.facts.keys() != facts.keys():
            raise RuntimeError(
                f"The optimizer state of parameter {param.path} has entries {sorted(facts)} on "
                f"rank {first} and {sorted(other.facts)} on rank {rank}. Step the optimizers of "
                "all ranks equally often, with the same options"
            )
    for key, fact in facts.items():
        for rank, other in others:
            if not _agree(fact, other.facts[key], key in common):
                _refuse(
                    key,
                    param,
                    f"differs between rank {first} ({fact.shape}, {fact.dtype}) and rank {rank} "
                    f"({other.facts[key].shape}, {other.facts[key].dtype})",
                )
        if fact.matches and not others:
            _check_on_one_rank(param, key, fact, common.get(key))
    return first, facts


def _agree(fact: Fact, other: Fact, is_common: bool) -> bool:
    if fact.dtype != other.dtype or bool(fact.shape) != bool(other.shape):
        return False
    if fact.shape and not is_common:
        return True
    return fact.tensors == other.tensors


def _check_on_one_rank(
    param: OptimParam, key: str, fact: Fact, other_shapes: set[tuple[int, ...]] | None
) -> None:
    """Refuse an entry of one rank alone that seems to be per-element, but would not be saved so.

    ``other_shapes`` are those that a common entry has elsewhere. The same shape elsewhere tells
    that this one matches by accident. A tensor of the full parameter's shape may be either.
    """
    if fact.dtype is None:
        _refuse(key, param, "is a list or dict with a per-element tensor in it")
    is_full = not param.is_flat and param.full_shape(param.originals[0]) == fact.shape
    if other_shapes is not None and fact.shape not in other_shapes and not is_full:
        _refuse(
            key,
            param,
            f"has one value per element of the parameter, while under other parameters {key!r} has "
            f"shape {min(other_shapes)}",
        )


def _refuse(key: str, param: OptimParam, why: str) -> NoReturn:
    raise RuntimeError(
        f"Optimizer state {key!r} of parameter {param.path} {why}, so it cannot be combined into a "
        "full or sharded state dict. Only per-element tensors, and values that are equal on all "
        "ranks, can be. Save this state with LOCAL_STATE_DICT, to be loaded on the same ranks"
    )


def _common_tensors(
    group: Group,
    states: States,
    holders: Sequence[tuple[OptimParam, int, dict[str, Fact]]],
    common: Mapping[str, Any],
) -> dict[tuple[OptimParam, str], Any]:
    """Common entries with tensors in them, in host memory, from the ranks whose state counts."""
    wanted = [
        (param, key, rank)
        for param, rank, facts in holders
        for key, fact in facts.items()
        if fact.tensors and not _is_per_element(key, fact, common)
    ]
    if not wanted:
        return {}
    mine = [
        copied(states[param][key], torch.device("cpu")) if rank == group.rank else None
        for param, key, rank in wanted
    ]
    found = group.gather_objects(mine, ALL_UNITS)
    return {
        (param, key): found[rank][position] for position, (param, key, rank) in enumerate(wanted)
    }


def _is_per_element(key: str, fact: Fact, common: Mapping[str, Any]) -> bool:
    return bool(fact.shape) and key not in common


def _entry(fact: Fact, is_per_element: bool, value: Any) -> Entry:
    if not fact.tensors:
        is_number = fact.dtype is not None
        value = torch.tensor(fact.value, dtype=fact.dtype) if is_number else fact.value
    return Entry(is_per_element, fact.dtype, fact.on_host, value)


def copied(value: Any, device: torch.device | None = None) -> Any:
    """A copy of an entry, with its tensors on ``device``, or each on the device where it was."""

    def copy_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().to(device or leaf.device, copy=True)

    return tree_map(copy_leaf, value)
