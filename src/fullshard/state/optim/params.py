"""Which parameters of the unwrapped model stand behind each parameter that an optimizer holds.

An optimizer over a sharded model holds flat parameters, pieces of original ones, or parameters
that no unit manages. Everything else about optimizer state is said in terms of what is found here.
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
from ..model.state_hooks import FLAT_NAME, ModelState


@dataclasses.dataclass(frozen=True, eq=False)
class Original:
    """A parameter of the unwrapped model; ``names[0]`` is what ``named_parameters`` calls it."""

    names: tuple[str, ...]
    index: int = 0

    @property
    def name(self) -> str:
        return self.names[0]

    def find(self, values: Mapping[str, Any]) -> Any:
        """What is known under one of the names, or None."""
        return next((values[name] for name in self.names if name in values), None)


@dataclasses.dataclass(frozen=True, eq=False)
class Owned:
    """A parameter that an optimizer may hold, and the originals it is made of.

    ``path`` is its name in the wrapped model, ``position`` its place among all that an optimizer
    could hold. ``unit`` and ``handle`` are None for a parameter that no unit manages.
    """

    parameter: nn.Parameter
    path: str
    originals: tuple[Original, ...]
    position: int
    unit: ModelState | None = None
    handle: FlatParamHandle | None = None

    @property
    def is_spread(self) -> bool:
        """Whether other ranks may hold other parts of it."""
        return self.handle is not None and self.handle.is_sharded

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that it alone has in the unwrapped model; a flat one has none."""
        return () if self.is_flat else self.originals[0].names

    @property
    def is_flat(self) -> bool:
        return self.handle is not None and not self.handle.use_orig_params

    def slot(self, original: Original) -> Slot:
        assert self.handle is not None
        return self.handle.layout.slots[original.index]

    def piece(self, original: Original) -> Piece:
        assert self.handle is not None
        return self.handle.pieces[original.index]

    def shape_of(self, original: Original) -> tuple[int, ...]:
        """The shape of the whole original."""
        if self.handle is None:
            return tuple(self.parameter.shape)
        return tuple(self.handle.whole_shape(original.index))

    def distribution(self, original: Original) -> Distribution | None:
        """How tensor parallelism distributed the original, if it did."""
        return None if self.handle is None else self.handle.distribution(original.index)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of state that has one value for each element of what this rank holds."""
        handle = self.handle
        if handle is None:
            return tuple(self.parameter.shape)
        if not handle.use_orig_params:
            return (handle.layout.shard_numel,)
        (original,) = self.originals
        return (self.piece(original).numel,) if handle.is_sharded else self.slot(original).shape

    @property
    def is_here(self) -> bool:
        """Whether this rank's optimizer has state for it, once it was stepped.

        A rank without a piece of a parameter gets no gradient for it. All ranks count as holding
        one without elements.
        """
        if self.handle is None or self.is_flat or not self.handle.is_sharded:
            return True
        (original,) = self.originals
        return self.piece(original).in_shard or self.slot(original).numel == 0


Groups = list[list[Owned]]


def wrappers_in(model: nn.Module) -> Iterator[tuple[str, ModelState]]:
    """Each unit's state with the prefix that its parameters have in the unwrapped model."""
    for path, module in model.named_modules():
        state = module.__dict__.get("_model_state")
        if state is not None:
            yield clean_tensor_name(f"{path}.") if path else "", state


def known_parameters(model: nn.Module) -> dict[nn.Parameter, Owned]:
    """Everything in ``model`` that an optimizer could hold, units first."""
    known: dict[nn.Parameter, Owned] = {}
    managed: set[tuple[nn.Module, str]] = set()
    for prefix, state in wrappers_in(model):
        state.refuse_inside_pass("The optimizer's state dict")
        unit = state.unit
        if not (unit.summoned or unit.shows_full):
            unit.write_back()
        for position, handle in enumerate(unit.handles):
            managed.update((place.module, place.name) for p in handle.places for place in p)
            originals = [
                Original(tuple(prefix + place.path for place in places), index)
                for index, places in enumerate(handle.places)
            ]
            if handle.use_orig_params:
                for parameter, original in zip(handle.params, originals, strict=True):
                    known[parameter] = Owned(
                        parameter, original.name, (original,), len(known), state, handle
                    )
            else:
                path = prefix + (f"{FLAT_NAME}_{position}" if position else FLAT_NAME)
                flat = handle.flat_param
                known[flat] = Owned(flat, path, tuple(originals), len(known), state, handle)
    for parameter, names in _unmanaged(model, known, managed).items():
        known[parameter] = Owned(parameter, names[0], (Original(tuple(names)),), len(known))
    _refuse_same_names(model, known, managed)
    return known


def _refuse_same_names(
    model: nn.Module,
    known: Mapping[nn.Parameter, Owned],
    managed: set[tuple[nn.Module, str]],
) -> None:
    """Refuse parameters that differ in nothing but the prefixes of wrappers: state goes by name."""
    called: dict[str, Original] = {}
    for original in (original for owned in known.values() for original in owned.originals):
        for name in original.names:
            if called.setdefault(name, original) is original:
                continue
            places = {(m, n) for m in model.modules() for n in m._parameters} | managed
            paths = {module: path for path, module in model.named_modules()}
            full = (f"{paths[m]}.{n}".lstrip(".") for m, n in places if m in paths)
            alike = sorted(
                path.replace(f"{WRAPPED_MODULE}.", "")
                for path in full
                if clean_tensor_name(path) == name
            )
            raise ValueError(
                f"{' and '.join(alike)} are both {name!r} in the state of an optimizer, which is "
                "by names without the prefixes of wrappers: call the module of one of them "
                "otherwise"
            )


def _unmanaged(
    model: nn.Module,
    known: Mapping[nn.Parameter, Owned],
    managed: set[tuple[nn.Module, str]],
) -> dict[nn.Parameter, list[str]]:
    found: dict[nn.Parameter, list[str]] = {}
    for path, module in model.named_modules():
        prefix = clean_tensor_name(f"{path}.") if path else ""
        for name, parameter in module._parameters.items():
            if parameter is None or parameter in known or (module, name) in managed:
                continue
            found.setdefault(parameter, []).append(prefix + name)
    return found


def owned_groups(model: nn.Module, parameter_groups: Sequence[Sequence[nn.Parameter]]) -> Groups:
    """The optimizer's parameter groups, in terms of the unwrapped model."""
    known = known_parameters(model)
    for position, group in enumerate(parameter_groups):
        strangers = [p for p in group if p not in known]
        if strangers:
            shapes = [tuple(p.shape) for p in strangers[:3]]
            raise ValueError(
                f"Parameter group {position} of the optimizer has {len(strangers)} parameters "
                f"(shapes {shapes}) that {type(model).__name__} has not. Give the model whose "
                "parameters the optimizer was made of; unless use_orig_params is set, make the "
                "optimizer after wrapping"
            )
    return [[known[parameter] for parameter in group] for group in parameter_groups]


def parameter_groups_of(
    model: nn.Module, optim: torch.optim.Optimizer | None, optim_input: Any = None
) -> list[list[nn.Parameter]]:
    """What an optimizer holds, or would hold if it were made from ``optim_input``."""
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


def in_model_order(groups: Groups) -> list[Owned]:
    """The optimizer's parameters in the order in which ranks communicate.

    It is the model's: each rank's optimizer may list the parameters, and the groups, in its own.
    """
    found = [owned for group in groups for owned in group]
    return sorted(found, key=lambda owned: owned.position)


def units_of(groups: Groups) -> dict[ModelState, list[Owned]]:
    """The optimizer's parameters unit by unit, in the order in which ranks communicate."""
    found: dict[ModelState, list[Owned]] = {}
    for owned in in_model_order(groups):
        if owned.unit is not None:
            found.setdefault(owned.unit, []).append(owned)
    return found
