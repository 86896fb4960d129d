"""Giving memory and values to parameters that were constructed on the meta device.

Note: parameters stay the same objects
    ``to_empty`` and its like replace parameters by new ones. A parameter that modules share, that
    a unit leaves to another, or that an optimizer holds already, must stay one object. So the new
    parameter's contents are put into the old object, which goes back to its place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

import torch
from torch import nn

from ...engine.params.locations import clean_tensor_name

InitFunction = Callable[[nn.Module], None]


def holds_meta(module: nn.Module, managed: Collection[nn.Parameter] | None = None) -> bool:
    """Whether ``module`` itself has a parameter (one of ``managed``) or buffer to initialise."""
    parameters = (p for p in module._parameters.values() if p is not None)
    if any(p.is_meta and (managed is None or p in managed) for p in parameters):
        return True
    return any(b is not None and b.is_meta for b in module._buffers.values())


def check_initializable(
    root: nn.Module,
    modules: Collection[nn.Module],
    managed: Collection[nn.Parameter] | None,
    param_init_fn: InitFunction | None,
) -> None:
    """Refuse ``modules`` on the meta device that have no way to be initialised, by their paths."""
    if param_init_fn is not None:
        if not callable(param_init_fn):
            raise ValueError(
                f"Expected {param_init_fn!r} to be callable but got {type(param_init_fn)}"
            )
        return
    helpless = {
        module
        for module in modules
        if not callable(getattr(module, "reset_parameters", None)) and holds_meta(module, managed)
    }
    if helpless:
        raise RuntimeError(
            f"{_paths(root, helpless)} has parameters or buffers on the meta device but no "
            "reset_parameters() method to initialise them with. Give the class one, or pass "
            "param_init_fn= to the constructor"
        )


def materialize(
    root: nn.Module,
    modules: Iterable[nn.Module],
    managed: Collection[nn.Parameter],
    device: torch.device,
    param_init_fn: InitFunction | None,
) -> None:
    """Initialise, module by module, what is on the meta device and belongs to ``root``'s unit.

    These are ``modules``, and those that hold one of the ``managed`` parameters which a nested
    unit left to this one. ``param_init_fn`` is called with the module if given; otherwise what is
    on the meta device gets memory on ``device``, and ``reset_parameters`` is called.
    """
    for module in modules:
        if holds_meta(module, managed):
            _initialize(module, device, param_init_fn)
    if any(p.is_meta for p in managed):
        for module in root.modules():
            if any(p is not None and p.is_meta and p in managed for p in _own(module)):
                _initialize(module, device, param_init_fn)
    _check_initialized(root, modules, managed)


def forget(parameters: Iterable[nn.Parameter]) -> None:
    """Give back the memory of parameters that a flat one has replaced, whoever holds them."""
    for parameter in parameters:
        parameter.data = parameter.data.new_empty(0)


def _own(module: nn.Module) -> Iterator[nn.Parameter | None]:
    return iter(module._parameters.values())


def _initialize(
    module: nn.Module, device: torch.device, param_init_fn: InitFunction | None
) -> None:
    before = dict(module._parameters)
    if param_init_fn is not None:
        param_init_fn(module)
    else:
        _give_memory(module, device)
        reset: Callable[[], None] = module.reset_parameters  # type: ignore[assignment]
        with torch.no_grad():
            reset()
    for name, old in before.items():
        new = module._parameters.get(name)
        if old is not None and new is not None and old is not new and old.is_meta:
            _put_into(old, new)
            module._parameters[name] = old


def _give_memory(module: nn.Module, device: torch.device) -> None:
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta:
            empty = torch.empty_like(parameter, device=device)
            module._parameters[name] = nn.Parameter(empty, parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device=device)


def _put_into(old: nn.Parameter, new: nn.Parameter) -> None:
    """Let the object ``old`` have the contents of ``new``, and keep what was attached to it."""
    attached = dict(old.__dict__)
    torch.utils.swap_tensors(old, new)
    old.__dict__.update(attached)


def _check_initialized(
    root: nn.Module, modules: Iterable[nn.Module], managed: Collection[nn.Parameter]
) -> None:
    left = {module for module in modules if holds_meta(module, managed)}
    if left:
        raise RuntimeError(
            f"{_paths(root, left)} has parameters or buffers on the meta device after "
            "param_init_fn or reset_parameters() was called. It must give them memory, for example "
            "by module.to_empty(device=..., recurse=False)"
        )


def _paths(root: nn.Module, modules: Collection[nn.Module]) -> str:
    named = ((clean_tensor_name(f"{p}.")[:-1], m) for p, m in root.named_modules() if m in modules)
    return ", ".join(f"{path or '(root)'!r} ({type(m).__name__})" for path, m in named)
