"""Converts nested plain data with tensors in it to JSON data and a flat table of tensors, and back.

JSON has numbers, strings, lists, and dicts with string keys. Other Python values are written as a
dict with one key that begins with ``$``. Decoding never runs code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..model.sharded_tensors import is_sharded

Tensors = dict[str, Any]

#: The depth to which lists and dicts may be nested: decoding takes a call for each level.
DEEPEST = 100
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def encode(
    value: Any, where: str, tensors: Tensors, may_be_sharded: bool = True, depth: int = 0
) -> Any:
    """Convert ``value`` to JSON data, and add its tensors to ``tensors`` under their paths.

    Sharded tensors are refused unless ``may_be_sharded``. ``where`` is the path of ``value``, and
    ``depth`` the number of lists and dicts around it.
    """
    if depth > DEEPEST:
        raise ValueError(
            f"{where} is nested in more than {DEEPEST} lists and dicts, which is the limit of a "
            "checkpoint. Pass flatter data"
        )
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(float(value))}
    if _is_numpy_number(value):
        return encode(value.item(), where, tensors)
    if _is_tensor(value):
        if not may_be_sharded and is_sharded(value):
            raise TypeError(
                f"{where} is a {type(value).__name__}, of which the rank that saves it has only a "
                "part. Pass the whole tensor"
            )
        name = _unused(where, tensors)
        tensors[name] = value
        return {"$tensor": name}
    if isinstance(value, Mapping):
        return _encode_dict(value, where, tensors, may_be_sharded, depth)
    if isinstance(value, (list, tuple, torch.Size)):
        items = [
            encode(item, f"{where}/{i}", tensors, may_be_sharded, depth + 1)
            for i, item in enumerate(value)
        ]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, complex):
        return {"$complex": [value.real, value.imag]}
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, torch.dtype):
        return {"$dtype": dtype_name(value)}
    raise TypeError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot contain. It can contain "
        "numbers, strings, bytes, lists, tuples, dicts, dtypes and tensors, so that loading it "
        "never runs code"
    )


def _encode_dict(
    value: Mapping[Any, Any], where: str, tensors: Tensors, may_be_sharded: bool, depth: int
) -> Any:
    items = {
        key: encode(item, f"{where}/{key}", tensors, may_be_sharded, depth + 1)
        for key, item in value.items()
    }
    if all(isinstance(key, str) and not key.startswith("$") for key in items):
        return items
    return {
        "$dict": [
            [encode(key, f"a key of {where}", tensors, depth=depth + 1), item]
            for key, item in items.items()
        ]
    }


def _unused(where: str, tensors: Tensors) -> str:
    """A unique name for the tensor at ``where``; keys with slashes can make two paths equal."""
    name, number = where, 2
    while name in tensors:
        name = f"{where}~{number}"
        number += 1
    return name


def entries(data: Mapping[str, Any]) -> Mapping[Any, Any]:
    """An encoded dict by its original keys, with values that are still encoded."""
    if list(data) != ["$dict"]:
        return data
    return {decode(key, lambda name: name): item for key, item in data["$dict"]}


def decode(data: Any, tensor: Callable[[str], Any]) -> Any:
    """Return the value that :func:`encode` was given; ``tensor`` returns tensors by name."""
    if isinstance(data, list):
        return [decode(item, tensor) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) == 1:
        ((kind, content),) = data.items()
        if kind.startswith("$"):
            return _special(kind, content, tensor)
    return {key: decode(item, tensor) for key, item in data.items()}


def _special(kind: str, content: Any, tensor: Callable[[str], Any]) -> Any:
    if kind == "$tensor":
        return tensor(content)
    if kind == "$tuple":
        return tuple(decode(item, tensor) for item in content)
    if kind == "$dict":
        return {decode(k, tensor): decode(v, tensor) for k, v in content}
    if kind == "$float":
        return float(content)
    if kind == "$complex":
        return complex(*content)
    if kind == "$bytes":
        return bytes.fromhex(content)
    if kind == "$dtype":
        return dtype_named(content)
    raise ValueError(f"{kind!r} is not a kind of value that this version of fullshard supports")


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in a checkpoint."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: Any) -> torch.dtype:
    """The dtype of that name; names of other attributes of torch are refused."""
    dtype = _DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise ValueError(f"{name!r} is not a dtype of this version of torch")
    return dtype


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or hasattr(value, "local_shards")


def _is_numpy_number(value: Any) -> bool:
    """True for a numpy scalar that ``item()`` converts exactly; does not import numpy."""
    kinds = type(value).__mro__
    if not any((kind.__module__, kind.__name__) == ("numpy", "number") for kind in kinds):
        return (kinds[0].__module__, kinds[0].__name__) in (("numpy", "bool"), ("numpy", "bool_"))
    # Not durations, which would lose their unit, and not floats longer than Python's.
    return value.dtype.kind in "iufc" and type(value.item()) in (int, float, complex)
