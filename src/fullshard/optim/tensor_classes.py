"""Tensors of subclasses, such as torchao's 8-bit ones, saved as the plain tensors inside them.

A state dict has the plain tensors under separate names: those of ``exp_avg`` become
``exp_avg.codes``, ``exp_avg.scale`` and so on, so that they can be cut, sent and saved like any
others. ``exp_avg.__class__`` says how to put them together again.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_CLASS = ".__class__"
_DTYPE = "dtype:"


def taken_apart(state: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state with plain tensors only."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if type(value) in (torch.Tensor, nn.Parameter) or not hasattr(value, "__tensor_flatten__"):
            found[key] = value
            continue
        names, context = value.__tensor_flatten__()
        for name in names:
            found[f"{key}.{name}"] = getattr(value, name)
        kind = type(value)
        found[key + _CLASS] = [kind.__module__, kind.__qualname__, list(names), _plain(context)]
    return found


def put_together(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state that was taken apart."""
    classes = {key.removesuffix(_CLASS): key for key in state if key.endswith(_CLASS)}
    parts = {f"{key}.{name}": key for key, named in classes.items() for name in state[named][2]}
    found: dict[str, Any] = {}
    for key, value in state.items():
        whole = parts.get(key, key.removesuffix(_CLASS) if key.endswith(_CLASS) else None)
        if whole is None:
            found[key] = value
        elif whole not in found:
            found[whole] = _put_together(whole, state)
    return found


def _put_together(key: str, state: Mapping[str, Any]) -> Any:
    module_name, name, names, context = state[key + _CLASS]
    # Only of modules that are imported already: loading a checkpoint must not import anything.
    kind = getattr(sys.modules.get(module_name), name, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.Tensor)):
        raise RuntimeError(
            f"Optimizer state {key!r} was saved as tensors of class {module_name}.{name}, which is "
            "not imported here. Load it into an optimizer of the kind that saved it"
        )
    tensors = {part: state[f"{key}.{part}"] for part in names}
    rebuild: Any = kind
    return rebuild.__tensor_unflatten__(tensors, _restored(context), None, None)


def _plain(value: Any) -> Any:
    """The arguments that rebuild tensors, as data that a checkpoint can contain."""
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return f"{_DTYPE}{value}".replace("torch.", "") if isinstance(value, torch.dtype) else value


def _restored(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_restored(each) for each in value]
    if isinstance(value, str) and value.startswith(_DTYPE):
        return getattr(torch, value.removeprefix(_DTYPE))
    return value
