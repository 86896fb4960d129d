"""Nested plain data with tensors in it, as JSON beside a flat table of tensors.

JSON holds numbers, strings, lists and dicts with names as keys. What Python has beyond that is
written as a dict with one key that begins with ``$``. Nothing that is read back can run code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..model.sharded_tensors import is_sharded

Tensors = dict[str, Any]

#: How many levels lists and dicts may be inside of each other: reading them takes a call for each.
DEEPEST = 100
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def take_apart(
    value: Any, where: str, tensors: Tensors, may_be_sharded: bool = True, depth: int = 0
) -> Any:
    """``value`` as JSON data; its tensors go into ``tensors``, named after where they were.

    Tensors that one rank has a part of are refused unless they ``may_be_sharded``. ``depth`` is
    the number of lists and dicts that ``value`` is inside of.
    """
    if depth > DEEPEST:
        raise ValueError(
            f"{where} is inside of more than {DEEPEST} lists and dicts, which is all that a "
            "checkpoint holds: give flatter data"
        )
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(float(value))}
    if _is_number_of_numpy(value):
        return take_apart(value.item(), where, tensors)
    if _is_tensor(value):
        if not may_be_sharded and is_sharded(value):
            raise TypeError(
                f"{where} is a {type(value).__name__}, of which the rank that saves it has a part "
                "only: give the whole tensor"
            )
        name = _unused(where, tensors)
        tensors[name] = value
        return {"$tensor": name}
    if isinstance(value, Mapping):
        return _take_dict_apart(value, where, tensors, may_be_sharded, depth)
    if isinstance(value, (list, tuple, torch.Size)):
        items = [
            take_apart(item, f"{where}/{i}", tensors, may_be_sharded, depth + 1)
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
        f"{where} is a {type(value).__name__}, which a checkpoint does not hold: it holds numbers, "
        "strings, bytes, lists, tuples, dicts and tensors, from which no code is run when they are "
        "read"
    )


def _take_dict_apart(
    value: Mapping[Any, Any], where: str, tensors: Tensors, may_be_sharded: bool, depth: int
) -> Any:
    items = {
        key: take_apart(item, f"{where}/{key}", tensors, may_be_sharded, depth + 1)
        for key, item in value.items()
    }
    if all(isinstance(key, str) and not key.startswith("$") for key in items):
        return items
    return {
        "$dict": [
            [take_apart(key, f"a key of {where}", tensors, depth=depth + 1), item]
            for key, item in items.items()
        ]
    }


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


def dtype_named(name: Any) -> torch.dtype:
    """The dtype of that name; nothing else of torch can be reached by a name."""
    dtype = _DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise ValueError(f"{name!r} is not a dtype that this version of torch knows")
    return dtype


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or hasattr(value, "local_shards")


def _is_number_of_numpy(value: Any) -> bool:
    """Whether ``item()`` is the same number, exactly, as Python's; numpy need not be there."""
    kinds = type(value).__mro__
    if not any((kind.__module__, kind.__name__) == ("numpy", "number") for kind in kinds):
        return (kinds[0].__module__, kinds[0].__name__) in (("numpy", "bool"), ("numpy", "bool_"))
    # Durations count as whole numbers, of a unit that would be lost; longer floats have no other.
    return value.dtype.kind in "iufc" and type(value.item()) in (int, float, complex)
