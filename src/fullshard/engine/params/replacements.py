"""Refusing replacements of parameters that a unit cannot take over.

Without ``use_orig_params`` a module shows views, which a unit replaces by others as it gathers and
frees. What somebody else put there, to tie two weights for example, would go without a trace.
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
    """Refuse (RuntimeError) that a place does not show its view of the shard, ``views[index]``."""
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
    """Refuse that ``module``'s wrapper gets a tensor under the name of one that it manages.

    The tensor would be the wrapper's own, which nobody computes with.
    """
    for place in (place for found in places for place in found):
        if place.module is module and place.name == name:
            raise _refusal(place, "replaced")


def note_shown(parameter: torch.Tensor, place: ParameterLocation) -> None:
    """Remember that a unit shows ``parameter`` in full at ``place``."""
    setattr(parameter, _SHOWN_AT, place.path)


def refuse_tie(place: ParameterLocation, shown: torch.Tensor, found: torch.Tensor) -> None:
    """Refuse (RuntimeError) that what stands for ``shown`` is shown somewhere else as well."""
    if found is not shown and hasattr(found, _SHOWN_AT):
        raise _refusal(place, f"tied to {getattr(found, _SHOWN_AT)!r}")


def _is_copy(found: object, view: torch.Tensor, views: Sequence[torch.Tensor]) -> bool:
    """True if ``found`` is the view again, as a copy of the model may come by: the same memory."""
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
        "parameter stands for it, which goes on to hold, show and train the old one: tie weights "
        "and replace parameters before wrapping. To change values only, write into what "
        "summon_full_params shows (parameter.copy_(values))"
    )


def parameter_at(place: ParameterLocation) -> nn.Parameter:
    """The parameter that stands at ``place``; refuses (RuntimeError) that there is none."""
    found = place.module._parameters.get(place.name)
    if found is None:
        raise RuntimeError(
            f"Parameter {place.path!r} was removed from its {type(place.module).__name__} after "
            "wrapping, which still manages it: remove parameters, or register what replaces them "
            "(pruning, parametrizations, adapters), before wrapping"
        )
    if not isinstance(found, nn.Parameter):
        raise RuntimeError(
            f"Parameter {place.path!r} is replaced by a plain tensor, as by functional_call. The "
            "unit would copy its values into the shard, where they would stay after the call: call "
            "functional_call on a module inside of the unit, in its forward, or replace the "
            "parameter by an nn.Parameter"
        )
    return found


def check_shape(what: str, where: Any, expected: torch.Tensor, given: torch.Tensor) -> None:
    """Refuse a replacement whose shape is not that of this rank's piece."""
    if expected.shape != given.shape:
        path = where.path if isinstance(where, ParameterLocation) else type(where).__name__
        raise RuntimeError(
            f"Cannot writeback when the {what} shape changes\n"
            f"Expects {expected.shape} but got {given.shape} for {path}: outside forward a rank "
            "may replace its own piece only; use summon_full_params to change whole parameters"
        )
