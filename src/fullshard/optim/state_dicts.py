"""The state of whole tensors as an optimizer over shards would have it, and back.

Note: one format
    An optimizer over shards has, on every rank, its piece of each state tensor that has the
    parameter's shape, and every other value in full. State is brought into this form when it is
    saved, and to the owners when it is loaded. So whatever turns the state of such an optimizer
    into the unwrapped model's, or saves it, does so with this one. Owners at loading may be others
    than at saving.

    ``sending.py`` says what is cut. Tensors of another class are saved as the plain tensors inside
    them (``tensor_classes.py``).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ..engine.comm.collectives import Group
from ..state.optim.consensus import ALL_UNITS, copied
from .parameters import WholeParameter
from .rounds import Round
from .sending import (
    Cut,
    Facts,
    Sent,
    States,
    broadcast,
    by_group,
    cut_entries,
    cut_everywhere,
    fact,
    pieces_from_owners,
    wholes_at_owners,
)
from .tensor_classes import put_together, taken_apart
from .twins import Twins

# -- saving ---------------------------------------------------------------------------------------


def saved_state_dict(
    twins: Twins, rounds: Sequence[Round], rest: torch.optim.Optimizer | None
) -> dict[str, Any]:
    """The state dict of both optimizers; all ranks call this."""
    owned = _owned_states(rounds)
    found: States = {}
    with torch.no_grad():
        for group, members in by_group(rounds):
            found.update(_spread(group, members, owned))
    state: dict[Any, Any] = {
        position: found[parameter]
        for position, parameter in enumerate(twins.parameters)
        if parameter in found
    }
    state.update(copied(_of_no_parameter(rounds[0].optimizer.state)))
    options = [dict(each) for each in twins.shown]
    count = len(twins.parameters)
    if rest is not None:
        saved = rest.state_dict()
        state.update(
            (count + key if isinstance(key, int) else key, value)
            for key, value in saved["state"].items()
        )
        options += saved["param_groups"]
    following = 0
    for each in options:
        size = len(each["params"])
        each["params"] = list(range(following, following + size))
        following += size
    return {"state": state, "param_groups": options}


def _of_no_parameter(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """The entries of an optimizer's state that belong to no parameter, such as a count of steps.

    They are equal in the optimizers of all rounds.
    """
    return {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}


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


def _spread(group: Group, members: Sequence[WholeParameter], owned: States) -> States:
    """This rank's pieces of the state of ``members``, which their owners have in full."""
    group.begin_pass("state of whole tensors", ALL_UNITS)
    mine = {i: owned[each] for i, each in enumerate(members) if each in owned}
    cut, _ = cut_everywhere(group, _votes_of_shapes(members, mine))
    described = {
        i: {key: _described(key, value, cut) for key, value in entries.items()}
        for i, entries in mine.items()
    }
    facts: Facts = {}
    for told in group.gather_objects(described, ALL_UNITS):
        facts.update(told)
    found: States = {members[i]: {} for i in sorted(facts)}
    for key, dtype in cut_entries(facts):
        chosen = [i for i in sorted(facts) if facts[i].get(key) == Cut(dtype)]
        parameters = [members[i] for i in chosen]
        wholes = {members[i]: mine[i][key] for i in chosen if i in mine}
        pieces = pieces_from_owners(group, parameters, wholes, dtype)
        for each, piece in pieces.items():
            found[each][key] = each.as_piece(piece)
    for i in sorted(facts):
        each = members[i]
        for key, told in facts[i].items():
            if not isinstance(told, Cut):
                own = mine[i][key] if i in mine else None
                found[each][key] = broadcast(group, each.owner, told, own, each.device)
    # In the order of the optimizer's own entries.
    return {
        each: {key: found[each][key] for key in facts[i]}
        for i, each in ((i, members[i]) for i in sorted(facts))
        if each.holds_piece or each.is_cut_in_rows
    }


def _votes_of_shapes(
    members: Sequence[WholeParameter], mine: Mapping[int, Mapping[str, Any]]
) -> Iterator[tuple[str, bool]]:
    for i, entries in mine.items():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor) and members[i].shape:
                is_plain = type(value) is torch.Tensor
                yield key, is_plain and tuple(value.shape) == members[i].shape


def _described(key: str, value: Any, cut: set[str]) -> Any:
    if key in cut and isinstance(value, torch.Tensor):
        return Cut(value.dtype)
    return tree_map(fact, value)


# -- loading --------------------------------------------------------------------------------------


def load_state_dict(
    twins: Twins,
    rounds: Sequence[Round],
    rest: torch.optim.Optimizer | None,
    state_dict: Mapping[str, Any],
) -> bool:
    """Load a state dict of both optimizers; all ranks call this.

    Returns whether there is state of any whole tensor.
    """
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
    is_there = False
    with torch.no_grad():
        for group, members in by_group(rounds):
            collected, has_state = _collect(group, members, given)
            owned.update(collected)
            is_there |= has_state
    of_parameters = {key for group in saved for key in group["params"]}
    others = {key: value for key, value in states.items() if key not in of_parameters}
    for group_shown, group_saved in zip(twins.shown, saved, strict=False):
        options = {key: value for key, value in group_saved.items() if key != "params"}
        group_shown.update(copy.deepcopy(options))
    # Before, because optimizers look at their groups as they load; after, because these are copies.
    twins.tell()
    _load_into_rounds(rounds, owned, others)
    twins.tell_all()
    if rest is not None:
        chosen = saved[count:]
        members_of_rest = {key for group in chosen for key in group["params"]}
        rest_state = {key: value for key, value in states.items() if key in members_of_rest}
        rest.load_state_dict({"state": {**rest_state, **others}, "param_groups": chosen})
    return is_there


def _load_into_rounds(rounds: Sequence[Round], owned: States, others: Mapping[Any, Any]) -> None:
    for each in rounds:
        current = each.optimizer.state_dict()
        groups = zip(each.optimizer.param_groups, current["param_groups"], strict=True)
        keys = {
            parameter: key
            for group, named in groups
            for parameter, key in zip(group["params"], named["params"], strict=True)
        }
        mine = {keys[p.stand_in]: put_together(owned[p]) for p in each.parameters if p in owned}
        each.optimizer.load_state_dict({**current, "state": {**mine, **copied(others)}})


def _collect(group: Group, members: Sequence[WholeParameter], given: States) -> tuple[States, bool]:
    """The state of the parameters that this rank owns, of what all ranks were given.

    And whether any rank was given any.
    """
    group.begin_pass("load state of whole tensors", ALL_UNITS)
    mine = {i: given[each] for i, each in enumerate(members) if each in given}
    pieces = dict(_pieces(members, mine))
    cut, doubtful = cut_everywhere(group, _votes_of_pieces(members, mine, pieces))
    described = {
        i: {
            key: Cut(pieces[i, key].dtype)
            if (i, key) in pieces and key in cut
            else tree_map(fact, value)
            for key, value in entries.items()
        }
        for i, entries in mine.items()
    }
    told: list[Facts] = group.gather_objects(described, ALL_UNITS)
    facts = {
        i: _holders(members[i], i, told, doubtful)
        for i in sorted({i for rank in told for i in rank})
    }
    found: States = {members[i]: {} for i in facts if members[i].is_mine}
    for key, dtype in cut_entries({i: entries for i, (_, entries) in facts.items()}):
        chosen = [i for i, (_, entries) in facts.items() if entries.get(key) == Cut(dtype)]
        parameters = [members[i] for i in chosen]
        own = {members[i]: pieces[i, key] for i in chosen if (i, key) in pieces}
        for each, value in wholes_at_owners(group, parameters, own, dtype).items():
            found[each][key] = value
    for i, (source, entries) in facts.items():
        each = members[i]
        for key, described_value in entries.items():
            if isinstance(described_value, Cut):
                continue
            own_value = mine[i].get(key) if i in mine else None
            if source == each.owner:
                value = copied(own_value)
            else:
                value = broadcast(group, source, described_value, own_value, each.device)
            if each.is_mine:
                found[each][key] = value
    loaded = {
        each: {key: found[each][key] for key in facts[i][1]}
        for i, each in enumerate(members)
        if each in found
    }
    return loaded, bool(facts)


def _pieces(
    members: Sequence[WholeParameter], mine: Mapping[int, Mapping[str, Any]]
) -> Iterator[tuple[tuple[int, str], torch.Tensor]]:
    """The flat pieces among the tensors that this rank was given, by parameter and entry."""
    for i, entries in mine.items():
        for key, value in entries.items():
            piece = members[i].from_piece(value) if isinstance(value, torch.Tensor) else None
            if piece is not None:
                yield (i, key), piece


def _votes_of_pieces(
    members: Sequence[WholeParameter],
    mine: Mapping[int, Mapping[str, Any]],
    pieces: Mapping[tuple[int, str], torch.Tensor],
) -> Iterator[tuple[str, bool]]:
    for i, entries in mine.items():
        if members[i].holds_piece and members[i].shape:
            for key, value in entries.items():
                if isinstance(value, torch.Tensor):
                    yield key, (i, key) in pieces


def _holders(
    each: WholeParameter, index: int, told: Sequence[Facts], doubtful: set[str]
) -> tuple[int, dict[str, Any]]:
    """The rank whose values count, and the entries of a parameter as the ranks agree on them.

    That is the owner, if it was given any, else the first rank that was. An entry is a piece if it
    is one on every rank that has a piece of the parameter; a ``doubtful`` one has the same shape on
    all of them.
    """
    ranks = [rank for rank, facts in enumerate(told) if index in facts]
    source = each.owner if each.owner in ranks else ranks[0]
    entries = dict(told[source][index])
    needed = [rank for rank, size in enumerate(each.parcel.sizes) if size]
    for key, expected in entries.items():
        if not (isinstance(expected, Cut) or key in doubtful):
            continue
        for rank in needed:
            other = told[rank].get(index, {}).get(key)
            if not _alike(expected, other):
                raise RuntimeError(
                    f"Optimizer state {key!r} of parameter {each.name} is {_words(expected)} on "
                    f"rank {source}, but on rank {rank}, which has a piece of the parameter, it is "
                    f"{'missing' if other is None else _words(other)}. Load the state dict on all "
                    "ranks, as FSDP.optim_state_dict_to_load returns it"
                )
    return source, entries


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, Sent) and isinstance(other, Sent):
        return one.shape == other.shape and one.dtype == other.dtype
    return type(one) is type(other) and (not isinstance(one, Cut) or one == other)


def _words(described: Any) -> str:
    if isinstance(described, Cut):
        return f"a piece of {described.dtype}"
    if isinstance(described, Sent):
        return f"a {described.dtype} tensor of shape {described.shape}"
    return f"a {type(described).__name__}"
