"""Giving memory and values to parameters that were constructed on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch
from torch import nn

from ..engine.places import Place


def materialize(
    modules: Iterable[nn.Module],
    parameters: Collection[nn.Parameter],
    device: torch.device,
    param_init_fn: Callable[[nn.Module], None] | None,
) -> None:
    """Initialise, module by module, those of ``modules`` that hold meta parameters directly.

    ``param_init_fn`` is called with the module if given; otherwise the module gets memory on
    ``device`` and its ``reset_parameters`` is called. Parameters shared between modules stay so.
    """
    managed = set(parameters)
    holders: dict[nn.Parameter, list[Place]] = {}
    for module in modules:
        own = {n: p for n, p in module._parameters.items() if p is not None and p in managed}
        for name, parameter in own.items():
            holders.setdefault(parameter, []).append(Place(module, name, name))
        buffers = (b for b in module._buffers.values() if b is not None)
        if any(p.is_meta for p in own.values()) or any(b.is_meta for b in buffers):
            _initialize(module, device, param_init_fn)
    for places in holders.values():
        first = places[0].module._parameters[places[0].name]
        for place in places[1:]:
            place.module._parameters[place.name] = first


def _initialize(
    module: nn.Module, device: torch.device, param_init_fn: Callable[[nn.Module], None] | None
) -> None:
    if param_init_fn is not None:
        if not callable(param_init_fn):
            raise ValueError(f"Expected {param_init_fn} to be callable")
        param_init_fn(module)
        return
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise RuntimeError(
            f"Module of type {type(module)} has parameters on the meta device but no "
            "reset_parameters() method to initialise them with. Give it one, or pass "
            "param_init_fn= to the constructor"
        )
    module.to_empty(device=device, recurse=False)
    with torch.no_grad():
        reset()
