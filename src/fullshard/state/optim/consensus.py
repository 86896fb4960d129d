"""What ranks tell each other about optimizer state before tensors are sent: small facts only.

Note: whose state counts
    A rank that holds nothing of a parameter has no state for it, or state that nothing updates.
    So what exists, in which dtype, and every number that is not sharded (a step count) comes from
    the ranks that do hold a part of it. Whether an entry has one value per element is decided over
    all parameters that have it: a history of four values fits a piece of four elements by accident.
    Only entries of such names are told by a digest where they fit, in a second exchange.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils._pytree import tree_flatten, tree_leaves

from .params import Owned

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
#: By the parameters' positions: see ``facts_beside``.
Beside = dict[int, dict[str, Fact]]


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


def facts_beside(owns: Sequence[Owned], states: States) -> Beside:
    """This rank's facts about parameters of which it holds no part, but keeps tensors under them.

    An optimizer may keep what it knows of all parameters together under the first one. State that
    was made ahead of time and never updated, by its counts, is left out.
    """
    found: Beside = {}
    for position, owned in enumerate(owns):
        state = states.get(owned)
        if not state or owned.is_here:
            continue
        leaves = (leaf for leaf in tree_leaves(dict(state)) if isinstance(leaf, torch.Tensor))
        if not any(leaf.dim() and leaf.numel() for leaf in leaves):
            continue
        counts = [value for key, value in state.items() if key == "step" or type(value) is int]
        if not counts or any(counts):
            found[position] = {key: _fact(value, (), None) for key, value in state.items()}
    return found


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
    """Refuse optimizers that hold other parameters than the first rank's.

    ``found`` has each rank's parameters in the model's order, whatever the optimizers' own.
    """
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
            f"{beyond[:10]} beyond those of rank 0. Give the optimizers of all ranks the same "
            "parameters, in whichever order"
        )


def check_beside(
    owns: Sequence[Owned], reports: Sequence[Report], besides: Sequence[Beside]
) -> None:
    """Refuse what ranks keep under parameters that they have no part of, if others have it not."""
    for rank, beside in enumerate(besides):
        for position, other in beside.items():
            holders = ((r, report[position]) for r, report in enumerate(reports))
            first, facts = next(((r, facts) for r, facts in holders if facts), (rank, {}))
            for key, fact in other.items():
                if not (fact.shape or isinstance(fact.value, Nested)) or 0 in (fact.shape or ()):
                    continue
                if key not in facts or facts[key].value != fact.value:
                    _refuse(
                        f"{key!r} of {owns[position].path} differs between rank {first} and rank "
                        f"{rank}, which has no part of the parameter"
                    )


class Forms(NamedTuple):
    """For which parameters entries have a value per element, by all ranks' reports.

    ``votes`` are positive for entries that have one in most places. ``others`` are the shapes that
    entries have where they have not.
    """

    votes: Counter[str]
    fitting: set[str]
    others: dict[str, set[tuple[int, ...]]]

    @classmethod
    def of(cls, reports: Sequence[Report]) -> Forms:
        forms = cls(Counter(), set(), {})
        for facts in (facts for report in reports for facts in report if facts):
            for key, fact in facts.items():
                if fact.shape and fact.fits:
                    forms.votes[key] += 1
                    forms.fitting.add(key)
                elif fact.shape:
                    forms.votes[key] -= 1
                    forms.others.setdefault(key, set()).add(fact.shape)
        return forms

    def by_accident(self) -> set[str]:
        """Entries that fit in some places, though they are the same on all ranks elsewhere."""
        return {key for key in self.fitting & self.others.keys() if self.votes[key] <= 0}


def with_digests(report: Report, owns: Sequence[Owned], states: States, keys: set[str]) -> Report:
    """The report with a digest also of those tensors of the ``keys`` that fit."""
    return [
        facts
        and {
            key: fact._replace(value=_digest(states[owned][key]))
            if key in keys and fact.shape and fact.fits
            else fact
            for key, fact in facts.items()
        }
        for owned, facts in zip(owns, report, strict=True)
    ]


def resolve(
    owns: Sequence[Owned], reports: Sequence[Report], forms: Forms
) -> list[dict[str, Entry]]:
    """What the ranks' reports come to, for each parameter; empty where none has state."""
    return [
        _resolve_one(owned, [report[position] for report in reports], forms)
        for position, owned in enumerate(owns)
    ]


def _resolve_one(
    owned: Owned, found: Sequence[Mapping[str, Fact] | None], forms: Forms
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
        kind = _kind(fact, forms.votes[key])
        if kind is Kind.NESTED and fact.fits and len(holders) == 1:
            _refuse(f"{key!r} of {owned.path} has values of a rank's piece inside")
        if kind is Kind.PER_ELEMENT and not fact.fits:
            _refuse(
                f"{key!r} of {owned.path} has shape {fact.shape} on rank {first}, but a value per "
                "element in most parameters"
            )
        if kind is Kind.WHOLE and fact.fits and len(holders) == 1:
            _check_accident(owned, key, fact, forms)
        for rank, other in holders[1:]:
            _compare(f"{key!r} of {owned.path}", kind, (first, fact), (rank, other[key]))
        entries[key] = Entry(kind, fact, first)
    return entries


def _check_accident(owned: Owned, key: str, fact: Fact, forms: Forms) -> None:
    """Refuse what seems to have a value per element, on the one rank that has the parameter.

    It has not if it has the same shape elsewhere, where it does not fit; and it does not matter if
    that is the shape of the whole parameter.
    """
    whole = not owned.is_flat and owned.shape_of(owned.originals[0]) == fact.shape
    if not whole and fact.shape not in forms.others[key]:
        _refuse(f"{key!r} of {owned.path} has a value per element, which most parameters have not")


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
        alike = alike and fact.shape == other.shape and fact.value == other.value
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
