"""The modules of torch's own ``fully_shard``, in which others find our names, and they their own.

Their code reads names from the modules' namespaces, which stay as they are, so that models that
torch sharded before go on working. Whoever imports a name from one of them, or reads it as an
attribute, asks the module object, which answers with ours.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from .names import Replacement

__all__ = ["is_second_generation", "show_ours", "show_theirs"]

_PREFIX = "torch.distributed.fsdp._fully_shard._"
#: Our objects, by the identity of torch's that they stand for.
_ours: dict[int, Any] = {}
#: Torch's, by their names and the identity of ours.
_theirs: dict[tuple[str, int], Any] = {}


class _ShowsOurs(ModuleType):
    """A module whose attributes are ours where there are any."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return _ours.get(id(found), found)

    def __setattr__(self, name: str, value: Any) -> None:
        """Whoever puts a name back that was ours puts torch's back, as before."""
        theirs = _theirs.get((name, id(value)), value)
        super().__setattr__(name, theirs)


def is_second_generation(name: str) -> bool:
    """Return True for the name of a module that torch's ``fully_shard`` is made of."""
    return name.startswith(_PREFIX)


def show_ours(replacements: dict[int, Replacement]) -> None:
    """Let these modules show our objects, by the identity of torch's, to all but themselves."""
    for original, entry in replacements.items():
        _ours[original] = entry.ours
        _theirs[entry.name, id(entry.ours)] = entry.original
    for module in _modules():
        if type(module) is ModuleType:
            module.__class__ = _ShowsOurs


def show_theirs() -> None:
    """Let these modules show torch's objects again."""
    _ours.clear()
    _theirs.clear()
    for module in _modules():
        if type(module) is _ShowsOurs:
            module.__class__ = ModuleType  # type: ignore[assignment]


def _modules() -> Iterator[ModuleType]:
    return (m for name, m in dict(sys.modules).items() if is_second_generation(name))
