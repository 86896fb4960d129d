"""The optimizer-state methods of a wrapper: thin, static, and named as programs know them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
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
from .conversion import named_state_dict, state_dict_to_load
from .groups import rekeyed
from .params import parameter_groups_of

OptimInput = list[dict[str, Any]] | Iterable[nn.Parameter] | None


class OptimStateDicts:
    """Optimizer state under the names of the unwrapped model.

    Everything here is called by all ranks. ``group`` is accepted where programs pass it; which
    ranks share what is known from the units.
    """

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """The state of ``optim``, in the type that was chosen for ``model``'s state dicts.

        ``optim_state_dict`` is what ``optim.state_dict()`` returned, if it was called already.
        Keys are the parameters' names in the unwrapped model. Everything is a copy.

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
        """What ``optim.load_state_dict`` takes, made of what :meth:`optim_state_dict` returned.

        It may have been made by other ranks, with another wrapping, another strategy or without
        any. A full state dict is expected on every rank, or on the first alone if ``rank0_only``
        is chosen; ``load_directly`` loads it as well. ``is_named_optimizer`` tells that the
        optimizer calls parameters by their names in ``model``.
        """
        config = StateDicts.get_state_dict_type(model).optim_state_dict_config
        groups = parameter_groups_of(model, optim)
        found = state_dict_to_load(model, groups, optim_state_dict, config, is_named_optimizer)
        if load_directly:
            optim.load_state_dict(found)
        return found

    # -- the older family: the type is in the name ----------------------------------------------

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: OptimInput = None,
        rank0_only: bool = True,
        group: Any = None,
    ) -> dict[str, Any]:
        """The full state of ``optim`` in host memory, on the first rank or on all.

        ``optim_input`` is not needed: the optimizer knows what it was made of.
        """
        _discourage(optim_input)
        config = FullOptimStateDictConfig(rank0_only=rank0_only)
        given = optim.state_dict()
        return named_state_dict(model, parameter_groups_of(model, optim), given, config)

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, group: Any = None
    ) -> dict[str, Any]:
        """The state of ``optim`` in sharded tensors."""
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
        """This rank's part of a full state dict that every rank has; nothing is sent.

        Without ``optim`` (or ``optim_input``) the optimizer is taken to be over
        ``model.parameters()``.
        """
        _discourage(optim_input)
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
        """This rank's part of a full state dict that the first rank has; others may pass None."""
        _discourage(optim_input)
        groups = parameter_groups_of(model, optim, optim_input)
        config = FullOptimStateDictConfig(rank0_only=True)
        return state_dict_to_load(model, groups, full_optim_state_dict, config)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim: torch.optim.Optimizer,
    ) -> dict[str, Any]:
        """What ``optim`` can load of what :meth:`sharded_optim_state_dict` returned."""
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
        """A full state dict by names as one by ids, for an optimizer over ``model``, or back.

        ``model`` is the unwrapped one, or any whose optimizer has every parameter on its own.
        Without ``optim`` (or ``optim_input``) that optimizer is taken to be over
        ``model.parameters()``.

        >>> full = FSDP.full_optim_state_dict(model, optimizer)
        >>> by_id = FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, Net())
        """
        kind = adopt(optim_state_key_type, OptimStateKeyType, "optim_state_key_type")
        _discourage(optim_input)
        groups = parameter_groups_of(model, optim, optim_input)
        return rekeyed(optim_state_dict, kind, model, groups)


def _discourage(optim_input: OptimInput) -> None:
    if optim_input is not None:
        warnings.warn(
            "The `optim_input` argument is deprecated: the optimizer knows its parameters",
            FutureWarning,
            stacklevel=3,
        )
