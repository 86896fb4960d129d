"""Refusing replacements of parameters that a unit cannot take over.

Without ``use_orig_params`` modules hold views, which the unit replaces whenever it unshards or
reshards. Anything else that was put there, for example to tie two weights, would be lost silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .locations import ParameterLocation

#: Set on a full parameter that ``summon_full_params`` shows: the path at which it does.
_SHOWN_AT = "_fullshard_shown_at"


def refuse_replaced_views(
    places: Sequence[Sequence[ParameterLocation]], views: Sequence[torch.Tensor]
) -> None:
    """Raise RuntimeError unless each location still holds its view of the shard."""
    for index, view in enumerate(views):
        for place in places[index]:
            found = place.module.__dict__.get(place.name)
            if found is view or _is_copy(found, view, views):
                continue
            others = (places[i][0].path for i, other in enumerate(views) if other is found)
            registered = place.module._parameters.get(place.name)
            tied_to = next(others, None)
            if tied_to is not None:
                what = f"tied to {tied_to!r}"
            elif found is None and registered is None:
                what = f"removed from its {type(place.module).__name__}"
            else:
                what = "replaced"
            raise _refusal(place, what)


def refuse_attribute_beside_flat_param(
    module: torch.nn.Module, name: str, places: Sequence[Sequence[ParameterLocation]]
) -> None:
    """Raise RuntimeError if ``name``, to be set on ``module``'s wrapper, is a managed parameter's.

    The tensor would become an attribute of the wrapper, which no computation reads.
    """
    for place in (place for found in places for place in found):
        if place.module is module and place.name == name:
            raise _refusal(place, "replaced")


def note_shown(parameter: torch.Tensor, place: ParameterLocation) -> None:
    """Remember that a unit shows ``parameter`` in full at ``place``."""
    setattr(parameter, _SHOWN_AT, place.path)


def refuse_tie(place: ParameterLocation, shown: torch.Tensor, found: torch.Tensor) -> None:
    """Raise RuntimeError if ``found``, in place of ``shown``, is shown at another location, too."""
    if found is not shown and hasattr(found, _SHOWN_AT):
        raise _refusal(place, f"tied to {getattr(found, _SHOWN_AT)!r}")


def _is_copy(found: object, view: torch.Tensor, views: Sequence[torch.Tensor]) -> bool:
    """True if ``found`` is another view of the same memory, as in a copy of the model."""
    return (
        isinstance(found, torch.Tensor)
        and found.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
        and found.storage_offset() == view.storage_offset()
        and found.shape == view.shape
        and not any(other is found for other in views)
    )


def _refusal(place: ParameterLocation, what: str) -> RuntimeError:
    return RuntimeError(
        f"Parameter {place.path!r} was {what} after wrapping. With use_orig_params=False a flat "
        "parameter contains it, and would continue to train the old one: tie weights and replace "
        "parameters before wrapping. To change values only, use parameter.copy_(values) inside "
        "summon_full_params"
    )


def parameter_at(place: ParameterLocation) -> nn.Parameter:
    """The parameter registered at ``place``; raises RuntimeError if there is none."""
    found = place.module._parameters.get(place.name)
    if found is None:
        raise RuntimeError(
            f"Parameter {place.path!r} was removed from its {type(place.module).__name__} after "
            "wrapping, which still manages it: remove parameters, or register what replaces them "
            "(pruning, parametrizations, adapters), before wrapping"
        )
    if not isinstance(found, nn.Parameter):
        raise RuntimeError(
            f"Parameter {place.path!r} was replaced by a plain tensor, as functional_call does. "
            "The unit would copy its values into the shard, where they would stay after the call. "
            "Use functional_call on a module inside the unit, in the unit's forward, or replace "
            "the parameter by an nn.Parameter"
        )
    return found


def check_shape(what: str, where: Any, expected: torch.Tensor, given: torch.Tensor) -> None:
    """Raise RuntimeError if a replacement does not have the shape of this rank's piece."""
    if expected.shape != given.shape:
        path = where.path if isinstance(where, ParameterLocation) else type(where).__name__
        raise RuntimeError(
            f"Cannot writeback when the {what} shape changes\n"
            f"Expects {expected.shape} but got {given.shape} for {path}: outside forward a rank "
            "may replace its own piece only; use summon_full_params to change whole parameters"
        )
