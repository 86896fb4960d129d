"""Finds parameters of classes that pack their elements, and prepares them to be sharded.

Rejects, by path, those that cannot be sharded: as plain tensors they would give wrong results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from ..params import quantized
from ..params.locations import find_locations
from ..params.packed import InnerTensors, Packing
from ..params.tensor_parallel import is_distributed, local_part

#: The types of parameters that are neither distributed nor packed.
PLAIN = {nn.Parameter}


def is_packed(parameter: nn.Parameter) -> bool:
    """True if a parameter's class packs its elements."""
    if type(parameter) is nn.Parameter or is_distributed(parameter):
        return False
    return quantized.is_quantized(parameter) or hasattr(parameter, "__tensor_flatten__")


def packings_of(
    root: nn.Module, parameters: Iterable[nn.Parameter], use_orig_params: bool = True
) -> dict[nn.Parameter, Packing]:
    """The packings of packed parameters; ValueError for those that cannot be sharded."""
    parameters = list(parameters)
    _check_not_distributed(root, parameters)
    found = {p: _packing(root, p) for p in parameters if is_packed(p)}
    if found and not use_orig_params:
        raise ValueError(
            f"{_told(root, next(iter(found)))} cannot be part of a flat parameter, in which it "
            "would lose its class. Pass use_orig_params=True"
        )
    return found


def _check_not_distributed(root: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Raise ValueError for DTensors whose local parts are packed."""
    for parameter in filter(is_distributed, parameters):
        part = local_part(parameter)
        if hasattr(part, "__tensor_flatten__") and not hasattr(part, "fsdp_pre_all_gather"):
            raise ValueError(
                f"Parameter {_path(root, parameter)!r} is a DTensor of {type(part).__name__}, and "
                "tensor-parallel parameters can be sharded only if they are plain. Quantise "
                "without tensor parallelism, or leave it out (ignored_states=)"
            )


def _packing(root: nn.Module, parameter: nn.Parameter) -> Packing:
    try:
        if quantized.is_quantized(parameter):
            packing = quantized.packing_of(parameter)
        elif parameter.is_meta:
            raise ValueError("it is on the meta device: load the quantised model on every rank")
        else:
            packing = InnerTensors.of(parameter)
    except ValueError as error:
        raise ValueError(f"{_told(root, parameter)} cannot be sharded: {error}") from None
    if parameter.requires_grad:
        raise ValueError(
            f"{_told(root, parameter)} requires a gradient, but packed elements cannot be trained. "
            "Freeze it (requires_grad_(False)), and train adapters beside it"
        )
    return packing


def _told(root: nn.Module, parameter: nn.Parameter) -> str:
    return f"Parameter {_path(root, parameter)!r}, a {type(parameter).__name__},"


def _path(root: nn.Module, parameter: nn.Parameter) -> str:
    return find_locations(root, [parameter])[parameter][0].path


def tensors_beside(packings: Mapping[nn.Parameter, Packing]) -> list[torch.Tensor]:
    """The tensors of packed parameters that every rank has whole."""
    return [t for parameter, packing in packings.items() for t in packing.tensors(parameter)]


def pack(
    root: nn.Module,
    parameters: list[nn.Parameter],
    param_dtype: torch.dtype | None,
    leave: Callable[[nn.Parameter], bool] = lambda parameter: False,
) -> tuple[list[nn.Parameter], dict[nn.Parameter, Packing]]:
    """Prepare packed parameters, and their modules, to be laid out by their packed elements.

    Parameters that ``leave`` selects are left out. Other parameters are cast to ``param_dtype`` for
    compute. Returns the parameters, some of which are now plain ones with the original's bytes.
    """
    packings = packings_of(root, [p for p in parameters if not leave(p)])
    if not packings:
        return parameters, {}
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for parameter, places in find_locations(root, packings).items():
        packing = packings[parameter]
        if not packing.is_hidden:
            for place in places:
                quantized.settle_module(place.module, place.name)
                quantized.settle_bias(place.module, place.parent, param_dtype)
            continue
        standing = nn.Parameter(packing.pack(parameter.detach()), requires_grad=False)
        for place in places:
            place.module._parameters[place.name] = standing
        replaced[parameter] = standing
        packings[standing] = packings.pop(parameter)
    return [replaced.get(p, p) for p in parameters], packings
