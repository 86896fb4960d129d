"""Nested plain data with tensors in it, as JSON beside a flat table of tensors.

JSON holds numbers, strings, lists and dicts with names as keys. What Python has beyond that is
written as a dict with one key that begins with ``$``. Nothing that is read back can run code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

Tensors = dict[str, Any]


def take_apart(value: Any, where: str, tensors: Tensors) -> Any:
    """``value`` as JSON data; its tensors go into ``tensors``, named after where they were."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(float(value))}
    if _is_tensor(value):
        name = _unused(where, tensors)
        tensors[name] = value
        return {"$tensor": name}
    if isinstance(value, Mapping):
        return _take_dict_apart(value, where, tensors)
    if isinstance(value, (list, tuple, torch.Size)):
        items = [take_apart(item, f"{where}/{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, complex):
        return {"$complex": [value.real, value.imag]}
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, torch.dtype):
        return {"$dtype": dtype_name(value)}
    raise TypeError(
        f"{where} is a {type(value).__name__}, which a checkpoint does not hold: it holds numbers, "
        "strings, bytes, lists, tuples, dicts and tensors, from which no code is run when they are "
        "read"
    )


def _take_dict_apart(value: Mapping[Any, Any], where: str, tensors: Tensors) -> Any:
    items = {key: take_apart(item, f"{where}/{key}", tensors) for key, item in value.items()}
    if all(isinstance(key, str) and not key.startswith("$") for key in items):
        return items
    return {"$dict": [[take_apart(k, f"a key of {where}", tensors), v] for k, v in items.items()]}


def _unused(where: str, tensors: Tensors) -> str:
    """A name for the tensor that was at ``where``: keys with slashes make two places look alike."""
    name, number = where, 2
    while name in tensors:
        name = f"{where}~{number}"
        number += 1
    return name


def entries(data: Mapping[str, Any]) -> Mapping[Any, Any]:
    """What a dict that was taken apart held, by its own keys; the values are still apart."""
    if list(data) != ["$dict"]:
        return data
    return {put_together(key, lambda name: name): item for key, item in data["$dict"]}


def put_together(data: Any, tensor: Callable[[str], Any]) -> Any:
    """What :func:`take_apart` was given, with tensors as ``tensor`` finds them by their names."""
    if isinstance(data, list):
        return [put_together(item, tensor) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) == 1:
        ((kind, content),) = data.items()
        if kind.startswith("$"):
            return _special(kind, content, tensor)
    return {key: put_together(item, tensor) for key, item in data.items()}


def _special(kind: str, content: Any, tensor: Callable[[str], Any]) -> Any:
    if kind == "$tensor":
        return tensor(content)
    if kind == "$tuple":
        return tuple(put_together(item, tensor) for item in content)
    if kind == "$dict":
        return {put_together(k, tensor): put_together(v, tensor) for k, v in content}
    if kind == "$float":
        return float(content)
    if kind == "$complex":
        return complex(*content)
    if kind == "$bytes":
        return bytes.fromhex(content)
    if kind == "$dtype":
        return dtype_named(content)
    raise ValueError(f"{kind!r} is not a kind of value that this version of fullshard knows")


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype as it is written down."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The dtype of that name; nothing else of torch can be reached by a name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype that this version of torch knows")
    return dtype


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or hasattr(value, "local_shards")
