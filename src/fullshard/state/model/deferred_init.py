"""Initialises parameters that were constructed on the meta device.

Note: parameters stay the same objects
    ``to_empty`` and similar functions replace parameters by new objects. A parameter that modules
    share, that a nested unit leaves to an outer one, or that an optimizer holds, must stay the same
    object. So the new parameter's contents are swapped into the old object, which is registered
    again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

import torch
from torch import nn

from ...engine.params.locations import clean_tensor_name

InitFunction = Callable[[nn.Module], None]


def holds_meta(module: nn.Module, managed: Collection[nn.Parameter] | None = None) -> bool:
    """True if ``module`` itself has a parameter (of ``managed``) or a buffer on the meta device."""
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
    """Raise RuntimeError if one of ``modules`` on the meta device cannot be initialised."""
    if param_init_fn is not None:
        if not callable(param_init_fn):
            raise ValueError(
                f"Expected {param_init_fn!r} to be callable but got {type(param_init_fn)}"
            )
        return
    uninitializable = {
        module
        for module in modules
        if not callable(getattr(module, "reset_parameters", None)) and holds_meta(module, managed)
    }
    if uninitializable:
        raise RuntimeError(
            f"{_paths(root, uninitializable)} has parameters or buffers on the meta device but no "
            "reset_parameters() method to initialise them. Define one, or pass param_init_fn= to "
            "the constructor"
        )


def materialize(
    root: nn.Module,
    modules: Iterable[nn.Module],
    managed: Collection[nn.Parameter],
    device: torch.device,
    param_init_fn: InitFunction | None,
) -> None:
    """Initialise the parameters and buffers of ``root``'s unit that are on the meta device.

    They belong to ``modules``, or to modules of a nested unit that left some of the ``managed``
    parameters to this one. Each module is passed to ``param_init_fn``, if given. Otherwise its
    tensors are allocated on ``device``, and its ``reset_parameters`` is called.
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
    """Free the memory of parameters that a flat parameter replaced, even if others hold them."""
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
    """Swap the contents of ``new`` into the object ``old``, which keeps its attributes."""
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
            "param_init_fn or reset_parameters() was called. That function must allocate them, for "
            "example with module.to_empty(device=..., recurse=False)"
        )


def _paths(root: nn.Module, modules: Collection[nn.Module]) -> str:
    named = ((clean_tensor_name(f"{p}.")[:-1], m) for p, m in root.named_modules() if m in modules)
    return ", ".join(f"{path or '(root)'!r} ({type(m).__name__})" for path, m in named)
