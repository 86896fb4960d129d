"""Replacing torch's objects by fullshard's, and restoring them.

Torch's modules import objects from each other under any name, so an object is replaced in every
module of torch that has it. The modules that implement torch's ``fully_shard`` (FSDP2) are treated
otherwise (``second_generation.py``): models to which it was applied before go on working.
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
from .second_generation import is_second_generation, show_ours, show_theirs

__all__ = ["install", "is_installed", "uninstall"]


class _Change(NamedTuple):
    namespace: dict[str, Any]
    name: str
    original: Any


_lock = threading.RLock()
_changes: list[_Change] = []


def install() -> None:
    """Replace torch's FSDP, of both generations, by fullshard.

    After this call ``from torch.distributed.fsdp import FullyShardedDataParallel`` and
    ``torch.distributed.fsdp.FullyShardedDataParallel`` give fullshard's class, and so do the names
    in the submodules and everywhere else in torch. Call it before the program imports those names
    and wraps models. This includes ``fully_shard``. Calling it again does nothing.

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
        show_ours(by_original)
        attributes.attach()


def uninstall() -> None:
    """Restore torch's own FSDP, also in modules that were imported since :func:`install`.

    Models that were wrapped in between stay fullshard's, and continue to work.
    """
    with _lock:
        if not _changes:
            return
        for change in _changes:
            change.namespace[change.name] = change.original
        _changes.clear()
        show_theirs()
        attributes.detach()
        by_ours: dict[int, list[Replacement]] = {}
        for entry in replacements():
            by_ours.setdefault(id(entry.ours), []).append(entry)
        for namespace in _namespaces():
            for name, value in list(namespace.items()):
                if id(value) in by_ours:
                    namespace[name] = _original_of(by_ours[id(value)], name)


def is_installed() -> bool:
    """Return True if torch's FSDP is currently replaced by fullshard's."""
    return bool(_changes)


def _warn_of_earlier_imports() -> None:
    """Warn about modules outside torch that will still use torch's wrapper."""
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
            "fullshard.compat.install() and will continue to use torch's; call install() before "
            "that import, or start the program with `fullshard run`",
            UserWarning,
            stacklevel=3,
        )


def _original_of(candidates: list[Replacement], name: str) -> Any:
    """The original object of ``name``; one object of ours may replace several of torch's."""
    return next((c.original for c in candidates if c.name == name), candidates[0].original)


def _namespaces() -> Iterator[dict[str, Any]]:
    modules: Mapping[str, ModuleType | None] = dict(sys.modules)
    for name, module in modules.items():
        ours = name == "torch" or name.startswith("torch.")
        if ours and not is_second_generation(name) and module is not None:
            yield module.__dict__
