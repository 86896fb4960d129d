"""The state of a model and its optimizers in a checkpoint.

Parameters and optimizer state are saved as sharded tensors under the names of the unwrapped model,
so that they can be loaded by another number of ranks, and with another wrapping or strategy.
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
from ...engine.comm import collectives
from ...engine.params.locations import clean_tensor_name
from ...engine.params.quantized import loading_states
from ..model.methods import StateDicts
from ..model.sharded_tensors import empty_like, is_sharded, shape_of
from ..model.units import units_in
from ..optim.load import check_loadable
from ..optim.methods import OptimStateDicts
from ..optim.params import optim_groups, parameter_groups_of
from . import in_place
from .division import divided
from .errors import CheckpointError
from .manifest import Manifest, Table
from .packed_values import as_bytes, as_objects
from .plain import entries
from .storage import empty

#: The number of names that an error lists.
_SHOWN = 8
#: How the names of values end whose shape may change: that of ``get_extra_state``, and the facts of
#: a 4-bit weight, which bitsandbytes writes as text.
_CHANGES_SHAPE = ("_extra_state", "quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")


def optimizers_in(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The given optimizers as a list: none, one or several."""
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
    """Check that all ranks do this next; the order check finds a rank that does not."""
    unit = next(iter(units_in(model)), None)
    if unit is not None:
        for group in _groups_of(unit):
            group.agree(verb, unit.name)


def explaining_failures(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """A context that says which rank is gone when communication about a checkpoint fails."""
    unit = next(iter(units_in(model)), None)
    return collectives.explaining_failures([] if unit is None else _groups_of(unit))


def _groups_of(unit: Any) -> list[Any]:
    return [group for group in (unit.shards, unit.copies) if group is not None]


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """The sharded state of a model and its optimizers, in host memory."""
    if in_place.is_sharded_in_place(model):
        return in_place.state_of(model, optimizers_in(optimizer))
    with _sharded(model):
        return {
            "model": as_bytes(model.state_dict()),
            "optimizers": [
                OptimStateDicts.optim_state_dict(model, each) for each in optimizers_in(optimizer)
            ],
        }


def sharded_state(model: nn.Module) -> dict[str, Any]:
    """The model's own sharded state, for its names, shapes and placements."""
    with _sharded(model):
        return as_bytes(model.state_dict())


def states_for(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    states: Sequence[Mapping[str, Any]],
) -> list[Any] | None:
    """The saved states, one for each optimizer; None if they are those of other parameters.

    As many as were saved get them in order, others by the names of their parameters.
    """
    if len(states) == len(optimizers):
        return list(states)
    in_place.rest(model)
    groups = [optim_groups(model, parameter_groups_of(model, each)) for each in optimizers]
    return divided(
        states,
        [[o for group in found for param in group for o in param.originals] for found in groups],
    )


def check_optimizers(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], states: Sequence[Any]
) -> None:
    """Raise an error if a state does not fit its optimizer; without communication."""
    if in_place.is_sharded_in_place(model):
        return
    for each, found in zip(optimizers, states, strict=True):
        check_loadable(model, parameter_groups_of(model, each), found)


def put_back(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    state: Mapping[str, Any],
    states: Sequence[Any],
) -> None:
    """Load the sharded state of a model and its optimizers, or nothing if one does not fit."""
    if in_place.is_sharded_in_place(model):
        in_place.put_back(model, optimizers, state, states)
        return
    with _sharded(model):
        fitting = [
            OptimStateDicts.optim_state_dict_to_load(model, each, found)
            for each, found in zip(optimizers, states, strict=True)
        ]
        with loading_states(model):
            model.load_state_dict(as_objects(model, state))
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
    """Raise CheckpointError if the checkpoint's names or shapes differ from the model's."""
    saved = entries(manifest.content["model"])
    problems = []
    if missing := [name for name in own if name not in saved]:
        problems.append(f"it has no {_some(missing)}")
    if unexpected := [name for name in saved if name not in own]:
        problems.append(f"the model has no {_some(unexpected)}")
    shapes, others = [], []
    for name, value in own.items():
        if name not in saved or name.endswith(_CHANGES_SHAPE) or not _is_tensor(value):
            continue
        table = _table(saved[name], manifest)
        if table is None:
            others.append(name)
        elif table.shape != tuple(shape_of(value)):
            own_shape = tuple(shape_of(value))
            shapes.append(f"{name} ({table.shape} in the checkpoint, {own_shape} in the model)")
    if shapes:
        problems.append(f"shapes differ: {_some(shapes)}")
    if others:
        problems.append(f"these are not tensors in the checkpoint: {_some(others)}")
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
    """Empty tensors to load a checkpoint's tensors into, by their names in the checkpoint.

    Optimizer state of a parameter's shape is sharded like the parameter. Every rank reads all
    other tensors in full.
    """

    def __init__(self, own: Mapping[str, Any], manifest: Manifest, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._tables = manifest.tensors
        self.tensors: dict[str, Any] = {}
        self._patterns: dict[str, Any] = {}
        for name, reference in entries(manifest.content["model"]).items():
            if isinstance(reference, dict) and "$tensor" in reference:
                self._patterns[reference["$tensor"]] = own[name]
        # Names of optimizer state do not have the prefixes that torch.compile adds to the model's.
        cleaned = {clean_tensor_name(name): value for name, value in own.items()}
        for optimizer in manifest.content["optimizers"]:
            for parameter, state in entries(optimizer["state"]).items():
                pattern = cleaned.get(parameter)
                for reference in state.values() if isinstance(state, dict) else ():
                    if isinstance(reference, dict) and "$tensor" in reference:
                        self._patterns[reference["$tensor"]] = pattern

    def tensor(self, name: str) -> Any:
        """The tensor into which the checkpoint's tensor ``name`` is loaded."""
        if name not in self.tensors:
            table, pattern = self._tables[name], self._patterns.get(name)
            if pattern is not None and tuple(shape_of(pattern)) == table.shape:
                self.tensors[name] = empty_like(pattern, table.dtype)
            else:
                self.tensors[name] = empty(self._checkpoint, name, table)
        return self.tensors[name]
