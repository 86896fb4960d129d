"""The parameters that an optimizer holds, in terms of the unwrapped model's parameters.

An optimizer over a sharded model holds flat parameters, this rank's pieces of original parameters,
or parameters that no unit manages. The rest of this folder works with what is found here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...engine.params.handle import FlatParamHandle
from ...engine.params.layout import Piece, Slot
from ...engine.params.locations import WRAPPED_MODULE, clean_tensor_name
from ...engine.params.tensor_parallel import Distribution
from ..model.unit_state import FLAT_NAME, UnitState


@dataclasses.dataclass(frozen=True, eq=False)
class OriginalParam:
    """A parameter of the unwrapped model; a shared one has several names.

    ``names[0]`` is the one in ``named_parameters()``. ``index`` counts the parameters of the group
    that a unit flattened together.
    """

    names: tuple[str, ...]
    index: int = 0

    @property
    def name(self) -> str:
        return self.names[0]

    def find(self, values: Mapping[str, Any]) -> Any:
        """Return the value under the first of the names that ``values`` has, or None."""
        return next((values[name] for name in self.names if name in values), None)


@dataclasses.dataclass(frozen=True, eq=False)
class OptimParam:
    """A parameter that an optimizer may hold, and the original parameters that it consists of.

    ``path`` is its fully qualified name without the wrappers' prefixes; a flat parameter's ends in
    ``_flat_param``. ``position`` is its index among all parameters that an optimizer could hold.
    ``unit_state`` and ``handle`` are None for a parameter that no unit manages.
    """

    parameter: nn.Parameter
    path: str
    originals: tuple[OriginalParam, ...]
    position: int
    unit_state: UnitState | None = None
    handle: FlatParamHandle | None = None

    @property
    def is_sharded(self) -> bool:
        """True if every rank holds a different part of the parameter."""
        return self.handle is not None and self.handle.is_sharded

    @property
    def is_flat(self) -> bool:
        """True for a flat parameter, which consists of all of its originals."""
        return self.handle is not None and not self.handle.use_orig_params

    @property
    def names(self) -> tuple[str, ...]:
        """The names in the unwrapped model; a flat parameter has none."""
        return () if self.is_flat else self.originals[0].names

    def slot(self, original: OriginalParam) -> Slot:
        assert self.handle is not None
        return self.handle.layout.slots[original.index]

    def piece(self, original: OriginalParam) -> Piece:
        assert self.handle is not None
        return self.handle.pieces[original.index]

    def full_shape(self, original: OriginalParam) -> tuple[int, ...]:
        """The shape of the original parameter, unsharded."""
        if self.handle is None:
            return tuple(self.parameter.shape)
        return tuple(self.handle.whole_shape(original.index))

    def distribution(self, original: OriginalParam) -> Distribution | None:
        """The distribution of a tensor-parallel parameter; None for any other."""
        return None if self.handle is None else self.handle.distribution(original.index)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of a per-element state tensor on this rank."""
        handle = self.handle
        if handle is None:
            return tuple(self.parameter.shape)
        if not handle.use_orig_params:
            return (handle.layout.shard_numel,)
        (original,) = self.originals
        return (self.piece(original).numel,) if handle.is_sharded else self.slot(original).shape

    @property
    def is_in_shard(self) -> bool:
        """True if this rank's shard holds a part of the parameter.

        A rank without a part gets no gradient for the parameter, so its optimizer never updates
        the parameter's state. A parameter without elements counts as held by all ranks.
        """
        if self.handle is None or self.is_flat or not self.handle.is_sharded:
            return True
        (original,) = self.originals
        return self.piece(original).in_shard or self.slot(original).numel == 0


#: An optimizer's parameter groups.
Groups = list[list[OptimParam]]


def unit_states(model: nn.Module) -> Iterator[tuple[str, UnitState]]:
    """Each unit in ``model``, with the prefix that its parameters have in the unwrapped model."""
    for path, module in model.named_modules():
        state = module.__dict__.get("_unit_state")
        if state is not None:
            yield clean_tensor_name(f"{path}.") if path else "", state


def optim_groups(model: nn.Module, parameter_groups: Sequence[Sequence[nn.Parameter]]) -> Groups:
    """The optimizer's parameter groups, in terms of the unwrapped model's parameters."""
    known = _all_params(model)
    for position, group in enumerate(parameter_groups):
        unknown = [p for p in group if p not in known]
        if unknown:
            shapes = [tuple(p.shape) for p in unknown[:3]]
            raise ValueError(
                f"Parameter group {position} of the optimizer has {len(unknown)} parameters "
                f"(shapes {shapes}) that are not parameters of this {type(model).__name__}. Pass "
                "the model whose parameters the optimizer was constructed with. Without "
                "use_orig_params=True, construct the optimizer after wrapping the model"
            )
    return [[known[parameter] for parameter in group] for group in parameter_groups]


def parameter_groups_of(
    model: nn.Module, optim: torch.optim.Optimizer | None, optim_input: Any = None
) -> list[list[nn.Parameter]]:
    """The parameters that ``optim`` holds, or that an optimizer of ``optim_input`` would hold."""
    if optim is not None:
        return [list(group["params"]) for group in optim.param_groups]
    if optim_input is None:
        return [list(model.parameters())]
    given = list(optim_input)
    if given and isinstance(given[0], dict):
        return [_parameters(group["params"]) for group in given]
    return [_parameters(given)]


def _parameters(given: Any) -> list[nn.Parameter]:
    items: Iterable[Any] = [given] if isinstance(given, torch.Tensor) else given
    return [item[1] if isinstance(item, tuple) else item for item in items]


def in_model_order(groups: Groups) -> list[OptimParam]:
    """The optimizer's parameters in the model's order, in which ranks communicate.

    Each rank's optimizer may list its parameters and its groups in another order.
    """
    return sorted((param for group in groups for param in group), key=lambda p: p.position)


def by_unit(groups: Groups) -> dict[UnitState, list[OptimParam]]:
    """The optimizer's parameters of each unit, in the order in which ranks communicate."""
    found: dict[UnitState, list[OptimParam]] = {}
    for param in in_model_order(groups):
        if param.unit_state is not None:
            found.setdefault(param.unit_state, []).append(param)
    return found


# -- finding all parameters of a model ------------------------------------------------------------


def _all_params(model: nn.Module) -> dict[nn.Parameter, OptimParam]:
    """Everything in ``model`` that an optimizer could hold, units' parameters first."""
    known: dict[nn.Parameter, OptimParam] = {}
    managed: set[tuple[nn.Module, str]] = set()
    for prefix, state in unit_states(model):
        state.refuse_inside_pass("The optimizer state dict")
        unit = state.unit
        if not (unit.summoned or unit.shows_full):
            unit.write_back()
        for position, handle in enumerate(unit.handles):
            managed.update((place.module, place.name) for p in handle.places for place in p)
            originals = [
                OriginalParam(tuple(prefix + place.path for place in places), index)
                for index, places in enumerate(handle.places)
            ]
            if handle.use_orig_params:
                for parameter, original in zip(handle.params, originals, strict=True):
                    known[parameter] = OptimParam(
                        parameter, original.name, (original,), len(known), state, handle
                    )
            else:
                path = prefix + (f"{FLAT_NAME}_{position}" if position else FLAT_NAME)
                flat = handle.flat_param
                known[flat] = OptimParam(flat, path, tuple(originals), len(known), state, handle)
    for parameter, names in _unmanaged(model, known, managed).items():
        original = OriginalParam(tuple(names))
        known[parameter] = OptimParam(parameter, names[0], (original,), len(known))
    _check_unique_names(model, known, managed)
    return known


def _unmanaged(
    model: nn.Module,
    known: Mapping[nn.Parameter, OptimParam],
    managed: set[tuple[nn.Module, str]],
) -> dict[nn.Parameter, list[str]]:
    """The names of each parameter that no unit manages."""
    found: dict[nn.Parameter, list[str]] = {}
    for path, module in model.named_modules():
        prefix = clean_tensor_name(f"{path}.") if path else ""
        for name, parameter in module._parameters.items():
            if parameter is None or parameter in known or (module, name) in managed:
                continue
            found.setdefault(parameter, []).append(prefix + name)
    return found


def _check_unique_names(
    model: nn.Module,
    known: Mapping[nn.Parameter, OptimParam],
    managed: set[tuple[nn.Module, str]],
) -> None:
    """Refuse two parameters whose names differ only in the prefixes of wrappers."""
    holders: dict[str, OriginalParam] = {}
    for original in (original for param in known.values() for original in param.originals):
        for name in original.names:
            if holders.setdefault(name, original) is original:
                continue
            places = {(m, n) for m in model.modules() for n in m._parameters} | managed
            paths = {module: path for path, module in model.named_modules()}
            full = (f"{paths[m]}.{n}".lstrip(".") for m, n in places if m in paths)
            same = sorted(
                path.replace(f"{WRAPPED_MODULE}.", "")
                for path in full
                if clean_tensor_name(path) == name
            )
            raise ValueError(
                f"{' and '.join(same)} are both {name!r} in the state dict of an optimizer, whose "
                "keys are parameter names without the prefixes of wrappers. Rename one of the "
                "modules"
            )
