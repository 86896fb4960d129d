"""Finds and replaces tensors in the inputs and outputs of modules."""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map

#: Types of arguments into which a module cannot put tensors.
PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter, types.NoneType, bool, int, float, str}

Replace = Callable[[torch.Tensor], torch.Tensor]


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Every tensor that can be reached in a module's inputs or outputs.

    Looks into tuples, lists, dicts, dataclasses, named tuples, packed sequences and, since people
    return objects of their own, into the attributes of anything else that has some.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (str, bytes, int, float, complex, type(None), torch.nn.Module)):
        return
    else:
        seen = set() if seen is None else seen
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, dict):
            children = list(value.values())
        elif isinstance(value, (tuple, list, set, frozenset, collections.deque)):
            children = list(value)
        elif callable(value):
            # Classes, and functions and modules, which may lead anywhere.
            return
        else:
            children = _in_slots(value)
        if hasattr(value, "__dict__"):
            children.extend(vars(value).values())
        for child in children:
            yield from tensors_in(child, seen)


def list_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors that :func:`tensors_in` finds; quick if ``value`` is itself a tensor."""
    return [value] if isinstance(value, torch.Tensor) else list(tensors_in(value))


def _in_slots(value: Any) -> list[Any]:
    names = (getattr(kind, "__slots__", ()) for kind in type(value).__mro__)
    each = ((slots,) if isinstance(slots, str) else slots for slots in names)
    return [getattr(value, name, None) for name in itertools.chain.from_iterable(each)]


def replace_tensors(value: Any, function: Replace) -> Any:
    """``value`` with ``function`` applied to every tensor in its containers.

    Containers are those that torch knows (tuples, lists, dicts, named tuples, what programs have
    registered with ``torch.utils._pytree``), dataclasses and packed sequences. They are not
    changed, but made anew. Where no tensor in them is replaced, tuples, lists and dicts are the
    same objects, since a module may be meant to fill them.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) in (tuple, list):
        items = [replace_tensors(item, function) for item in value]
        return value if all(map(operator.is_, items, value)) else type(value)(items)
    if type(value) is dict:
        named = {key: replace_tensors(item, function) for key, item in value.items()}
        return value if all(map(operator.is_, named.values(), value.values())) else named

    def replace(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        if isinstance(leaf, PackedSequence):
            return _replace_in_packed(leaf, function)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            return _replace_in_dataclass(leaf, function)
        return leaf

    return tree_map(replace, value, is_leaf=_is_packed)


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)


def _replace_in_packed(packed: PackedSequence, function: Replace) -> PackedSequence:
    # The batch sizes belong on the host, wherever the data is.
    data, _, *orders = packed
    indices = [order if order is None else function(order) for order in orders]
    return PackedSequence(function(data), packed.batch_sizes, *indices)


def _replace_in_dataclass(instance: Any, function: Replace) -> Any:
    values = {f.name: getattr(instance, f.name, None) for f in dataclasses.fields(instance)}
    changed = {name: replace_tensors(value, function) for name, value in values.items()}
    if all(changed[name] is value for name, value in values.items()):
        return instance
    # Not dataclasses.replace: it would run the class's own initialisation again.
    result = copy.copy(instance)
    frozen = instance.__dataclass_params__.frozen
    for name, value in changed.items():
        if value is not values[name]:
            (object.__setattr__ if frozen else setattr)(result, name, value)
    return result
