"""The public functions for optimizer state: the wrapper's static methods, and templates to load."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ...api import (
    FullOptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    adopt,
)
from ..model.methods import StateDicts
from ..model.sharded_tensors import Rows
from .load import state_dict_to_load
from .params import Groups, OptimParam, OriginalParam, optim_groups, parameter_groups_of
from .save import named_groups, named_state_dict

OptimInput = list[dict[str, Any]] | Iterable[nn.Parameter] | None


class OptimStateDicts:
    """Optimizer state by the parameter names of the unwrapped model.

    All ranks call these methods. ``group`` is accepted and ignored: each unit has its own process
    groups.
    """

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """Return the state of ``optim`` in the state dict type that is set for ``model``.

        Pass ``optim.state_dict()`` as ``optim_state_dict`` if you called it already. Keys are the
        parameters' names in the unwrapped model. All tensors are copies.

        >>> with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        ...     state = FSDP.optim_state_dict(model, optimizer)
        """
        config = StateDicts.get_state_dict_type(model).optim_state_dict_config
        given = optim.state_dict() if optim_state_dict is None else optim_state_dict
        return named_state_dict(model, parameter_groups_of(model, optim), given, config)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> dict[str, Any]:
        """Convert what :meth:`optim_state_dict` returned for ``optim.load_state_dict``.

        The state may have been saved by another number of ranks, with another wrapping or strategy,
        or without sharding. Every rank passes a full state dict, or with ``rank0_only`` the first
        rank alone. With ``load_directly`` it is also loaded into ``optim``. Set
        ``is_named_optimizer`` if the optimizer's keys are the parameters' names in ``model``.
        """
        config = StateDicts.get_state_dict_type(model).optim_state_dict_config
        groups = parameter_groups_of(model, optim)
        found = state_dict_to_load(model, groups, optim_state_dict, config, is_named_optimizer)
        if load_directly:
            optim.load_state_dict(found)
        return found

    # -- older methods, one per state dict type -------------------------------------------------

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: OptimInput = None,
        rank0_only: bool = True,
        group: Any = None,
    ) -> dict[str, Any]:
        """Return the full state of ``optim`` in host memory, on the first rank or on all ranks.

        ``optim_input`` is deprecated and ignored: the optimizer has its parameters.
        """
        _warn_if_given(optim_input)
        config = FullOptimStateDictConfig(rank0_only=rank0_only)
        given = optim.state_dict()
        return named_state_dict(model, parameter_groups_of(model, optim), given, config)

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, group: Any = None
    ) -> dict[str, Any]:
        """Return the state of ``optim`` as sharded tensors."""
        chosen = StateDicts.get_state_dict_type(model).optim_state_dict_config
        if not isinstance(chosen, ShardedOptimStateDictConfig):
            chosen = ShardedOptimStateDictConfig(offload_to_cpu=False)
        given = optim.state_dict()
        return named_state_dict(model, parameter_groups_of(model, optim), given, chosen)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Return this rank's part of a full state dict that every rank has, without communication.

        Without ``optim`` (or ``optim_input``) the optimizer is assumed to hold
        ``model.parameters()``.
        """
        _warn_if_given(optim_input)
        groups = parameter_groups_of(model, optim, optim_input)
        return state_dict_to_load(model, groups, full_optim_state_dict, FullOptimStateDictConfig())

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """Return this rank's part of the first rank's full state dict; others may pass None."""
        _warn_if_given(optim_input)
        groups = parameter_groups_of(model, optim, optim_input)
        config = FullOptimStateDictConfig(rank0_only=True)
        return state_dict_to_load(model, groups, full_optim_state_dict, config)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim: torch.optim.Optimizer,
    ) -> dict[str, Any]:
        """Convert what :meth:`sharded_optim_state_dict` returned for ``optim.load_state_dict``."""
        groups = parameter_groups_of(model, optim)
        config = ShardedOptimStateDictConfig()
        return state_dict_to_load(model, groups, sharded_optim_state_dict, config)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Convert a full state dict from names to ids of an optimizer's parameters, or back.

        ``model`` is the unwrapped model, or one wrapped with ``use_orig_params=True``. Without
        ``optim`` (or ``optim_input``) its optimizer is assumed to hold ``model.parameters()``.

        >>> full = FSDP.full_optim_state_dict(model, optimizer)
        >>> by_id = FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, Net())
        """
        kind = adopt(optim_state_key_type, OptimStateKeyType, "optim_state_key_type")
        _warn_if_given(optim_input)
        groups = parameter_groups_of(model, optim, optim_input)
        return _rekeyed(optim_state_dict, kind, optim_groups(model, groups))


def _warn_if_given(optim_input: OptimInput) -> None:
    if optim_input is not None:
        warnings.warn(
            "The `optim_input` argument is deprecated: the optimizer has its parameters. Pass "
            "`optim` instead",
            FutureWarning,
            stacklevel=3,
        )


# -- keys: names and ids --------------------------------------------------------------------------


def _rekeyed(
    state_dict: Mapping[str, Any], key_type: OptimStateKeyType, groups: Groups
) -> dict[str, Any]:
    """``state_dict`` with names, or with ids in the optimizer, as keys of its parameters."""
    originals = [_only_original(param) for group in groups for param in group]
    if key_type is OptimStateKeyType.PARAM_NAME:
        names = {position: original.name for position, original in enumerate(originals)}
        return _with_keys(state_dict, names, "id")
    ids = {name: i for i, original in enumerate(originals) for name in original.names}
    found = _with_keys(state_dict, ids, "name")
    # Optimizers match saved groups and their parameters with their own by position.
    for group in found["param_groups"]:
        group["params"].sort()
    found["param_groups"].sort(key=lambda group: (group["params"] or [len(ids)])[0])
    return found


def _only_original(param: OptimParam) -> OriginalParam:
    if len(param.originals) > 1:
        raise ValueError(
            f"{param.path} holds {len(param.originals)} parameters ({param.originals[0].name}, …), "
            "which have no ids of their own in the optimizer. Pass the unwrapped model, or one "
            "that was wrapped with use_orig_params=True"
        )
    return param.originals[0]


def _with_keys(
    state_dict: Mapping[str, Any], new_keys: Mapping[Any, Any], kind: str
) -> dict[str, Any]:
    """``state_dict`` with new keys in place of the old ones of this kind; new ones are kept."""
    keys = [*state_dict["state"], *(k for g in state_dict["param_groups"] for k in g["params"])]
    known = {*new_keys, *new_keys.values()}
    unknown = [key for key in dict.fromkeys(keys) if key not in known]
    if unknown:
        raise ValueError(
            f"The optimizer state dict has parameters that the model does not have, by {kind}: "
            f"{unknown[:10]}. The model has {len(new_keys)} parameters"
        )
    return {
        **state_dict,
        "state": {new_keys.get(key, key): value for key, value in state_dict["state"].items()},
        "param_groups": [
            {**group, "params": [new_keys.get(key, key) for key in group["params"]]}
            for group in state_dict["param_groups"]
        ],
    }


# -- templates ------------------------------------------------------------------------------------


def optim_state_template(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    metadata: Any,
    root: tuple[str, ...] = ("optim",),
    config: ShardedOptimStateDictConfig | None = None,
) -> dict[str, Any]:
    """Allocate a sharded optimizer state dict for ``dcp.load``, by a checkpoint's ``metadata``.

    ``torch.distributed.checkpoint`` loads into existing tensors, and an optimizer that was never
    stepped has none. ``root`` is the path of the optimizer's state dict in what ``dcp.save`` was
    given. Entries of parameters that ``optim`` does not have are left out.

    >>> reader = dcp.FileSystemReader(path)
    >>> state = {"optim": optim_state_template(model, optimizer, reader.read_metadata())}
    >>> dcp.load(state, storage_reader=reader)
    >>> loaded = FSDP.optim_state_dict_to_load(model, optimizer, state["optim"])
    >>> optimizer.load_state_dict(loaded)
    """
    config = config or ShardedOptimStateDictConfig()
    groups = optim_groups(model, parameter_groups_of(model, optim))
    holders = {
        name: (param, original)
        for group in groups
        for param in group
        for original in param.originals
        for name in original.names
    }
    state: dict[str, dict[str, Any]] = {}
    for flat_key, path in metadata.planner_data.items():
        if path[: len(root) + 1] != (*root, "state"):
            continue
        name, key = path[len(root) + 1 : len(root) + 3]
        if name in holders:
            described = metadata.state_dict_metadata[flat_key]
            state.setdefault(name, {})[key] = _allocate(*holders[name], described, config)
    names = [[o.name for param in group for o in param.originals] for group in groups]
    return {"state": state, "param_groups": named_groups(optim.param_groups, names)}


def _allocate(
    param: OptimParam, original: OriginalParam, described: Any, config: ShardedOptimStateDictConfig
) -> Any:
    if not hasattr(described, "size"):
        return None  # Not a tensor: dcp.load replaces it by the value.
    dtype, shape = described.properties.dtype, tuple(described.size)
    if param.unit_state is None or shape != param.full_shape(original) or shape == ():
        return torch.zeros(shape, dtype=dtype)
    unit = param.unit_state.unit
    last = Rows.of(shape[0], unit.shards.size - 1, unit.shards.size)
    if last.start == last.end:
        # torch.distributed.checkpoint ignores a ShardedTensor on ranks that have no shard of it,
        # and takes the checkpoint for one of an older format that nests parameter groups.
        config = dataclasses.replace(config, _use_dtensor=True)
    # A view of one element with the full shape: only this rank's chunk of it gets memory.
    full = torch.zeros((), dtype=dtype, device=unit.device).expand(shape)
    distribution = param.distribution(original)
    if distribution is not None:
        full = distribution.part(full)
    return param.unit_state.saved_copy(full, config, distribution)
