"""The state of models to which ``fully_shard`` was applied: DTensors, under the model's own names.

Its form is that of wrapped models' state, so that checkpoints move between the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from ...engine.params.quantized import loading_states
from ...engine.params.row_handle import RowHandle
from ...wrap import is_unit
from ..model.units import units_in
from .packed_values import as_bytes, as_objects


def is_sharded_in_place(model: nn.Module) -> bool:
    """True if ``fully_shard`` was applied to a module of ``model``."""
    return any(isinstance(h, RowHandle) for unit in units_in(model) for h in unit.handles)


def state_of(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """The sharded state of a model and its optimizers."""
    rest(model)
    return {
        "model": as_bytes(model.state_dict()),
        "optimizers": [get_optimizer_state_dict(model, each) for each in optimizers],
    }


def put_back(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    state: Mapping[str, Any],
    states: Sequence[Any],
) -> None:
    """Load a model's and its optimizers' sharded state."""
    rest(model)
    with loading_states(model):
        model.load_state_dict(as_objects(model, state))
    for each, found in zip(optimizers, states, strict=True):
        set_optimizer_state_dict(model, each, found)


def rest(model: Any) -> None:
    """Have sharded parameters in place, where a forward left full ones."""
    for module in filter(is_unit, model.modules()):
        reshard: Any = getattr(module, "reshard", None)
        if reshard is not None:
            reshard()
