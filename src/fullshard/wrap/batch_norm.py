"""Batch norms under mixed precision: units of their own, in full precision.

A batch norm whose weights are cast to low precision while its running statistics are not fails with
an error that mentions neither. With an ``auto_wrap_policy`` every batch norm becomes a unit of its
own in full precision; without one, only those that could not run otherwise.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from fullshard.wrap.marker import is_unit
from fullshard.wrap.plan import Attribute

__all__ = [
    "NeedsFullPrecision",
    "find_norms_needing_full_precision",
    "needs_full_precision",
    "warn_of_full_precision",
]


@dataclass(frozen=True, eq=False)
class NeedsFullPrecision:
    """A module that needs full precision, and the attributes under which it is registered."""

    path: str
    module: nn.Module
    places: list[Attribute]

    def replace_by(self, unit: nn.Module) -> None:
        """Register ``unit`` in place of the module, wherever the module is registered."""
        for place in self.places:
            place.parent._modules[place.name] = unit


def needs_full_precision(module: nn.Module, precision: Any) -> bool:
    """Return True if ``module`` keeps running statistics in a dtype other than ``param_dtype``."""
    classes = tuple(precision._module_classes_to_ignore or ())
    if precision.param_dtype is None or not isinstance(module, classes):
        return False
    buffers = [b for b in module._buffers.values() if b is not None and b.is_floating_point()]
    return any((precision.buffer_dtype or b.dtype) != precision.param_dtype for b in buffers)


def find_norms_needing_full_precision(
    root: nn.Module, precision: Any, ignored: Collection[nn.Module]
) -> tuple[NeedsFullPrecision, ...]:
    """Find the norms below ``root`` that are neither in a nested unit nor in ``ignored``."""
    if precision.param_dtype is None:
        return ()
    found: dict[nn.Module, NeedsFullPrecision] = {}
    for path, place, module in _edges(root, ignored):
        if needs_full_precision(module, precision):
            found.setdefault(module, NeedsFullPrecision(path, module, [])).places.append(place)
    return tuple(found.values())


def _edges(
    root: nn.Module, ignored: Collection[nn.Module]
) -> Iterator[tuple[str, Attribute, nn.Module]]:
    stack = [("", root)]
    seen = {root}
    while stack:
        prefix, parent = stack.pop()
        for name, child in parent._modules.items():
            if child is None or child in ignored or is_unit(child):
                continue
            yield f"{prefix}{name}", Attribute(parent, name), child
            if child not in seen:
                seen.add(child)
                stack.append((f"{prefix}{name}.", child))


def warn_of_full_precision(modules: Mapping[str, nn.Module], precision: Any) -> None:
    """Warn that these modules, by path, will compute in full precision."""
    named = ", ".join(f"{path!r} ({type(module).__name__})" for path, module in modules.items())
    warnings.warn(
        f"{named} would compute in {precision.param_dtype}, but keeps running "
        "statistics in another dtype: wrapped as a separate FSDP instance with mixed precision "
        f"disabled. To compute in {precision.param_dtype}, pass buffer_dtype="
        f"{precision.param_dtype} in MixedPrecision",
        UserWarning,
        stacklevel=4,
    )
