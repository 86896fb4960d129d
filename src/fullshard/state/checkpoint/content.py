"""What of a model and its optimizers a checkpoint holds, and how it is put back.

Parameters and optimizer state are sharded tensors under the names of the unwrapped model, so that
another number of ranks, another wrapping or another strategy finds its own parts in them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...api import (
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from ...engine.params.locations import clean_tensor_name
from ...wrap import is_unit
from ..model.methods import StateDicts
from ..model.sharded_tensors import empty_like, is_sharded, shape_of
from ..optim.load import check_loadable
from ..optim.methods import OptimStateDicts
from ..optim.params import parameter_groups_of
from .errors import CheckpointError
from .manifest import Manifest, Table
from .plain import entries
from .storage import empty

#: How many names an error lists.
_SHOWN = 8
#: What ``nn.Module`` calls the value of ``get_extra_state``, whose shape may change.
_EXTRA_STATE = "_extra_state"


def optimizers_in(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The optimizers given: none, one or several."""
    if optimizer is None:
        return []
    found = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    for each in found:
        if not isinstance(each, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer expects a torch optimizer or a sequence of them, but got "
                f"{each!r} of type {type(each).__name__}"
            )
    return found


def agree_to(verb: str, model: nn.Module) -> None:
    """Return when all ranks are known to do this next; one that is not is found as in a step."""
    wrapper: Any = next(filter(is_unit, model.modules()), None)
    if wrapper is not None:
        unit = wrapper._unit
        for group in filter(None, (unit.shards, unit.copies)):
            group.agree(verb, unit.name)


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """The sharded state of a model and its optimizers, in the host's memory."""
    with _sharded(model):
        return {
            "model": dict(model.state_dict()),
            "optimizers": [
                OptimStateDicts.optim_state_dict(model, each) for each in optimizers_in(optimizer)
            ],
        }


def sharded_state(model: nn.Module) -> dict[str, Any]:
    """The model's own state, for its names, shapes and cuts."""
    with _sharded(model):
        return dict(model.state_dict())


def check_optimizers(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], states: Sequence[Any]
) -> None:
    """Raise if an optimizer of this rank is another's; without communication."""
    for each, found in zip(optimizers, states, strict=True):
        check_loadable(model, parameter_groups_of(model, each), found)


def put_back(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    state: Mapping[str, Any],
    states: Sequence[Any],
) -> None:
    """Load a model's and its optimizers' sharded state; nothing, if an optimizer is another's."""
    with _sharded(model):
        fitting = [
            OptimStateDicts.optim_state_dict_to_load(model, each, found)
            for each, found in zip(optimizers, states, strict=True)
        ]
        model.load_state_dict(state)
        for each, found in zip(optimizers, fitting, strict=True):
            each.load_state_dict(found)


def _sharded(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    return StateDicts.state_dict_type(
        model,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=True, _use_dtensor=True),
        ShardedOptimStateDictConfig(offload_to_cpu=True, _use_dtensor=True),
    )


def check_same_model(own: Mapping[str, Any], manifest: Manifest, where: str) -> None:
    """Raise CheckpointError, with the names that differ, if the checkpoint is another model's."""
    saved = entries(manifest.content["model"])
    problems = []
    if missing := [name for name in own if name not in saved]:
        problems.append(f"it has no {_some(missing)}")
    if unexpected := [name for name in saved if name not in own]:
        problems.append(f"the model has no {_some(unexpected)}")
    shapes, others = [], []
    for name, value in own.items():
        if name not in saved or name.endswith(_EXTRA_STATE) or not _is_tensor(value):
            continue
        table = _table(saved[name], manifest)
        if table is None:
            others.append(name)
        elif table.shape != tuple(shape_of(value)):
            shapes.append(f"{name} ({table.shape} there, {tuple(shape_of(value))} here)")
    if shapes:
        problems.append(f"shapes differ: {_some(shapes)}")
    if others:
        problems.append(f"these are no tensors there: {_some(others)}")
    if problems:
        raise CheckpointError(f"{where} is a checkpoint of another model: {'; '.join(problems)}")


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or is_sharded(value)


def _table(reference: Any, manifest: Manifest) -> Table | None:
    name = reference.get("$tensor") if isinstance(reference, dict) else None
    return None if name is None else manifest.tensors[name]


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


class Targets:
    """Empty tensors to load a checkpoint's into, by the names that they have in it.

    State of an optimizer that has a parameter's shape is cut as the parameter is; all other
    tensors are read whole by every rank.
    """

    def __init__(self, own: Mapping[str, Any], manifest: Manifest, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._tables = manifest.tensors
        self.tensors: dict[str, Any] = {}
        self._patterns: dict[str, Any] = {}
        for name, reference in entries(manifest.content["model"]).items():
            if isinstance(reference, dict) and "$tensor" in reference:
                self._patterns[reference["$tensor"]] = own[name]
        # What torch.compile adds to names in the model is not in those of optimizer state.
        cleaned = {clean_tensor_name(name): value for name, value in own.items()}
        for optimizer in manifest.content["optimizers"]:
            for parameter, state in entries(optimizer["state"]).items():
                pattern = cleaned.get(parameter)
                for reference in state.values() if isinstance(state, dict) else ():
                    if isinstance(reference, dict) and "$tensor" in reference:
                        self._patterns[reference["$tensor"]] = pattern

    def tensor(self, name: str) -> Any:
        """The tensor that will hold what the checkpoint calls ``name``."""
        if name not in self.tensors:
            table, pattern = self._tables[name], self._patterns.get(name)
            if pattern is not None and tuple(shape_of(pattern)) == table.shape:
                self.tensors[name] = empty_like(pattern, table.dtype)
            else:
                self.tensors[name] = empty(self._checkpoint, name, table)
        return self.tensors[name]
