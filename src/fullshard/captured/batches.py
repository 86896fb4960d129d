"""Takes batches apart into leaves, which can be compared and copied, and puts them together again.

Beside the containers that torch knows, a batch may have dataclasses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from torch.utils import _pytree as pytree


class _Record(NamedTuple):
    """A dataclass, as a container that torch knows."""

    kind: type
    names: tuple[str, ...]
    values: list[Any]


def flatten(batch: Any) -> tuple[list[Any], Hashable, Any]:
    """The leaves of a batch, its structure (hashable), and what :func:`rebuilt` needs."""
    leaves, spec = pytree.tree_flatten(_opened(batch))
    return leaves, repr(spec), spec


def rebuilt(leaves: Sequence[Any], spec: Any) -> Any:
    """The batch of which these are the leaves."""
    return _closed(pytree.tree_unflatten(leaves, spec))


def _opened(value: Any) -> Any:
    if not _is_dataclass(value):
        return pytree.tree_map(_opened_leaf, value, is_leaf=_is_dataclass)
    # With what the class has set beside its fields; slots are fields.
    names = tuple(vars(value)) if hasattr(value, "__dict__") else _fields(value)
    return _Record(type(value), names, [_opened(getattr(value, name)) for name in names])


def _opened_leaf(leaf: Any) -> Any:
    return _opened(leaf) if _is_dataclass(leaf) else leaf


def _closed(value: Any) -> Any:
    if not isinstance(value, _Record):
        return pytree.tree_map(_closed_leaf, value, is_leaf=_is_record)
    # Not by the class: it would run its own initialisation again. Frozen ones, too.
    made: Any = object.__new__(value.kind)
    for name, each in zip(value.names, value.values, strict=True):
        object.__setattr__(made, name, _closed(each))
    return made


def _closed_leaf(leaf: Any) -> Any:
    return _closed(leaf) if _is_record(leaf) else leaf


def _fields(value: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(value))


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_record(value: Any) -> bool:
    return isinstance(value, _Record)
