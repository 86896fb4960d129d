"""Parameter groups of optimizer state dicts: by names, by ids, and from one to the other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from ...api import OptimStateKeyType
from .consensus import equal
from .params import Groups, Original, owned_groups

#: Entries of a group that say which parameters it has; the optimizer knows its own.
_MEMBERS = ("params", "param_names")


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a group's hyperparameters."""
    return {key: copy.deepcopy(value) for key, value in group.items() if key not in _MEMBERS}


def named_groups(saved: Sequence[Mapping[str, Any]], groups: Groups) -> list[dict[str, Any]]:
    """The optimizer's groups with the names of the originals in place of ids."""
    return [
        {**options_of(group), "params": [o.name for owned in owns for o in owned.originals]}
        for group, owns in zip(saved, groups, strict=True)
    ]


def matched_groups(
    saved: Sequence[Mapping[str, Any]], members: Sequence[Sequence[Original]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """For each of the optimizer's groups the saved hyperparameters, and what is wrong with them.

    Groups are found by their members' names, so that their order may differ.
    """
    place = {name: position for position, group in enumerate(saved) for name in group["params"]}
    options: list[dict[str, Any]] = []
    errors: list[str] = []
    for position, originals in enumerate(members):
        homes: dict[int, str] = {}
        for original in originals:
            home = original.find(place)
            if home is None:
                errors.append(f"{original.name} is in none of the saved parameter groups")
            else:
                homes.setdefault(home, original.name)
        found = [options_of(saved[home]) for home in homes]
        if not originals and position < len(saved):
            found = [options_of(saved[position])]
        for other, name in zip(found[1:], list(homes.values())[1:], strict=False):
            if not _same(other, found[0]):
                errors.append(
                    f"group {position} of the optimizer has {next(iter(homes.values()))} and "
                    f"{name}, which were saved in groups with other hyperparameters: "
                    f"{found[0]} and {other}"
                )
        options.append(found[0] if found else {})
    return options, errors


def unexpected_names(
    state_dict: Mapping[str, Any], members: Sequence[Sequence[Original]]
) -> list[str]:
    """Names with saved state, or in saved groups, that the optimizer does not have."""
    known = {name for originals in members for original in originals for name in original.names}
    saved = dict.fromkeys(state_dict["state"])
    for group in state_dict.get("param_groups", ()):
        saved.update(dict.fromkeys(group["params"]))
    return [str(name) for name in saved if name not in known]


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)


def rekeyed(
    state_dict: Mapping[str, Any],
    key_type: OptimStateKeyType,
    model: nn.Module,
    parameter_groups: Sequence[Sequence[nn.Parameter]],
) -> dict[str, Any]:
    """``state_dict`` with parameters called by names, or by their places in the optimizer."""
    groups = owned_groups(model, parameter_groups)
    members = [[_only(owned.originals, owned.path) for owned in group] for group in groups]
    originals = [original for group in members for original in group]
    if key_type is OptimStateKeyType.PARAM_NAME:
        names = {position: original.name for position, original in enumerate(originals)}
        return _translated(state_dict, lambda key: names.get(key, key), "position", names)
    places = {name: i for i, original in enumerate(originals) for name in original.names}
    found = _translated(state_dict, lambda key: places.get(key, key), "name", places)
    # Optimizers match a saved group's parameters with their own by their order in it.
    for group in found["param_groups"]:
        group["params"].sort()
    found["param_groups"].sort(key=lambda group: (group["params"] or [len(places)])[0])
    return found


def _only(originals: Sequence[Original], path: str) -> Original:
    if len(originals) > 1:
        raise ValueError(
            f"{path} holds {len(originals)} parameters ({originals[0].name}, …), which have no ids "
            "of their own: give the unwrapped model, or one with use_orig_params"
        )
    return originals[0]


def _translated(
    state_dict: Mapping[str, Any],
    translate: Callable[[Any], Any],
    what: str,
    known: Mapping[Any, Any],
) -> dict[str, Any]:
    keys = [*state_dict["state"], *(k for g in state_dict["param_groups"] for k in g["params"])]
    wanted = set(known) | set(known.values())
    strangers = [key for key in dict.fromkeys(keys) if key not in wanted]
    if strangers:
        raise ValueError(
            f"The optimizer state dict has parameters that the optimizer's model has not, by {what}"
            f": {strangers[:10]}; it has {len(known)} parameters"
        )
    return {
        **state_dict,
        "state": {translate(key): value for key, value in state_dict["state"].items()},
        "param_groups": [
            {**group, "params": [translate(key) for key in group["params"]]}
            for group in state_dict["param_groups"]
        ],
    }
