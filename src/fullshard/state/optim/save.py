"""An optimizer's own state dict as that of the unwrapped model's optimizer: full, sharded or local.

Note: communication
    Ranks first agree on the entries of all parameters (see ``consensus.py``), once per process
    group. Then they all-gather, for each unit and each per-element entry, what all parameters of
    the unit have under it. The gathered buffer is freed before the next all-gather, so the device
    holds one of them at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...api import FullOptimStateDictConfig, LocalOptimStateDictConfig, OptimStateDictConfig
from ...engine.comm.collectives import Group
from ...engine.params.handle import FlatParamHandle
from ...engine.params.locations import clean_tensor_name
from ..model import gathering
from ..model.unit_state import UnitState
from .consensus import ALL_UNITS, Entry, States, agree_on_entries, copied
from .params import Groups, OptimParam, by_unit, in_model_order, optim_groups, unit_states

#: The state of each parameter, by name.
NamedState = dict[str, dict[str, Any]]

#: The parts of an optimizer's state dict that are converted; everything else is passed on.
CONVERTED = ("state", "param_groups")
#: The key under which a local state dict has the shapes of the parts that it was saved from.
LOCAL_SHAPES = "local_shapes"
#: The entries of a parameter group that list its parameters; all others are hyperparameters.
_MEMBERS = ("params", "param_names")


def named_state_dict(
    model: nn.Module,
    parameter_groups: list[list[nn.Parameter]],
    state_dict: Mapping[str, Any],
    config: OptimStateDictConfig,
) -> dict[str, Any]:
    """An optimizer's own ``state_dict`` by parameter names, in the type that ``config`` is for.

    With ``rank0_only`` it is empty on all ranks but the first.
    """
    check_form(state_dict, "the optimizer's own state dict")
    groups = optim_groups(model, parameter_groups)
    states = _states(groups, state_dict)
    rest = {key: value for key, value in state_dict.items() if key not in CONVERTED}
    with torch.no_grad():
        if isinstance(config, LocalOptimStateDictConfig):
            device = torch.device("cpu") if config.offload_to_cpu else None
            state = _local_state(groups, states, device)
            names = [[param.path for param in group] for group in groups]
            rest = {LOCAL_SHAPES: local_shapes(groups), **rest}
        else:
            only_first = isinstance(config, FullOptimStateDictConfig) and config.rank0_only
            is_visible = not only_first or _is_first_rank(model, groups)
            state = _Conversion(groups, states, config).run()
            names = [[o.name for param in group for o in param.originals] for group in groups]
            if not is_visible:
                return {}
    found: dict[str, Any] = {"state": state}
    # Programs that keep the parameter groups elsewhere pass state without them.
    if "param_groups" in state_dict:
        found["param_groups"] = named_groups(state_dict["param_groups"], names)
    return {**found, **rest}


def named_groups(
    groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]
) -> list[dict[str, Any]]:
    """A copy of parameter groups that lists their parameters by these names."""
    return [
        {**hyperparameters(group), "params": list(members)}
        for group, members in zip(groups, names, strict=True)
    ]


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a parameter group's hyperparameters."""
    return {key: copy.deepcopy(value) for key, value in group.items() if key not in _MEMBERS}


def check_form(state_dict: Any, what: str) -> None:
    """Raise ValueError unless ``state_dict`` is a dict with optimizer state in it."""
    if isinstance(state_dict, Mapping) and isinstance(state_dict.get("state"), Mapping):
        return
    found = list(state_dict)[:5] if isinstance(state_dict, Mapping) else type(state_dict).__name__
    raise ValueError(
        f"Expected {what}, a dict with 'state' and 'param_groups', but got {found}. If only the "
        "first rank has the state dict, use FullOptimStateDictConfig(rank0_only=True)"
    )


# -- the optimizer's state by parameter -----------------------------------------------------------


def _states(groups: Groups, state_dict: Mapping[str, Any]) -> States:
    """The state of each parameter in an optimizer's own state dict, which may use ids or names."""
    order = [param for group in groups for param in group]
    keys = _keys(groups, state_dict)
    params = _params_by_name(keys, order) or order
    state = state_dict["state"]
    return {param: state[key] for key, param in zip(keys, params, strict=True) if key in state}


def _keys(groups: Groups, state_dict: Mapping[str, Any]) -> list[Any]:
    """The optimizer's keys for its parameters: those in its groups, or ids without groups."""
    if "param_groups" not in state_dict:
        ids = list(range(sum(map(len, groups))))
        unknown = [key for key in state_dict["state"] if key not in ids]
        if unknown:
            raise ValueError(
                "The keys of a state dict without 'param_groups' must be the ids of the "
                f"optimizer's parameters, 0 to {len(ids) - 1}, but got {unknown[:10]}"
            )
        return ids
    saved = state_dict["param_groups"]
    if [len(g["params"]) for g in saved] != [len(group) for group in groups]:
        raise ValueError(
            f"The state dict has parameter groups of {[len(g['params']) for g in saved]} "
            f"parameters, the optimizer of {[len(group) for group in groups]}. Pass what "
            "optim.state_dict() returns on this rank"
        )
    return [key for group in saved for key in group["params"]]


def _params_by_name(keys: Sequence[Any], order: Sequence[OptimParam]) -> list[OptimParam] | None:
    """The parameters that the keys name, in any order; None if the keys are not names."""
    named = {name: param for param in order for name in (param.path, *param.names)}
    found = [named.get(clean_tensor_name(key)) if isinstance(key, str) else None for key in keys]
    known = [param for param in found if param is not None]
    return known if len(set(known)) == len(order) else None


def _is_first_rank(model: nn.Module, groups: Groups) -> bool:
    """True on the rank that gets a state dict with ``rank0_only``."""
    outermost = next((state for _, state in unit_states(model)), None)
    if outermost is None:
        return not dist.is_initialized() or dist.get_rank() == 0
    if not outermost.is_first:
        return False
    for state in by_unit(groups):
        if not state.is_first:
            raise RuntimeError(
                f"The first rank of unit {state.unit.name!r} is not the first rank of the "
                "outermost unit, so no rank can get the whole optimizer state. Use "
                "rank0_only=False or a sharded state dict"
            )
    return True


# -- local state dicts ----------------------------------------------------------------------------


def _local_state(groups: Groups, states: States, device: torch.device | None) -> NamedState:
    """This rank's own state, by the names of the optimizer's parameters in the wrapped model."""
    return {
        param.path: copied(dict(states[param]), device)
        for group in groups
        for param in group
        if param in states
    }


def local_shapes(groups: Groups) -> dict[str, tuple[int, ...]]:
    """The shape of this rank's part of each parameter."""
    return {param.path: param.local_shape for group in groups for param in group}


# -- full and sharded state dicts -----------------------------------------------------------------


class _Conversion:
    """One conversion of the optimizer's state to that of the unwrapped model."""

    def __init__(self, groups: Groups, states: States, config: OptimStateDictConfig) -> None:
        self._groups = groups
        self._states = states
        self._config = config
        self._to_first = isinstance(config, FullOptimStateDictConfig) and config.rank0_only
        self._found: NamedState = {}

    def run(self) -> NamedState:
        """The state of each parameter by its name, in the order of the optimizer's parameters.

        With ``rank0_only`` the state of sharded parameters is missing on other ranks.
        """
        units = by_unit(self._groups)
        if self._to_first:
            units = {unit: params for unit, params in units.items() if unit.is_first_copy}
        entries = self._agree(p for params in units.values() for p in params if p.is_sharded)
        for unit, params in units.items():
            self._save_per_element(unit, params, entries)
        for param in in_model_order(self._groups):
            if param in entries:
                self._save_common(param, entries[param])
            elif param.unit_state is None or param.unit_state in units:
                self._save_unsharded(param)
        originals = (o for group in self._groups for param in group for o in param.originals)
        return {o.name: self._found[o.name] for o in originals if o.name in self._found}

    def _agree(self, params: Iterable[OptimParam]) -> dict[OptimParam, dict[str, Entry]]:
        sharing: dict[Group, list[OptimParam]] = {}
        for param in params:
            assert param.unit_state is not None
            sharing.setdefault(param.unit_state.unit.shards, []).append(param)
        entries: dict[OptimParam, dict[str, Entry]] = {}
        for group, members in sharing.items():
            entries.update(agree_on_entries(group, members, self._states))
        self._agree_between_parts(entries)
        return entries

    def _agree_between_parts(self, entries: dict[OptimParam, dict[str, Entry]]) -> None:
        """Tell ranks whose part of a tensor-parallel parameter is empty about the entries.

        They have no state for the parameter, but all ranks of its mesh take part in combining it.
        """
        sharing: dict[Group, list[OptimParam]] = {}
        for param in entries:
            parts = (d.parts for o in param.originals if (d := param.distribution(o)) is not None)
            for group in dict.fromkeys(group for groups in parts for group in groups):
                sharing.setdefault(group, []).append(param)
        for group, members in sharing.items():
            group.begin_pass("optimizer state of parts", ALL_UNITS)
            reports = group.gather_objects([entries[param] for param in members], ALL_UNITS)
            for param, *found in zip(members, *reports, strict=True):
                entries[param] = next(filter(None, found), {})

    def _save_per_element(
        self,
        unit: UnitState,
        params: Sequence[OptimParam],
        entries: Mapping[OptimParam, Mapping[str, Entry]],
    ) -> None:
        """All-gather the per-element entries of a unit's parameters."""
        wanted: dict[tuple[FlatParamHandle, str, torch.dtype], list[OptimParam]] = {}
        for param in params:
            assert param.handle is not None
            for key, entry in entries.get(param, {}).items():
                if entry.is_per_element:
                    assert entry.dtype is not None
                    wanted.setdefault((param.handle, key, entry.dtype), []).append(param)
        # In an order that is the same on all ranks, whatever the order of the optimizers' entries.
        order = {handle: position for position, handle in enumerate(unit.unit.handles)}
        for handle, key, dtype in sorted(wanted, key=lambda w: (order[w[0]], w[1], str(w[2]))):
            self._save_entry(unit, handle, key, dtype, wanted[handle, key, dtype])

    def _save_entry(
        self,
        unit: UnitState,
        handle: FlatParamHandle,
        key: str,
        dtype: torch.dtype,
        members: Sequence[OptimParam],
    ) -> None:
        """All-gather one entry of a group's parameters; returning frees the gathered buffer."""
        full = self._gather(unit, handle, self._shard(handle, key, dtype, members))
        if full is not None:
            views = dict(enumerate(gathering.full_views(handle, full)))
            for param in members:
                self._save_views(param, key, views)

    def _shard(
        self, handle: FlatParamHandle, key: str, dtype: torch.dtype, members: Sequence[OptimParam]
    ) -> torch.Tensor:
        """One entry of all ``members``, laid out like this rank's shard."""
        if not handle.use_orig_params:
            flat: torch.Tensor = self._states[members[0]][key]
            return flat.detach().contiguous()
        shard = torch.zeros(handle.layout.shard_numel, dtype=dtype, device=handle.device)
        for param in members:
            piece = param.piece(param.originals[0])
            if piece.numel:
                shard[piece.offset : piece.offset + piece.numel].copy_(self._states[param][key])
        return shard

    def _gather(
        self, unit: UnitState, handle: FlatParamHandle, shard: torch.Tensor
    ) -> torch.Tensor | None:
        # Backends support few one-byte dtypes.
        sent = shard.view(torch.uint8) if shard.dtype.itemsize == 1 else shard
        gather = gathering.gather_shards_to_first if self._to_first else gathering.gather_shards
        full = gather(unit.unit, [handle], [sent])
        return full[0].view(shard.dtype) if full else None

    def _save_views(self, param: OptimParam, key: str, views: Mapping[int, torch.Tensor]) -> None:
        """Save a per-element entry of each original parameter; ``views`` are by their indices."""
        assert param.unit_state is not None
        for original in param.originals:
            view, distribution = views[original.index], param.distribution(original)
            value = param.unit_state.saved_copy(view, self._config, distribution)
            self._found.setdefault(original.name, {})[key] = value

    def _save_common(self, param: OptimParam, entries: Mapping[str, Entry]) -> None:
        """Save the entries that are the same on all ranks."""
        assert param.unit_state is not None
        for key, entry in entries.items():
            if not entry.is_per_element:
                device = torch.device("cpu") if entry.on_host else param.unit_state.unit.device
                self._save_copies(param, key, entry.value, device)

    def _save_unsharded(self, param: OptimParam) -> None:
        """Save the state of a parameter that every rank has all of."""
        for key, value in self._states.get(param, {}).items():
            matches = isinstance(value, torch.Tensor) and tuple(value.shape) == param.local_shape
            if not matches or param.handle is None:
                self._save_copies(param, key, value, None)
            elif param.is_flat:
                views = gathering.full_views(param.handle, value.detach().contiguous())
                self._save_views(param, key, dict(enumerate(views)))
            else:
                self._save_views(param, key, {param.originals[0].index: value})

    def _save_copies(
        self, param: OptimParam, key: str, value: Any, device: torch.device | None
    ) -> None:
        device = torch.device("cpu") if self._config.offload_to_cpu else device
        for original in param.originals:
            self._found.setdefault(original.name, {})[key] = copied(value, device)
