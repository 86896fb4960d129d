"""From an optimizer's own state dict to one by names, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...api import FullOptimStateDictConfig, LocalOptimStateDictConfig, OptimStateDictConfig
from ...engine.params.locations import clean_tensor_name
from ..model.state_hooks import ModelState
from .consensus import States
from .groups import matched_groups, named_groups, options_of, unexpected_names
from .load import Arrival, Here, Loading
from .local import (
    SHAPES,
    local_problems,
    local_shapes,
    local_state,
    local_state_to_load,
)
from .params import Groups, Original, Owned, owned_groups, units_of, wrappers_in
from .save import Saving
from .scatter import Scattered

_PARTS = ("state", "param_groups")


def named_state_dict(
    model: nn.Module,
    parameter_groups: list[list[nn.Parameter]],
    state_dict: Mapping[str, Any],
    config: OptimStateDictConfig,
) -> dict[str, Any]:
    """An optimizer's own ``state_dict`` as ``config`` asks for it; empty where nothing is to be."""
    _check_form(state_dict, "the optimizer's own state dict")
    groups = owned_groups(model, parameter_groups)
    states = _states(groups, state_dict)
    rest = {key: value for key, value in state_dict.items() if key not in _PARTS}
    # Programs that keep the groups elsewhere give, and get, state without them.
    saved_groups = state_dict.get("param_groups")
    with torch.no_grad():
        if isinstance(config, LocalOptimStateDictConfig):
            found: dict[str, Any] = {"state": local_state(groups, states, config.offload_to_cpu)}
            if saved_groups is not None:
                found["param_groups"] = _local_groups(saved_groups, groups)
            return {**found, SHAPES: local_shapes(groups), **rest}
        only_first = isinstance(config, FullOptimStateDictConfig) and config.rank0_only
        visible = not only_first or _is_first(model, groups)
        found = {"state": Saving(groups, states, config).run()}
    if not visible:
        return {}
    if saved_groups is not None:
        found["param_groups"] = named_groups(saved_groups, groups)
    return {**found, **rest}


def state_dict_to_load(
    model: nn.Module,
    parameter_groups: list[list[nn.Parameter]],
    state_dict: Mapping[str, Any] | None,
    config: OptimStateDictConfig,
    by_name: bool = False,
) -> dict[str, Any]:
    """What the optimizer on this rank can load of a ``state_dict`` by names."""
    groups = owned_groups(model, parameter_groups)
    with torch.no_grad():
        if isinstance(config, LocalOptimStateDictConfig):
            return _local_to_load(model, groups, state_dict, by_name)
        arrival: Arrival = Here()
        if isinstance(config, FullOptimStateDictConfig) and config.rank0_only:
            arrival = scattered = Scattered(_outermost(model))
            state_dict = scattered.announce(state_dict)
        _check_form(state_dict, "an optimizer state dict to load")
        assert state_dict is not None
        loading = Loading(groups, state_dict["state"], arrival)
        options = _matched(model, state_dict, _members(groups), loading.problems())
        names = _names_in(model, groups) if by_name else None
        return _keyed(groups, loading.run(), options, state_dict, names)


def check_fits(
    model: nn.Module, parameter_groups: list[list[nn.Parameter]], state_dict: Mapping[str, Any]
) -> None:
    """Raise what :func:`state_dict_to_load` would, on this rank and without communication."""
    groups = owned_groups(model, parameter_groups)
    _check_form(state_dict, "an optimizer state dict to load")
    problems = Loading(groups, state_dict["state"], Here()).problems()
    _matched(model, state_dict, _members(groups), problems)


def _members(groups: Groups) -> list[list[Original]]:
    return [[o for owned in group for o in owned.originals] for group in groups]


def _local_to_load(
    model: nn.Module, groups: Groups, state_dict: Mapping[str, Any] | None, by_name: bool
) -> dict[str, Any]:
    _check_form(state_dict, "a local optimizer state dict")
    assert state_dict is not None
    members = [[Original((owned.path,)) for owned in group] for group in groups]
    problems = local_problems(groups, state_dict.get(SHAPES, {}))
    options = _matched(model, state_dict, members, problems)
    rest = {key: value for key, value in state_dict.items() if key != SHAPES}
    found = local_state_to_load(groups, state_dict["state"])
    names = _names_in(model, groups) if by_name else None
    return _keyed(groups, found, options, rest, names)


def _matched(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    members: list[list[Original]],
    problems: list[str],
) -> list[dict[str, Any]] | None:
    """Hyperparameters for each group, if all that was saved is for this optimizer.

    None where the state dict has no groups: programs may keep them elsewhere.
    """
    options: list[dict[str, Any]] | None = None
    errors: list[str] = []
    if "param_groups" in state_dict:
        options, errors = matched_groups(state_dict["param_groups"], members)
    unexpected = unexpected_names(state_dict, members)
    if unexpected:
        errors.append(f"the optimizer has no parameters named {unexpected}")
    errors += problems
    if errors:
        raise RuntimeError(
            f"Error(s) in loading the optimizer state dict for {type(model).__name__}:\n\t"
            + "\n\t".join(errors)
        )
    return options


def _keyed(
    groups: Groups,
    found: Mapping[Owned, dict[str, Any]],
    options: list[dict[str, Any]] | None,
    state_dict: Mapping[str, Any],
    names: Mapping[Owned, str] | None,
) -> dict[str, Any]:
    order = [owned for group in groups for owned in group]
    keys: Mapping[Owned, Any] = names or {owned: place for place, owned in enumerate(order)}
    loaded: dict[str, Any] = {
        "state": {keys[owned]: found[owned] for owned in order if owned in found}
    }
    if options is not None:
        loaded["param_groups"] = [
            {**chosen, "params": [keys[owned] for owned in group]}
            for chosen, group in zip(options, groups, strict=True)
        ]
    rest = {key: value for key, value in state_dict.items() if key not in _PARTS}
    return {**loaded, **rest}


def _names_in(model: nn.Module, groups: Groups) -> dict[Owned, str]:
    """What ``model.named_parameters()`` calls the optimizer's parameters, prefixes included."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {owned: names.get(owned.parameter, owned.path) for group in groups for owned in group}


def _states(groups: Groups, state_dict: Mapping[str, Any]) -> States:
    """The optimizer's state by parameter, whatever it calls its parameters."""
    order = [owned for group in groups for owned in group]
    keys = _keys(groups, state_dict)
    holders = _called(keys, order) or order
    state = state_dict["state"]
    return {o: state[key] for key, o in zip(keys, holders, strict=True) if key in state}


def _keys(groups: Groups, state_dict: Mapping[str, Any]) -> list[Any]:
    """What the optimizer calls its parameters: by its groups, or by their places without them."""
    if "param_groups" not in state_dict:
        places = list(range(sum(map(len, groups))))
        strangers = [key for key in state_dict["state"] if key not in places]
        if strangers:
            raise ValueError(
                f"A state dict without 'param_groups' has state by the parameters' places in the "
                f"optimizer, 0 to {len(places) - 1}, but this one has {strangers[:10]}"
            )
        return places
    saved = state_dict["param_groups"]
    if [len(g["params"]) for g in saved] != [len(group) for group in groups]:
        raise ValueError(
            f"The state dict has parameter groups of {[len(g['params']) for g in saved]} "
            f"parameters, the optimizer of {[len(group) for group in groups]}: give what "
            "optim.state_dict() returns on this rank"
        )
    return [key for group in saved for key in group["params"]]


def _called(keys: Sequence[Any], order: Sequence[Owned]) -> list[Owned] | None:
    """Whom an optimizer means that calls parameters by name; it may list them in any order."""
    named = {name: owned for owned in order for name in (owned.path, *owned.names)}
    found = [named.get(clean_tensor_name(key)) if isinstance(key, str) else None for key in keys]
    known = [owned for owned in found if owned is not None]
    return known if len(set(known)) == len(order) else None


def _local_groups(saved: Sequence[Mapping[str, Any]], groups: Groups) -> list[dict[str, Any]]:
    return [
        {**options_of(group), "params": [owned.path for owned in owns]}
        for group, owns in zip(saved, groups, strict=True)
    ]


def _check_form(state_dict: Any, what: str) -> None:
    if isinstance(state_dict, Mapping) and isinstance(state_dict.get("state"), Mapping):
        return
    found = list(state_dict)[:5] if isinstance(state_dict, Mapping) else type(state_dict).__name__
    raise ValueError(
        f"Expects {what}, a dict with 'state' and 'param_groups', but got {found}. Where only the "
        "first rank has one, choose FullOptimStateDictConfig(rank0_only=True)"
    )


def _outermost(model: nn.Module) -> ModelState:
    for _, state in wrappers_in(model):
        return state
    raise ValueError(
        f"{type(model).__name__} has no unit: without FullyShardedDataParallel no rank can know "
        "which others to share the optimizer's state with"
    )


def _is_first(model: nn.Module, groups: Groups) -> bool:
    """Whether this rank is to have what only one has."""
    first = next((state for _, state in wrappers_in(model)), None)
    if first is None:
        return not dist.is_initialized() or dist.get_rank() == 0
    if not first.is_first:
        return False
    for state in units_of(groups):
        if not state.is_first:
            raise RuntimeError(
                f"Unit {state.unit.name!r} uses other ranks than the outermost unit, and the first "
                "of them is another, so that no rank can have all of the optimizer's state: use "
                "rank0_only=False, or sharded state"
            )
    return True
