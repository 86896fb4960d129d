"""From a module to a unit: checks, deferred initialisation, moving, broadcasting, flattening."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from .api import CPUOffload, ShardingStrategy
from .engine.comm.collectives import group_for
from .engine.comm.process_groups import ProcessGroups
from .engine.init.build import broadcast_states, build_unit, compute_device, managed_parameters
from .engine.init.optimizer_warnings import watch_optimizers
from .engine.init.validation import (
    check_modules,
    check_no_optimizers_in_backward,
    check_parameters,
    warn_of_container,
)
from .engine.params.tensor_parallel import localize
from .engine.runtime.policy import UnitOptions
from .engine.runtime.unit import Unit
from .state.model.deferred_init import check_initializable, forget, holds_meta, materialize
from .wrap import check_flat_unit_is_uniform, is_unit

Order = dict[nn.Module, tuple[str, ...]]


class Material(NamedTuple):
    """What a unit is made of: a module, those of its submodules that are the unit's own, and the
    parameters in them that are not the unit's."""

    module: nn.Module
    modules: list[nn.Module]
    ignored: Collection[nn.Parameter]
    nested: Sequence[Unit]


class Initial(NamedTuple):
    """Where parameters get their memory and their values from."""

    device_id: int | str | torch.device | None
    param_init_fn: Callable[[nn.Module], None] | None
    sync_module_states: bool


def construct_unit(
    material: Material,
    groups: ProcessGroups,
    options: UnitOptions,
    cpu_offload: CPUOffload,
    initial: Initial,
) -> tuple[Unit, Order]:
    """Flatten and shard a module's parameters; also returns the order in which they were."""
    module, modules, ignored, nested = material
    check_modules(module, modules)
    warn_of_container(module)
    parameters = managed_parameters(module, ignored, is_unit)
    check_parameters(module, parameters)
    if not options.use_orig_params:
        check_no_optimizers_in_backward(module, parameters)
        check_flat_unit_is_uniform(module, parameters)
    offload, device_id = cpu_offload.offload_params, initial.device_id
    device = compute_device(parameters, device_id, offload, groups.shards.rank())
    if not parameters and device_id is None:
        device = next((unit.device for unit in nested if unit.handles), device)
    deferred = [p for p in parameters if p.is_meta]
    managed = set(parameters)
    if deferred or any(holds_meta(m, managed) for m in modules):
        check_initializable(module, modules, managed, initial.param_init_fn)
        materialize(module, modules, managed, device, initial.param_init_fn)
        parameters = managed_parameters(module, ignored, is_unit)
    parameters, distributions = localize(module, parameters, groups)
    if device_id is not None:
        _move_parameters(parameters, device)
    if device_id is not None or offload:
        _move_buffers(modules, device)
    if initial.sync_module_states:
        buffers = [b for m in modules for b in m._buffers.values() if b is not None]
        for group in filter(None, (groups.shards, groups.copies)):
            broadcast_states(parameters, buffers, group_for(group), type(module).__name__)
    order = {m: tuple(m._parameters) for m in modules}
    unit = build_unit(module, parameters, distributions, groups, device, cpu_offload, options)
    if not options.use_orig_params:
        forget(deferred)
    watch_optimizers(unit)
    return unit, order


def strategy_for(strategy: ShardingStrategy, groups: ProcessGroups) -> ShardingStrategy:
    """``strategy``, or ``NO_SHARD``, with a warning, where there is nobody to share with."""
    alone = groups.shards.size() == 1 and (groups.copies is None or groups.copies.size() == 1)
    if not alone or strategy is ShardingStrategy.NO_SHARD:
        return strategy
    warnings.warn(
        f"FSDP is switching to use `NO_SHARD` instead of {strategy} since the world size is 1.",
        UserWarning,
        stacklevel=3,
    )
    return ShardingStrategy.NO_SHARD


def _move_parameters(parameters: Iterable[nn.Parameter], device: torch.device) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.data = parameter.data.to(device)


def _move_buffers(modules: Iterable[nn.Module], device: torch.device) -> None:
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
