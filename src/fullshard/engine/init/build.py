"""Builds a unit: finds the parameters that it manages, their device, and their groups."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...api import Communication, CPUOffload
from ..comm.collectives import Group, group_for
from ..comm.process_groups import ProcessGroups
from ..encoding.encodings import Encodings
from ..params.handle import FlatParamHandle
from ..params.locations import (
    clean_tensor_name,
    find_locations,
)
from ..params.packed import Packing
from ..params.packed_handle import PackedFlatHandle
from ..params.tensor_parallel import Distribution
from ..runtime.policy import UnitOptions
from ..runtime.unit import Unit
from .communication import share_secondary_shards

ParameterOrder = dict[nn.Module, tuple[str, ...]]

_DEVICE = operator.attrgetter("device")
_HAS_MEMORY = functools.partial(operator.ne, torch.device("meta"))


def managed_parameters(
    module: nn.Module,
    own: Iterable[nn.Module],
    ignored: Collection[nn.Parameter],
    left: Collection[nn.Parameter],
) -> list[nn.Parameter]:
    """The parameters a unit around ``module`` manages: not ignored, not in a nested unit.

    ``own`` are the modules outside of nested units; ``left`` are parameters that nested units
    reached but left to their ancestor, and that nobody may have taken yet.
    """
    left = [p for p in left if not hasattr(p, "_fullshard_unit")] if left else left
    found: dict[nn.Parameter, None] = {}
    for submodule in module.modules() if left else own:
        for parameter in submodule._parameters.values():
            if parameter is not None and parameter not in ignored:
                found[parameter] = None
    if left:
        wanted = {*left, *(p for m in own for p in m._parameters.values())}
        found = {p: None for p in found if p in wanted}
    for parameter in found:
        owner = getattr(parameter, "_fullshard_unit", None)
        if owner is not None:
            name = clean_tensor_name(find_locations(module, [parameter])[parameter][0].path)
            raise ValueError(
                f"Parameter {name!r} of {type(module).__name__} is shared with the unit around "
                f"{owner}, which manages it already. Wrap the modules that share it in one unit, "
                "or let auto_wrap_policy do the wrapping: it gives shared parameters to the unit "
                "around all of their uses"
            )
    return list(found)


def mark_managed(modules: Iterable[nn.Module]) -> None:
    """Mark modules whose parameters a unit shards, as torch's FSDP does, for others to see.

    Transformers asks for the mark before a rank skips a layer, or stops to generate: the other
    ranks would wait for it in an all-gather. Dynamo asks for both.
    """
    for module in modules:
        vars(module).update(_is_fsdp_managed_module=True, _fsdp_use_orig_params=True)


def group_parameters(
    parameters: Iterable[nn.Parameter],
    use_orig_params: bool,
    packed: Collection[nn.Parameter] = (),
    communication: Communication | None = None,
) -> list[list[nn.Parameter]]:
    """Parameters that can share a flat buffer, together, in order of first appearance.

    With ``communication``, those that are sent encoded have groups of their own.
    """
    if not use_orig_params:
        everything = list(parameters)
        return [everything] if everything else []
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        is_packed = parameter in packed
        # The dtype of packed elements says nothing about the numbers that they encode.
        encoded = (
            communication is not None
            and not is_packed
            and communication.encodes_parameter(parameter)
        )
        kind = (parameter.dtype, parameter.requires_grad, is_packed, encoded)
        groups.setdefault(kind, []).append(parameter)
    return list(groups.values())


def encodings_of(
    group: Sequence[nn.Parameter],
    communication: Communication,
    ranks: int,
    packed: Collection[nn.Parameter] = (),
) -> Encodings | None:
    """The encodings in which ``ranks`` send a group's parameters and gradients, if any."""
    if ranks == 1 or group[0] in packed or not communication.encodes_parameter(group[0]):
        return None
    return Encodings.of(communication)


def buffers_of(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    """The buffers that are registered with ``modules``."""
    return [buffer for m in modules for buffer in m._buffers.values() if buffer is not None]


def parameter_order(modules: Iterable[nn.Module]) -> ParameterOrder:
    """The names of each module's own parameters, in the order in which it registered them."""
    return {module: tuple(module._parameters) for module in modules}


def compute_device(
    parameters: Iterable[nn.Parameter],
    device_id: int | str | torch.device | None,
    offload: bool,
    rank: int,
) -> torch.device:
    """The device that a unit computes on: ``device_id``, or its parameters' own."""
    found = next(filter(_HAS_MEMORY, map(_DEVICE, parameters)), None)
    asked = None if device_id is None else _as_device(device_id)
    if asked is not None:
        if found is not None and found.type != "cpu" and found != asked:
            raise ValueError(
                f"Inconsistent compute device and `device_id` on rank {rank}: {found} vs {asked}"
            )
        return asked
    accelerated = torch.accelerator.is_available()
    if accelerated and (found is None or (offload and found.type == "cpu")):
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return found or torch.device("cpu")


def _as_device(device_id: int | str | torch.device) -> torch.device:
    if isinstance(device_id, str):
        device_id = _named_device(device_id)
    if not isinstance(device_id, (int, torch.device)):
        raise TypeError(
            "device_id expects an int, a torch.device or the name of one such as 'cuda:1', but got "
            f"{device_id!r} of type {type(device_id).__name__}"
        )
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    if isinstance(device_id, torch.device):
        if device_id.type != "cpu" and (accelerator is None or accelerator.type != device_id.type):
            raise RuntimeError(
                f"device_id asks for {device_id}, but torch finds no {device_id.type} device on "
                "this machine; leave device_id out to compute where the parameters are"
            )
        if device_id.type != "cpu" and device_id.index is None:
            return torch.device(device_id.type, torch.accelerator.current_device_index())
        return device_id
    # A number means an accelerator; programs pass their rank even where there is none.
    return torch.device("cpu") if accelerator is None else torch.device(accelerator.type, device_id)


def _named_device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ValueError(
            f"device_id expects the name of a device such as 'cuda', 'cuda:1' or 'cpu', but got "
            f"{name!r}: {error}"
        ) from None


def broadcast_states(
    parameters: Iterable[nn.Parameter], buffers: Iterable[torch.Tensor], group: Group, unit: str
) -> None:
    """Overwrite parameters and buffers with those of the group's first rank."""
    tensors = [_without_repeats(each.detach()) for each in (*parameters, *buffers)]
    contiguous = [t if t.is_contiguous() else t.contiguous() for t in tensors]
    group.broadcast(contiguous, unit)
    for tensor, received in zip(tensors, contiguous, strict=True):
        if tensor is not received:
            tensor.copy_(received)


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of an expanded tensor, each once, so that they can be written to."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def build_unit(
    module: nn.Module,
    parameters: list[nn.Parameter],
    distributions: Mapping[nn.Parameter, Distribution],
    packings: Mapping[nn.Parameter, Packing],
    groups: ProcessGroups,
    device: torch.device,
    cpu_offload: CPUOffload,
    options: UnitOptions,
) -> Unit:
    """Flatten and shard ``parameters`` of ``module``; the module is changed in place.

    ``distributions`` has those parameters that are local parts of DTensors, and ``packings`` those
    that are packed elements.
    """
    communication, ranks = options.communication, groups.shards.size()
    grouped = group_parameters(parameters, options.use_orig_params, packings, communication)
    places = find_locations(module, parameters) if parameters else {}
    precision = options.mixed_precision
    handles: list[FlatParamHandle] = []
    for group in grouped:
        make: Any = FlatParamHandle
        if group[0] in packings:
            make = functools.partial(PackedFlatHandle, packings=packings)
        handle = make(
            group,
            module,
            device,
            options.strategy,
            cpu_offload.offload_params,
            precision.param_dtype,
            precision.reduce_dtype,
            precision.keep_low_precision_grads,
            groups.shards,
            options.use_orig_params,
            places=places,
            distributions=distributions,
            shard=True,
            encodings=communication and encodings_of(group, communication, ranks, packings),
        )
        handles.append(handle)
    shards = group_for(groups.shards, device)
    copies = group_for(groups.copies, device) if groups.copies is not None else None
    unit = Unit(type(module).__name__, module, handles, shards, copies, device, options)
    if communication is not None:
        share_secondary_shards(unit)
    return unit
