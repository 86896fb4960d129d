"""Norms with running statistics in another precision than a unit computes in.

Batch norms whose weights are lowered and whose running statistics are not raise errors that name
neither. With an ``auto_wrap_policy`` they become units of their own in full precision; without
one, that happens to those that could not run otherwise.
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
    """A module that needs full precision, and where it is registered."""

    path: str
    module: nn.Module
    places: list[Attribute]

    def replace_by(self, unit: nn.Module) -> None:
        """Put ``unit`` in the module's places."""
        for place in self.places:
            place.parent._modules[place.name] = unit


def needs_full_precision(module: nn.Module, precision: Any) -> bool:
    """Whether ``module`` keeps running statistics in another dtype than it would compute in."""
    classes = tuple(precision._module_classes_to_ignore or ())
    if precision.param_dtype is None or not isinstance(module, classes):
        return False
    buffers = [b for b in module._buffers.values() if b is not None and b.is_floating_point()]
    return any((precision.buffer_dtype or b.dtype) != precision.param_dtype for b in buffers)


def find_norms_needing_full_precision(
    root: nn.Module, precision: Any, ignored: Collection[nn.Module]
) -> tuple[NeedsFullPrecision, ...]:
    """Those below ``root`` that neither a nested unit nor ``ignored`` holds."""
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
    """Tell the user that these modules, by their paths, will not compute in low precision."""
    named = ", ".join(f"{path!r} ({type(module).__name__})" for path, module in modules.items())
    warnings.warn(
        f"{named} would compute in {precision.param_dtype}, but keeps running "
        "statistics in another dtype: wrapped as a separate FSDP instance with mixed precision "
        "disabled. Set buffer_dtype to the same dtype to have everything in low precision",
        UserWarning,
        stacklevel=4,
    )
