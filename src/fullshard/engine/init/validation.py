"""Rejects modules and parameters that cannot be sharded, by path, before anything is changed."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..grads.user_hooks import IN_BACKWARD
from ..params.locations import clean_tensor_name
from ..runtime.pytrees import tensors_in
from ..runtime.unit import Unit

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
#: Phrases of torch's errors about weights of one dimension, which pieces are.
_FLAT = re.compile(r"1-D|2-D|must be a matrix|dimensions")
#: The attribute of errors that a unit has examined.
_SEEN = "_fullshard_seen"
#: How many units a note names.
_SHOWN = 4


def check_unit(
    root: nn.Module,
    modules: Iterable[nn.Module],
    parameters: Sequence[nn.Parameter],
    use_orig_params: bool,
) -> None:
    """Check the modules and parameters of a unit around ``root``."""
    check_modules(root, modules)
    warn_of_container(root)
    check_parameters(root, parameters)
    if not use_orig_params:
        check_no_optimizers_in_backward(root, parameters)


def check_modules(root: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Raise TypeError for modules of classes that cannot be in a unit."""
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"{_path_of(root, module)} is a ScriptModule, whose parameters cannot be replaced "
                "by full ones. Wrap the module as it was before scripting and use torch.compile, "
                "or leave it out (ignored_modules=)"
            )


def warn_of_container(module: nn.Module) -> None:
    """Warn of a container: its forward, which would all-gather parameters, is never called."""
    if isinstance(module, _CONTAINERS):
        warnings.warn(
            "FSDP will not all-gather parameters for containers that do not implement forward: "
            f"{type(module).__name__} of {len(module)} modules. Wrap the modules in it",
            UserWarning,
            stacklevel=6,
        )


def check_parameters(root: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Raise an error for parameters that cannot be in one flat buffer."""
    devices: dict[torch.device, nn.Parameter] = {}
    for parameter in parameters:
        devices.setdefault(parameter.device, parameter)
        if is_lazy(parameter):
            raise ValueError(
                f"{_name_of(root, parameter)} has no shape yet (it belongs to a lazy module). Run "
                "the model once, for example on one sample, before wrapping it"
            )
        if parameter.layout is not torch.strided:
            raise ValueError(
                f"{_name_of(root, parameter)} has the layout {parameter.layout}; only dense "
                "parameters can be sharded. Leave it out (ignored_states=), or make it dense"
            )
    devices.pop(torch.device("meta"), None)
    if len(devices) > 1:
        examples = ", ".join(f"{_name_of(root, p)} on {device}" for device, p in devices.items())
        raise RuntimeError(
            "FSDP only supports single device modules but got params on "
            f"{sorted(map(str, devices))}: {examples}. Move the whole model to one device"
        )


def check_no_optimizers_in_backward(root: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Raise RuntimeError if parameters to be flattened have optimizers in backward."""
    for parameter in parameters:
        if hasattr(parameter, IN_BACKWARD):
            raise RuntimeError(
                f"{_name_of(root, parameter)} of {type(root).__name__} was given to "
                "_apply_optimizer_in_backward, and would be replaced by a flat parameter that its "
                "optimizer does not know. FSDP optimizer in backward only supported with "
                "use_orig_params=True! Or call _apply_optimizer_in_backward after wrapping, with "
                "the wrapped model's parameters"
            )


def check_one_device(units: Iterable[Unit]) -> None:
    """Raise ValueError if units below one root compute on different devices."""
    found: dict[torch.device, str] = {}
    for unit in units:
        found.setdefault(unit.device, unit.name)
    if len(found) > 1:
        examples = ", ".join(f"{device} in unit {name!r}" for device, name in found.items())
        raise ValueError(
            f"Expects one homogeneous value for compute_device but got {set(found)}: {examples}. "
            "Move the whole model to one device"
        )


def note_places(error: BaseException, unit: Unit, inputs: Any) -> None:
    """Add to an error about devices which tensors are not on the device of ``unit``."""
    if not isinstance(error, RuntimeError) or "device" not in str(error).lower():
        return
    if hasattr(error, "__notes__"):
        # A nested unit has added a note already.
        return
    device, module = unit.device, unit.module
    managed = {p for handle in unit.handles for p in handle.optimizer_params}
    unmanaged = [(name, p) for name, p in module.named_parameters() if p not in managed]
    found = [f"an input on {t.device}" for t in tensors_in(inputs) if t.device != device]
    for kind, tensors in (("buffer", module.named_buffers()), ("unmanaged parameter", unmanaged)):
        found += [f"{kind} {name!r} on {t.device}" for name, t in tensors if t.device != device]
    if found:
        error.add_note(
            f"Unit {unit.name!r} computes on {device}, but there is {', '.join(found)}. Its "
            "parameters follow the model's device at wrapping, device_id=, or model.to()."
        )


def note_pieces(error: BaseException, nested: Iterable[Unit]) -> None:
    """Add to an error about shapes which of the ``nested`` units' parameters are sharded now.

    Code that uses a parameter without calling its module gets such errors. Only units are named
    whose pieces have a size that the error mentions. Only the innermost unit adds the note.
    """
    if not isinstance(error, RuntimeError) or _SEEN in vars(error):
        return
    try:
        setattr(error, _SEEN, True)
    except Exception:
        # An error class to which no attribute can be added.
        return
    numbers = {int(number) for number in re.findall(r"\b\d{1,15}\b", str(error))}
    flat = _FLAT.search(str(error)) is not None
    resting = [unit for unit in nested if unit.is_sharded and not unit.shows_full]
    found = [
        repr(unit.name)
        for unit in resting
        if any(flat or piece.numel in numbers for handle in unit.handles for piece in handle.pieces)
    ]
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        error.add_note(
            "Outside of its own forward a unit shows this rank's pieces of its parameters: at this "
            f"point {', '.join(found[:_SHOWN])}{more}. If one of them is used without calling its "
            "module, as nn.MultiheadAttention uses out_proj, let the module that uses it be the "
            "unit."
        )


def _path_of(root: nn.Module, module: nn.Module) -> str:
    paths = (path for path, found in root.named_modules() if found is module)
    path = clean_tensor_name(f"{next(paths, '')}.")[:-1]
    return f"{path or '(root)'!r}, of type {type(module).__name__},"


def _name_of(root: nn.Module, parameter: nn.Parameter) -> str:
    names = (name for name, found in root.named_parameters() if found is parameter)
    return repr(clean_tensor_name(next(names, "?")))
