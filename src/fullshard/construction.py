"""Makes a unit of a module: checks, deferred initialisation, moving, broadcasting, flattening."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from .api import CPUOffload
from .engine.comm.collectives import group_for
from .engine.comm.process_groups import ProcessGroups
from .engine.init.build import (
    ParameterOrder,
    broadcast_states,
    buffers_of,
    build_unit,
    compute_device,
    managed_parameters,
    mark_managed,
    parameter_order,
)
from .engine.init.packing import PLAIN, pack, packings_of, tensors_beside
from .engine.init.validation import check_unit
from .engine.params.handle import REQUIRES_GRAD
from .engine.params.packed import Packing
from .engine.params.tensor_parallel import Distribution, localize
from .engine.runtime.policy import UnitOptions
from .engine.runtime.unit import Unit
from .state.model.deferred_init import check_initializable, forget, materialize
from .wrap import check_flat_unit_is_uniform

_IS_META = operator.attrgetter("is_meta")


class Material(NamedTuple):
    """The modules and parameters that a unit is made from.

    ``own`` are the submodules outside nested units; ``modules`` are those of them that are not
    ignored. ``ignored`` parameters do not belong to the unit. ``left`` are parameters in nested
    units that these left to this unit, or to one around it.
    """

    module: nn.Module
    own: list[nn.Module]
    modules: list[nn.Module]
    ignored: Collection[nn.Parameter]
    left: Collection[nn.Parameter]
    nested: Sequence[Unit]


class Initial(NamedTuple):
    """The options that decide where parameters get their memory and initial values."""

    device_id: int | str | torch.device | None
    param_init_fn: Callable[[nn.Module], None] | None
    sync_module_states: bool


def construct_unit(
    material: Material,
    groups: ProcessGroups,
    options: UnitOptions,
    cpu_offload: CPUOffload,
    initial: Initial,
) -> tuple[Unit, ParameterOrder]:
    """Flatten and shard a module's parameters in place; also returns the order they were in."""
    module, own, modules, ignored, left, nested = material
    parameters = managed_parameters(module, own, ignored, left)
    check_unit(module, modules, parameters, options.use_orig_params)
    if not options.use_orig_params and len(set(map(REQUIRES_GRAD, parameters))) > 1:
        check_flat_unit_is_uniform(module, parameters)
    if not PLAIN.issuperset(map(type, parameters)):
        packings_of(module, parameters, options.use_orig_params)
    offload, device_id = cpu_offload.offload_params, initial.device_id
    device = compute_device(parameters, device_id, offload, groups.shards.rank())
    if not parameters and device_id is None:
        device = next((unit.device for unit in nested if unit.handles), device)
    deferred: list[nn.Parameter] = []
    if True in map(_IS_META, (*parameters, *buffers_of(modules))):
        deferred = [p for p in parameters if p.is_meta]
        managed = set(parameters)
        check_initializable(module, modules, managed, initial.param_init_fn)
        materialize(module, modules, managed, device, initial.param_init_fn)
        parameters = managed_parameters(module, own, ignored, left)
    distributions: Mapping[nn.Parameter, Distribution] = {}
    packings: Mapping[nn.Parameter, Packing] = {}
    if not PLAIN.issuperset(map(type, parameters)):
        parameters, distributions = localize(module, parameters, groups)
        parameters, packings = pack(module, parameters, options.mixed_precision.param_dtype)
    if device_id is not None:
        _move_parameters(parameters, device)
        for parameter, packing in packings.items():
            packing.move(parameter, device)
    if device_id is not None or offload:
        _move_buffers(modules, device)
    if initial.sync_module_states:
        for group in filter(None, (groups.shards, groups.copies)):
            buffers = buffers_of(modules)
            if packings:
                buffers += tensors_beside(packings)
            broadcast_states(parameters, buffers, group_for(group, device), type(module).__name__)
    order = parameter_order(modules)
    mark_managed(modules)
    unit = build_unit(
        module, parameters, distributions, packings, groups, device, cpu_offload, options
    )
    if deferred and not options.use_orig_params:
        forget(deferred)
    return unit, order


def _move_parameters(parameters: Iterable[nn.Parameter], device: torch.device) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.data = parameter.data.to(device)


def _move_buffers(modules: Iterable[nn.Module], device: torch.device) -> None:
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
