"""Converts a state dict keyed by names into one that this rank's optimizer can load."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from ...api import FullOptimStateDictConfig, LocalOptimStateDictConfig, OptimStateDictConfig
from ...engine.params.handle import FlatParamHandle
from ..model.sharded_tensors import is_sharded, shape_of
from ..model.unit_state import UnitState
from .consensus import copied
from .params import (
    Groups,
    OptimParam,
    OriginalParam,
    by_unit,
    in_model_order,
    optim_groups,
    unit_states,
)
from .save import CONVERTED, LOCAL_SHAPES, check_form, hyperparameters, local_shapes
from .sources import EveryRank, FirstRank, Source, check_chunks

SavedState = Mapping[str, Mapping[str, Any]]

#: The numbers that torch's optimizers keep: a step count, and what NAdam and ASGD derive from it.
_NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})


def state_dict_to_load(
    model: nn.Module,
    parameter_groups: list[list[nn.Parameter]],
    state_dict: Mapping[str, Any] | None,
    config: OptimStateDictConfig,
    by_name: bool = False,
) -> dict[str, Any]:
    """A ``state_dict`` by parameter names as this rank's optimizer can load it.

    Its keys are ids, or if ``by_name`` the names in ``model.named_parameters()``.
    """
    groups = optim_groups(model, parameter_groups)
    with torch.no_grad():
        if isinstance(config, LocalOptimStateDictConfig):
            check_form(state_dict, "a local optimizer state dict")
            assert state_dict is not None
            options = _check_local(model, groups, state_dict)
            found = _local_state_to_load(groups, state_dict["state"])
        else:
            source: Source = EveryRank()
            if isinstance(config, FullOptimStateDictConfig) and config.rank0_only:
                source = first = FirstRank(_outermost(model))
                state_dict = first.announce(state_dict)
            check_form(state_dict, "an optimizer state dict to load")
            assert state_dict is not None
            conversion = _Conversion(groups, state_dict["state"], source)
            options = _check(model, groups, state_dict, conversion)
            found = conversion.run()
    order = [param for group in groups for param in group]
    keys: dict[OptimParam, Any] = {param: position for position, param in enumerate(order)}
    if by_name:
        names = {parameter: name for name, parameter in model.named_parameters()}
        keys = {param: names.get(param.parameter, param.path) for param in order}
    loaded: dict[str, Any] = {"state": {keys[p]: found[p] for p in order if p in found}}
    if options is not None:
        loaded["param_groups"] = [
            {**chosen, "params": [keys[param] for param in group]}
            for chosen, group in zip(options, groups, strict=True)
        ]
    converted = (*CONVERTED, LOCAL_SHAPES)
    return {**loaded, **{k: v for k, v in state_dict.items() if k not in converted}}


def check_loadable(
    model: nn.Module, parameter_groups: list[list[nn.Parameter]], state_dict: Mapping[str, Any]
) -> None:
    """Raise what :func:`state_dict_to_load` would raise, without communication."""
    groups = optim_groups(model, parameter_groups)
    check_form(state_dict, "an optimizer state dict to load")
    _check(model, groups, state_dict, _Conversion(groups, state_dict["state"], EveryRank()))


def _outermost(model: nn.Module) -> UnitState:
    for _, state in unit_states(model):
        return state
    raise ValueError(
        f"{type(model).__name__} contains no FullyShardedDataParallel module, so there is no "
        "process group over which the first rank could send the optimizer state"
    )


# -- local state dicts ----------------------------------------------------------------------------


def _check_local(
    model: nn.Module, groups: Groups, state_dict: Mapping[str, Any]
) -> list[dict[str, Any]] | None:
    saved = state_dict.get(LOCAL_SHAPES, {})
    problems = [
        f"size mismatch for {path}: a local state dict can be loaded by the ranks and with the "
        f"wrapping that it was saved with. It was saved for a part of shape {tuple(saved[path])}, "
        f"and this rank's part has shape {shape}"
        for path, shape in local_shapes(groups).items()
        if path in saved and tuple(saved[path]) != shape
    ]
    members = [[OriginalParam((param.path,)) for param in group] for group in groups]
    return _match_groups(model, state_dict, members, problems)


def _local_state_to_load(groups: Groups, saved: SavedState) -> dict[OptimParam, dict[str, Any]]:
    return {
        param: copied(dict(saved[param.path]))
        for group in groups
        for param in group
        if param.path in saved
    }


# -- matching saved parameter groups with the optimizer's -----------------------------------------


def _check(
    model: nn.Module, groups: Groups, state_dict: Mapping[str, Any], conversion: _Conversion
) -> list[dict[str, Any]] | None:
    members = [[o for param in group for o in param.originals] for group in groups]
    return _match_groups(model, state_dict, members, conversion.problems())


def _match_groups(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    members: Sequence[Sequence[OriginalParam]],
    problems: Sequence[str],
) -> list[dict[str, Any]] | None:
    """The saved hyperparameters of each of the optimizer's groups, which has these ``members``.

    None if the state dict has no groups, because the program keeps them elsewhere. Raises
    RuntimeError with the given ``problems`` and all that are found here.
    """
    options: list[dict[str, Any]] | None = None
    errors: list[str] = []
    saved_names = dict.fromkeys(state_dict["state"])
    if "param_groups" in state_dict:
        saved = state_dict["param_groups"]
        saved_names.update((name, None) for group in saved for name in group["params"])
        options = [_options(i, group, saved, errors) for i, group in enumerate(members)]
    known = {name for group in members for original in group for name in original.names}
    unexpected = [str(name) for name in saved_names if name not in known]
    if unexpected:
        errors.append(f"the optimizer has no parameters named {unexpected}")
    errors += problems
    if errors:
        raise RuntimeError(
            f"Error(s) in loading the optimizer state dict for {type(model).__name__}:\n\t"
            + "\n\t".join(errors)
        )
    return options


def _options(
    position: int,
    members: Sequence[OriginalParam],
    saved: Sequence[Mapping[str, Any]],
    errors: list[str],
) -> dict[str, Any]:
    """The hyperparameters of the saved group in which all ``members`` are, whatever its position.

    Members of several saved groups are accepted if these have the same hyperparameters.
    """
    group_of = {name: i for i, group in enumerate(saved) for name in group["params"]}
    homes: dict[int, str] = {}
    for original in members:
        home = original.find(group_of)
        if home is None:
            errors.append(f"{original.name} is in none of the saved parameter groups")
        else:
            homes.setdefault(home, original.name)
    if not members and position < len(saved):
        return hyperparameters(saved[position])
    found = [(name, hyperparameters(saved[home])) for home, name in homes.items()]
    for name, other in found[1:]:
        first, options = found[0]
        if other.keys() != options.keys() or not all(equal(other[k], options[k]) for k in other):
            errors.append(
                f"group {position} of the optimizer has {first} and {name}, which were saved in "
                f"groups with other hyperparameters: {options} and {other}"
            )
    return found[0][1] if found else {}


def equal(one: Any, other: Any) -> bool:
    """True if two entries are the same, with tensors compared bit by bit, on any device."""
    (ones, form), (others, other_form) = tree_flatten(one), tree_flatten(other)
    return form == other_form and all(
        torch.equal(a.cpu(), b.cpu())
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        else bool(a == b)
        for a, b in zip(ones, others, strict=True)
    )


# -- full and sharded state dicts -----------------------------------------------------------------


class _Conversion:
    """One conversion of saved state, by names, to the state of this rank's optimizer."""

    def __init__(self, groups: Groups, saved: SavedState, source: Source) -> None:
        self._groups = groups
        self._saved = saved
        self._source = source
        self._found: dict[OptimParam, dict[str, Any]] = {}
        self._per_element = _per_element_entries(groups, saved)

    def problems(self) -> list[str]:
        """Describe each saved tensor that does not fit the model; without communication."""
        errors: list[str] = []
        for param in in_model_order(self._groups):
            for original in param.originals:
                shape = param.full_shape(original)
                for key, value in self._saved_state(original).items():
                    if not isinstance(value, torch.Tensor):
                        continue
                    if key in self._per_element and tuple(shape_of(value)) != shape:
                        errors.append(
                            f"size mismatch for {key!r} of {original.name}: it has shape "
                            f"{tuple(shape_of(value))}, the parameter in the model {shape}"
                        )
                    elif is_sharded(value):
                        try:
                            check_chunks(param, original, value)
                        except ValueError as error:
                            errors.append(f"cannot load {key!r} of {original.name}: {error}")
        return errors

    def run(self) -> dict[OptimParam, dict[str, Any]]:
        """The state of each parameter for which this rank's optimizer is to have state."""
        for unit, params in by_unit(self._groups).items():
            for handle in unit.unit.handles:
                members = [param for param in params if param.handle is handle]
                self._load_per_element(unit, handle, members)
        for param in in_model_order(self._groups):
            self._load_common(param)
        return {param: state for param, state in self._found.items() if param.is_in_shard}

    def _saved_state(self, original: OriginalParam) -> Mapping[str, Any]:
        return original.find(self._saved) or {}

    def _is_per_element(self, key: str, value: Any) -> bool:
        return key in self._per_element and isinstance(value, torch.Tensor)

    def _load_per_element(
        self, unit: UnitState, handle: FlatParamHandle, members: Sequence[OptimParam]
    ) -> None:
        holders = {o.index: (param, o) for param in members for o in param.originals}
        wanted: dict[str, dict[int, Any]] = {}
        for index, (_, original) in sorted(holders.items()):
            for key, value in self._saved_state(original).items():
                if self._is_per_element(key, value):
                    wanted.setdefault(key, {})[index] = value
        if wanted:
            unit.unit.shards.begin_pass("load optimizer state", unit.unit.name)
        for key in sorted(wanted):
            parts = self._source.parts(unit, handle, wanted[key])
            if not handle.use_orig_params:
                (param,) = members
                self._found.setdefault(param, {})[key] = _flat_state(param, key, parts)
                continue
            for index, part in parts.items():
                param, original = holders[index]
                slot = param.slot(original)
                self._found.setdefault(param, {})[key] = (
                    part if param.is_sharded else part.as_strided(slot.shape, slot.stride)
                )

    def _load_common(self, param: OptimParam) -> None:
        values: dict[str, tuple[str, Any]] = {}
        for original in param.originals:
            for key, value in self._saved_state(original).items():
                if param.handle is not None and self._is_per_element(key, value):
                    continue
                value = self._source.common(param, original, value)
                name, known = values.setdefault(key, (original.name, value))
                if name != original.name and not equal(known, value):
                    raise RuntimeError(
                        f"Saved optimizer state {key!r} is {known} for {name} and {value} for "
                        f"{original.name}, but both are part of the flat parameter {param.path}, "
                        "which has one value. Wrap the model with use_orig_params=True to load "
                        "state that differs between the parameters of a unit"
                    )
        for key, (_, value) in values.items():
            self._found.setdefault(param, {})[key] = copied(value)


def _per_element_entries(groups: Groups, saved: SavedState) -> set[str]:
    """The names of the entries that are per-element: under most parameters, of the same shape.

    An entry of another shape under most parameters is common to all ranks. The few exceptions are
    of the parameter's shape by accident in the second case, and an error in the first.
    """
    votes: Counter[str] = Counter()
    undecided: set[str] = set()
    for param in (param for group in groups for param in group):
        for original in param.originals:
            shape = param.full_shape(original)
            for key, value in (original.find(saved) or {}).items():
                if not isinstance(value, torch.Tensor):
                    continue
                if shape == () or math.prod(shape) == 0:
                    undecided.add(key)
                else:
                    votes[key] += 1 if is_sharded(value) or tuple(value.shape) == shape else -1
    # Per-element state of a parameter without dimensions looks like a step count. If there are no
    # other parameters to decide by, the names of the entries decide.
    named = {key for key in undecided if key not in votes and key not in _NUMBERS}
    return named | {key for key, count in votes.items() if count > 0}


def _flat_state(param: OptimParam, key: str, parts: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """A per-element entry of a flat parameter, from the parts of its original parameters."""
    handle = param.handle
    assert handle is not None
    missing = [o.name for o in param.originals if o.index not in parts]
    if missing:
        warnings.warn(
            f"There is no saved {key!r} of {missing}, which share the flat parameter {param.path} "
            "with parameters that have one: their state is initialised with zeros. With "
            "use_orig_params=True every parameter has its own state",
            UserWarning,
            stacklevel=2,
        )
    first = next(iter(parts.values()))
    shard = torch.zeros(handle.layout.shard_numel, dtype=first.dtype, device=first.device)
    for index, part in parts.items():
        piece = handle.pieces[index]
        if piece.in_shard:
            shard[piece.offset : piece.offset + piece.numel].copy_(part)
    return shard
