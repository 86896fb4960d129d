"""What ranks tell each other about optimizer state before tensors are sent: small facts only.

Note: whose state counts
    A rank that holds nothing of a parameter has no state for it, or state that nothing updates.
    So what exists, in which dtype, and every number that is not sharded (a step count) comes from
    the ranks that do hold a part of it. Whether an entry has one value per element is decided over
    all parameters that have it: a history of four values fits a piece of four elements by accident.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils._pytree import tree_flatten, tree_leaves

from .optim_parameters import Owned

States = Mapping[Owned, Mapping[str, Any]]


class Kind(Enum):
    """What an entry of a parameter's state is."""

    PER_ELEMENT = auto()
    NUMBER = auto()
    WHOLE = auto()
    NESTED = auto()
    OTHER = auto()


class Nested(NamedTuple):
    """What is told of a list or dict with tensors in it: their shapes and digests."""

    tensors: tuple[tuple[tuple[int, ...], str], ...]


class Fact(NamedTuple):
    """One entry as one rank has it; ``value`` is a number, a digest, or the entry itself.

    A list or dict ``fits`` if a tensor in it does.
    """

    fits: bool
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    on_host: bool
    value: Any


class Entry(NamedTuple):
    """One entry as all ranks have it; ``holder`` is the first rank that has it."""

    kind: Kind
    fact: Fact
    holder: int


Report = list[dict[str, Fact] | None]


def facts_here(owns: Sequence[Owned], states: States) -> Report:
    """This rank's facts about each parameter: None where it holds no part of it."""
    numbers = _numbers(owns, states)
    return [
        {
            key: _fact(value, owned.local_shape, numbers.get((owned, key)))
            for key, value in states.get(owned, {}).items()
        }
        if owned.is_here
        else None
        for owned in owns
    ]


def _numbers(owns: Sequence[Owned], states: States) -> dict[tuple[Owned, str], Any]:
    """The values of all tensors without dimensions, read from a device in few copies."""
    alike: dict[Any, list[tuple[tuple[Owned, str], torch.Tensor]]] = {}
    for owned in owns:
        for key, value in states.get(owned, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() == 0:
                alike.setdefault((value.dtype, value.device), []).append(((owned, key), value))
    found: dict[tuple[Owned, str], Any] = {}
    for items in alike.values():
        read = torch.stack([value.detach() for _, value in items]).tolist()
        found.update(zip((key for key, _ in items), read, strict=True))
    return found


def _fact(value: Any, local_shape: tuple[int, ...], number: Any) -> Fact:
    if not isinstance(value, torch.Tensor):
        return _fact_of_other(value, local_shape)
    shape = tuple(value.shape)
    fits = shape == local_shape
    told = number if value.dim() == 0 else None if fits else _digest(value)
    return Fact(fits, shape, value.dtype, value.device.type == "cpu", told)


def _fact_of_other(value: Any, local_shape: tuple[int, ...]) -> Fact:
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    if not tensors:
        return Fact(False, None, None, True, value)
    fits = any(leaf.dim() and tuple(leaf.shape) == local_shape for leaf in tensors)
    told = Nested(tuple((tuple(leaf.shape), _digest(leaf)) for leaf in tensors))
    return Fact(fits, None, None, True, told)


def _digest(value: torch.Tensor) -> str:
    content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(content.numpy().tobytes()).hexdigest()


def check_same_parameters(found: Sequence[Sequence[str]]) -> None:
    """Refuse optimizers that hold other parameters, or in another order, than the first rank's."""
    first = found[0]
    for rank, other in enumerate(found):
        if list(other) == list(first):
            continue
        lacking = [path for path in first if path not in other]
        beyond = [path for path in other if path not in first]
        raise RuntimeError(
            "FSDP currently requires each rank to have at least the optimizer states needed by "
            "rank 0's optimizer but some ranks are missing some of those states: of the ranks that "
            f"share parameters, the optimizer of rank {rank} lacks {lacking[:10]} and has "
            f"{beyond[:10]} beyond those of rank 0, or has them in another order. Give the "
            "optimizers of all ranks the same parameters"
        )


def resolve(owns: Sequence[Owned], reports: Sequence[Report]) -> list[dict[str, Entry]]:
    """What the ranks' reports come to, for each parameter; empty where none has state."""
    votes: Counter[str] = Counter()
    for report in reports:
        for facts in filter(None, report):
            for key, fact in facts.items():
                if fact.shape:
                    votes[key] += 1 if fact.fits else -1
    return [
        _resolve_one(owned, [report[position] for report in reports], votes)
        for position, owned in enumerate(owns)
    ]


def _resolve_one(
    owned: Owned, found: Sequence[Mapping[str, Fact] | None], votes: Mapping[str, int]
) -> dict[str, Entry]:
    holders = [(rank, facts) for rank, facts in enumerate(found) if facts is not None]
    if not holders:
        return {}
    first, facts = holders[0]
    for rank, other in holders[1:]:
        if other.keys() != facts.keys():
            raise RuntimeError(
                f"The optimizer's state of {owned.path} has entries {sorted(facts)} on rank "
                f"{first} and {sorted(other)} on rank {rank} of those that share it: step the "
                "optimizer on all ranks, with the same options"
            )
    entries: dict[str, Entry] = {}
    for key, fact in facts.items():
        kind = _kind(fact, votes.get(key, 0))
        if kind is Kind.NESTED and fact.fits and len(holders) == 1:
            _refuse(f"{key!r} of {owned.path} has values of a rank's piece inside")
        for rank, other in holders[1:]:
            _compare(f"{key!r} of {owned.path}", kind, (first, fact), (rank, other[key]))
        entries[key] = Entry(kind, fact, first)
    return entries


def _kind(fact: Fact, votes: int) -> Kind:
    if fact.shape is None:
        return Kind.NESTED if isinstance(fact.value, Nested) else Kind.OTHER
    if fact.shape == ():
        return Kind.NUMBER
    return Kind.PER_ELEMENT if votes > 0 else Kind.WHOLE


def _compare(what: str, kind: Kind, one: tuple[int, Fact], two: tuple[int, Fact]) -> None:
    (first, fact), (second, other) = one, two
    alike = (fact.shape is None, fact.dtype) == (other.shape is None, other.dtype)
    if kind is Kind.PER_ELEMENT:
        alike = alike and fact.fits and other.fits
    elif kind is Kind.WHOLE:
        by_accident = fact.fits or other.fits
        alike = alike and fact.shape == other.shape
        alike = alike and (by_accident or fact.value == other.value)
    elif kind is Kind.NESTED:
        alike = alike and fact.value == other.value
    if not alike:
        _refuse(
            f"{what} differs between rank {first} ({fact.shape}, {fact.dtype}) and rank {second} "
            f"({other.shape}, {other.dtype}) of those that share the parameter"
        )


def _refuse(what: str) -> NoReturn:
    raise RuntimeError(
        f"The optimizer's state {what}. A tensor with a value per element is put together where it "
        "stands under a name of its own. What else has not the same value on all ranks belongs to "
        "a rank's piece alone; it can be saved in a local state dict only"
    )


def equal(one: Any, other: Any) -> bool:
    """Whether two entries are the same, tensors in them bit by bit, wherever they are."""
    (ones, form), (others, other_form) = tree_flatten(one), tree_flatten(other)
    return form == other_form and all(
        torch.equal(a.cpu(), b.cpu())
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        else bool(a == b)
        for a, b in zip(ones, others, strict=True)
    )
