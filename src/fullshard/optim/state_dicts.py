"""The state of whole tensors as an optimizer over shards would have it, and back.

Note: one format
    An optimizer over shards has, on every rank, its piece of each state tensor that has the
    parameter's shape, and every other value in full. State is brought into this form when it is
    saved, and to the owners when it is loaded. So whatever turns the state of such an optimizer
    into the unwrapped model's, or saves it, does so with this one. Owners at loading may be others
    than at saving.

    An entry is cut if it is a tensor of the parameter's shape under all parameters that have it. A
    value that is a dict or a list is never cut. Tensors of another class are saved as the plain
    tensors inside them (``tensor_classes.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ..engine.comm.collectives import Group
from ..state.optim.consensus import ALL_UNITS, copied
from . import routes
from .parameters import WholeParameter
from .rounds import Round, arranged, joined
from .tensor_classes import put_together, taken_apart
from .twins import Twins

#: The state of each parameter that a rank has.
States = dict[WholeParameter, dict[str, Any]]

#: Tensors of up to so many elements are sent with the facts about them.
_FEW = 64


@dataclasses.dataclass(frozen=True, eq=False)
class _Sent:
    """In place of a tensor that its owner sends: its shape, dtype, and whether it is on a host.

    A tensor of a few elements is sent inside it, in host memory, because device numbers differ
    between ranks.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool
    few: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class _Cut:
    """In place of a tensor that is cut into pieces."""

    dtype: torch.dtype


#: For each parameter with state, by its index among those of a process group: its entries.
_Facts = dict[int, dict[str, Any]]


# -- saving ---------------------------------------------------------------------------------------


def saved_state_dict(
    twins: Twins, rounds: Sequence[Round], rest: torch.optim.Optimizer | None
) -> dict[str, Any]:
    """The state dict of both optimizers; all ranks call this."""
    owned = _owned_states(rounds)
    found: States = {}
    with torch.no_grad():
        for group, members in _by_group(rounds):
            found.update(_spread(group, members, owned))
    state: dict[int, Any] = {
        position: found[parameter]
        for position, parameter in enumerate(twins.parameters)
        if parameter in found
    }
    options = [dict(each) for each in twins.shown]
    count = len(twins.parameters)
    if rest is not None:
        saved = rest.state_dict()
        state.update((count + position, value) for position, value in saved["state"].items())
        options += saved["param_groups"]
    following = 0
    for each in options:
        size = len(each["params"])
        each["params"] = list(range(following, following + size))
        following += size
    return {"state": state, "param_groups": options}


def _owned_states(rounds: Sequence[Round]) -> States:
    """The state of the parameters that this rank owns.

    As optimizers hold it, not as they save it: those of bitsandbytes put tensors of a parameter's
    shape into a dict, which could not be cut.
    """
    return {
        member: taken_apart(each.optimizer.state[member.stand_in])
        for each in rounds
        for member in each.parameters
        if each.optimizer.state.get(member.stand_in)
    }


def _by_group(rounds: Sequence[Round]) -> Iterator[tuple[Group, list[WholeParameter]]]:
    groups: dict[Group, list[WholeParameter]] = {}
    for each in rounds:
        groups.setdefault(each.group, []).extend(each.parameters)
    yield from groups.items()


def _spread(group: Group, members: Sequence[WholeParameter], owned: States) -> States:
    """This rank's pieces of the state of ``members``, which their owners have in full."""
    group.begin_pass("state of whole tensors", ALL_UNITS)
    mine = {i: owned[each] for i, each in enumerate(members) if each in owned}
    cut = _cut_everywhere(group, members, mine)
    described = {
        i: {key: _described(key, value, cut) for key, value in entries.items()}
        for i, entries in mine.items()
    }
    facts: _Facts = {}
    for told in group.gather_objects(described, ALL_UNITS):
        facts.update(told)
    found: States = {members[i]: {} for i in sorted(facts)}
    for key, dtype in sorted(_cut_entries(facts), key=str):
        chosen = [i for i in sorted(facts) if facts[i].get(key) == _Cut(dtype)]
        parameters = [members[i] for i in chosen]
        wholes = {members[i]: mine[i][key] for i in chosen if i in mine}
        pieces = _pieces_from_owners(group, parameters, wholes, dtype)
        for each, piece in pieces.items():
            found[each][key] = each.as_piece(piece)
    for i in sorted(facts):
        each = members[i]
        for key, fact in facts[i].items():
            if not isinstance(fact, _Cut):
                own = mine[i][key] if i in mine else None
                found[each][key] = _broadcast(group, each.owner, fact, own, each.device)
    # In the order of the optimizer's own entries.
    return {
        each: {key: found[each][key] for key in facts[i]}
        for i, each in ((i, members[i]) for i in sorted(facts))
        if each.holds_piece or each.is_cut_in_rows
    }


def _cut_everywhere(
    group: Group, members: Sequence[WholeParameter], mine: Mapping[int, Mapping[str, Any]]
) -> set[str]:
    """The names of the entries that are cut: see the note above."""
    matching: set[str] = set()
    others: set[str] = set()
    for i, entries in mine.items():
        for key, value in entries.items():
            matches = (
                type(value) is torch.Tensor
                and value.dim() > 0
                and tuple(value.shape) == members[i].shape
            )
            (matching if matches else others).add(key)
    for told in group.gather_objects((matching, others), ALL_UNITS):
        matching |= told[0]
        others |= told[1]
    return matching - others


def _described(key: str, value: Any, cut: set[str]) -> Any:
    if key in cut:
        return _Cut(value.dtype)
    return tree_map(_fact, value)


def _fact(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return copied(leaf)
    few = copied(leaf, torch.device("cpu")) if leaf.numel() <= _FEW else None
    return _Sent(tuple(leaf.shape), leaf.dtype, leaf.device.type == "cpu", few)


def _cut_entries(facts: _Facts) -> set[tuple[str, torch.dtype]]:
    return {
        (key, fact.dtype)
        for entries in facts.values()
        for key, fact in entries.items()
        if isinstance(fact, _Cut)
    }


def _broadcast(group: Group, owner: int, fact: Any, own: Any, device: torch.device) -> Any:
    """A value that is not cut, as ``owner`` has it; ``fact`` has places for its large tensors."""
    large = [leaf for leaf in tree_leaves(own) if _is_large(leaf)] if owner == group.rank else []
    remaining = iter(large)

    def receive(leaf: Any) -> Any:
        if not isinstance(leaf, _Sent):
            return leaf
        if leaf.few is not None:
            return leaf.few.to("cpu" if leaf.on_host else device, copy=True)
        if owner == group.rank:
            sent = next(remaining).detach().to(device).contiguous().clone()
        else:
            sent = torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
        group.broadcast_by(owner, sent, ALL_UNITS)
        return sent.cpu() if leaf.on_host else sent

    return tree_map(receive, fact)


def _is_large(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.numel() > _FEW


def _pieces_from_owners(
    group: Group,
    parameters: Sequence[WholeParameter],
    wholes: Mapping[WholeParameter, torch.Tensor],
    dtype: torch.dtype,
) -> dict[WholeParameter, torch.Tensor]:
    """This rank's flat pieces of tensors that the owners have in full."""
    journey = routes.from_owners([each.parcel for each in parameters], group.rank, group.size)
    cuts: list[torch.Tensor] = []
    for each in parameters:
        if each.is_mine:
            cuts += each.cuts_of(each.pieces_of(wholes[each].to(each.device)))
    held = [each for each in parameters if each.holds_piece]
    arrived = _exchanged(group, journey, cuts, dtype, parameters[0].device)
    found = {each: part.clone() for each, (part,) in zip(held, arrived, strict=True)}
    for each in parameters:
        if each.is_cut_in_rows and each not in found:
            found[each] = torch.empty(0, dtype=dtype, device=each.device)
    return found


def _wholes_at_owners(
    group: Group,
    parameters: Sequence[WholeParameter],
    pieces: Mapping[WholeParameter, torch.Tensor],
    dtype: torch.dtype,
) -> dict[WholeParameter, torch.Tensor]:
    """The tensors that this rank owns, of which all ranks have flat pieces."""
    journey = routes.to_owners([each.parcel for each in parameters], group.rank, group.size)
    cuts = [pieces[each].to(each.device) if each.holds_piece else None for each in parameters]
    mine = [each for each in parameters if each.is_mine]
    arrived = _exchanged(group, journey, cuts, dtype, parameters[0].device)
    return {each: each.whole(torch.cat(parts)) for each, parts in zip(mine, arrived, strict=True)}


def _exchanged(
    group: Group,
    journey: routes.Journey,
    cuts: Sequence[torch.Tensor | None],
    dtype: torch.dtype,
    device: torch.device,
) -> list[list[torch.Tensor]]:
    chosen = (cuts[index] for index in journey.order)
    sent = joined([each for each in chosen if each is not None], dtype, device)
    received = sent.new_empty(sum(journey.received))
    group.start_exchange(received, sent, journey.received, journey.sent, ALL_UNITS)()
    return arranged(received, journey)


# -- loading --------------------------------------------------------------------------------------


def load_state_dict(
    twins: Twins,
    rounds: Sequence[Round],
    rest: torch.optim.Optimizer | None,
    state_dict: Mapping[str, Any],
) -> None:
    """Load a state dict of both optimizers; all ranks call this."""
    count = len(twins.shown)
    saved = list(state_dict["param_groups"])
    shown = [*twins.shown, *(rest.param_groups if rest is not None else ())]
    sizes = [len(group["params"]) for group in saved]
    if sizes != [len(group["params"]) for group in shown]:
        raise ValueError(
            f"The state dict has parameter groups of {sizes} parameters, and the optimizer has "
            f"groups of {[len(group['params']) for group in shown]}: first those of whole tensors, "
            "then those of the second optimizer. Load the state of an optimizer that was made with "
            "the same functions and the same select="
        )
    states = state_dict["state"]
    keys = [key for group in saved[:count] for key in group["params"]]
    given: States = {
        each: dict(states[key])
        for each, key in zip(twins.parameters, keys, strict=True)
        if states.get(key)
    }
    owned: States = {}
    with torch.no_grad():
        for group, members in _by_group(rounds):
            owned.update(_collect(group, members, given))
    for group_shown, group_saved in zip(twins.shown, saved, strict=False):
        group_shown.update((k, v) for k, v in group_saved.items() if k != "params")
    twins.tell()
    _load_into_rounds(twins, rounds, owned)
    if rest is not None:
        chosen = saved[count:]
        members_of_rest = {key for group in chosen for key in group["params"]}
        rest_state = {key: value for key, value in states.items() if key in members_of_rest}
        rest.load_state_dict({"state": rest_state, "param_groups": chosen})


def _load_into_rounds(twins: Twins, rounds: Sequence[Round], owned: States) -> None:
    positions = {each: position for position, each in enumerate(twins.parameters)}
    for each in rounds:
        mine = {positions[p]: put_together(owned[p]) for p in each.parameters if p in owned}
        current = each.optimizer.state_dict()
        each.optimizer.load_state_dict({**current, "state": mine})


def _collect(group: Group, members: Sequence[WholeParameter], given: States) -> States:
    """The state of the parameters that this rank owns, of what all ranks were given."""
    group.begin_pass("load state of whole tensors", ALL_UNITS)
    mine = {i: given[each] for i, each in enumerate(members) if each in given}
    pieces: dict[tuple[int, str], torch.Tensor] = {}
    for i, entries in mine.items():
        for key, value in entries.items():
            piece = members[i].from_piece(value) if isinstance(value, torch.Tensor) else None
            if piece is not None:
                pieces[i, key] = piece
    described = {
        i: {
            key: _Cut(pieces[i, key].dtype) if (i, key) in pieces else tree_map(_fact, value)
            for key, value in entries.items()
        }
        for i, entries in mine.items()
    }
    told: list[_Facts] = group.gather_objects(described, ALL_UNITS)
    facts = {i: _holders(members[i], i, told) for i in sorted({i for rank in told for i in rank})}
    found: States = {members[i]: {} for i in facts if members[i].is_mine}
    for key, dtype in sorted(_cut_entries({i: fact for i, (_, fact) in facts.items()}), key=str):
        chosen = [i for i, (_, fact) in facts.items() if fact.get(key) == _Cut(dtype)]
        parameters = [members[i] for i in chosen]
        own = {members[i]: pieces[i, key] for i in chosen if (i, key) in pieces}
        for each, value in _wholes_at_owners(group, parameters, own, dtype).items():
            found[each][key] = value
    for i, (source, fact) in facts.items():
        each = members[i]
        for key, described_value in fact.items():
            if isinstance(described_value, _Cut):
                continue
            own_value = mine[i].get(key) if i in mine else None
            if source == each.owner:
                value = copied(own_value)
            else:
                value = _broadcast(group, source, described_value, own_value, each.device)
            if each.is_mine:
                found[each][key] = value
    return {
        each: {key: found[each][key] for key in facts[i][1]}
        for i, each in enumerate(members)
        if each in found
    }


def _holders(
    each: WholeParameter, index: int, told: Sequence[_Facts]
) -> tuple[int, dict[str, Any]]:
    """The rank whose values count, and the entries of a parameter as the ranks agree on them.

    That is the owner, if it was given any, else the first rank that was. An entry is a piece if it
    is one on every rank that has a piece of the parameter.
    """
    ranks = [rank for rank, facts in enumerate(told) if index in facts]
    source = each.owner if each.owner in ranks else ranks[0]
    entries = dict(told[source][index])
    needed = [rank for rank, size in enumerate(each.parcel.sizes) if size]
    for key, fact in entries.items():
        if not isinstance(fact, _Cut):
            continue
        for rank in needed:
            other = told[rank].get(index, {}).get(key)
            if other != fact:
                raise RuntimeError(
                    f"Optimizer state {key!r} of parameter {each.name} is a piece of {fact.dtype} "
                    f"on rank {source}, but on rank {rank}, which has a piece of the parameter, "
                    f"it is {'missing' if other is None else 'something else'}. Load the state "
                    "dict on all ranks, as FSDP.optim_state_dict_to_load returns it"
                )
    return source, entries
