"""Putting fullshard's names in place of torch's, and taking them out again.

Torch's modules keep the objects they imported from each other under any name, so an object is
replaced wherever a module of torch holds it. The modules that make up torch's ``fully_shard`` keep
their own, so that models to which it was applied before go on working.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch.distributed.fsdp

from . import attributes
from .names import Replacement, replacements

__all__ = ["install", "is_installed", "uninstall"]

#: What torch's ``fully_shard`` is made of.
_SECOND_GENERATION = "torch.distributed.fsdp._fully_shard._"


class _Change(NamedTuple):
    namespace: dict[str, Any]
    name: str
    original: Any


_lock = threading.RLock()
_changes: list[_Change] = []


def install() -> None:
    """Put fullshard's classes and functions in place of torch's FSDP names, of both generations.

    From here on ``from torch.distributed.fsdp import FullyShardedDataParallel`` and
    ``torch.distributed.fsdp.FullyShardedDataParallel`` are fullshard's, as are the names in the
    submodules and whatever else in torch holds them. Call it before the program imports those
    names, and before models are wrapped. Calling it again does nothing.

    >>> fullshard.compat.install()
    """
    with _lock:
        if _changes:
            return
        _warn_of_earlier_imports()
        by_original = {id(entry.original): entry for entry in replacements()}
        for namespace in _namespaces():
            for name, value in list(namespace.items()):
                entry = by_original.get(id(value))
                if entry is not None:
                    _changes.append(_Change(namespace, name, value))
                    namespace[name] = entry.ours
        attributes.attach()


def uninstall() -> None:
    """Give torch its own names back, also in modules that were imported since :func:`install`.

    Models that were wrapped in between go on working: they are fullshard's.
    """
    with _lock:
        if not _changes:
            return
        for change in _changes:
            change.namespace[change.name] = change.original
        _changes.clear()
        attributes.detach()
        by_ours: dict[int, list[Replacement]] = {}
        for entry in replacements():
            by_ours.setdefault(id(entry.ours), []).append(entry)
        for namespace in _namespaces():
            for name, value in list(namespace.items()):
                if id(value) in by_ours:
                    namespace[name] = _original_of(by_ours[id(value)], name)


def is_installed() -> bool:
    """Whether torch's names are fullshard's now."""
    return bool(_changes)


def _warn_of_earlier_imports() -> None:
    """Name the modules outside of torch that will go on using torch's wrapper."""
    theirs = torch.distributed.fsdp.FullyShardedDataParallel
    late = sorted(
        name
        for name, module in dict(sys.modules).items()
        if not name.startswith(("torch.", "fullshard."))
        and any(value is theirs for value in list(getattr(module, "__dict__", {}).values()))
    )
    if late:
        warnings.warn(
            f"{', '.join(late)} imported FullyShardedDataParallel from torch before "
            "fullshard.compat.install() and will go on using torch's; call install() before that "
            "import, or start the program with `fullshard run`",
            UserWarning,
            stacklevel=3,
        )


def _original_of(candidates: list[Replacement], name: str) -> Any:
    """What ``name`` stood for; one object of ours may stand for several of torch's."""
    return next((c.original for c in candidates if c.name == name), candidates[0].original)


def _namespaces() -> Iterator[dict[str, Any]]:
    modules: Mapping[str, ModuleType | None] = dict(sys.modules)
    for name, module in modules.items():
        ours = name == "torch" or name.startswith("torch.")
        if ours and not name.startswith(_SECOND_GENERATION) and module is not None:
            yield module.__dict__
