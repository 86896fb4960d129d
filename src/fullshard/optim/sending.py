"""State of whole tensors on its way between owners and the ranks that have pieces.

Note: what is cut
    An entry of a parameter's state (``exp_avg``) is cut like the parameter if its tensors have the
    parameter's shape under all parameters that have it. One shape alone does not tell: a table of
    256 values has the shape of a bias, or of a piece of one, by accident. A parameter without
    dimensions does not tell either, whose average looks like a step count. A value that is a dict
    or a list is never cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ..engine.comm.collectives import Group
from ..state.optim.consensus import ALL_UNITS, copied
from . import routes
from .parameters import WholeParameter
from .rounds import Round, arranged, joined

#: The state of each parameter that a rank has.
States = dict[WholeParameter, dict[str, Any]]

#: Tensors of up to so many elements are sent with the facts about them.
_FEW = 64


@dataclasses.dataclass(frozen=True, eq=False)
class Sent:
    """In place of a tensor that its owner sends: its shape, dtype, and whether it is on a host.

    A tensor of a few elements is sent inside it, in host memory, because device numbers differ
    between ranks.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool
    few: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Cut:
    """In place of a tensor that is cut into pieces."""

    dtype: torch.dtype


#: For each parameter with state, by its place among those of a process group: its entries.
Facts = dict[int, dict[str, Any]]


def by_group(rounds: Sequence[Round]) -> Iterator[tuple[Group, list[WholeParameter]]]:
    """The parameters of each process group."""
    groups: dict[Group, list[WholeParameter]] = {}
    for each in rounds:
        groups.setdefault(each.group, []).extend(each.parameters)
    yield from groups.items()


def cut_everywhere(group: Group, votes: Iterable[tuple[str, bool]]) -> tuple[set[str], set[str]]:
    """The names of entries that are cut, and those of others that some parameter could cut.

    ``votes`` has, for each tensor of this rank, the entry's name and whether it could be cut.
    """
    matching: set[str] = set()
    others: set[str] = set()
    for key, matches in votes:
        (matching if matches else others).add(key)
    for told in group.gather_objects((matching, others), ALL_UNITS):
        matching |= told[0]
        others |= told[1]
    return matching - others, matching & others


def fact(leaf: Any) -> Any:
    """What is sent to all ranks for a state value: itself, or a tensor's shape and dtype."""
    if not isinstance(leaf, torch.Tensor):
        return copied(leaf)
    few = copied(leaf, torch.device("cpu")) if leaf.numel() <= _FEW else None
    return Sent(tuple(leaf.shape), leaf.dtype, leaf.device.type == "cpu", few)


def cut_entries(facts: Facts) -> list[tuple[str, torch.dtype]]:
    """The names and dtypes of entries that are cut, in an order that all ranks share."""
    found = {
        (key, told.dtype)
        for entries in facts.values()
        for key, told in entries.items()
        if isinstance(told, Cut)
    }
    return sorted(found, key=str)


def broadcast(group: Group, owner: int, described: Any, own: Any, device: torch.device) -> Any:
    """A value that is not cut, as ``owner`` has it.

    ``described`` is the value with others in place of its tensors.
    """
    large = [leaf for leaf in tree_leaves(own) if _is_large(leaf)] if owner == group.rank else []
    remaining = iter(large)

    def receive(leaf: Any) -> Any:
        if not isinstance(leaf, Sent):
            return leaf
        if leaf.few is not None:
            return leaf.few.to("cpu" if leaf.on_host else device, copy=True)
        if owner == group.rank:
            sent = next(remaining).detach().to(device).contiguous().clone()
        else:
            sent = torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
        group.broadcast_by(owner, sent, ALL_UNITS)
        return sent.cpu() if leaf.on_host else sent

    return tree_map(receive, described)


def _is_large(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.numel() > _FEW


def pieces_from_owners(
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


def wholes_at_owners(
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
