"""Which of a model's parameters are stepped as whole tensors; all others stay in shards."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Collection

import torch
from torch import nn

from ..engine.params.handle import FlatParamHandle
from ..engine.params.locations import clean_tensor_name
from ..engine.params.row_handle import RowHandle
from ..engine.params.tensor_parallel import local_part
from ..engine.runtime.unit import Unit
from ..state.model.units import units_in

#: Takes a parameter's name in the unwrapped model, and a tensor of its shape without memory; or
#: contains names.
Select = Callable[[str, torch.Tensor], bool] | Collection[str]

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
#: What models call the module that turns hidden states into scores.
_HEADS = frozenset(
    {"classifier", "embed_out", "head", "lm_head", "output", "output_layer", "score", "unembed"}
)


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """A trainable parameter of a unit: where it lies, and its name in the unwrapped model."""

    name: str
    parameter: nn.Parameter
    unit: Unit
    handle: FlatParamHandle
    index: int

    @property
    def shape(self) -> torch.Size:
        """The whole parameter's shape."""
        return self.handle.whole_shape(self.index)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of the parameter's elements on each rank."""
        layout, ranks = self.handle.layout, range(self.unit.shards.size)
        if not self.handle.is_sharded:
            return tuple(math.prod(self.shape) for _ in ranks)
        return tuple(layout.pieces(rank)[self.index].numel for rank in ranks)

    def meta(self) -> torch.Tensor:
        """A tensor of the whole parameter's shape and dtype, without memory."""
        return torch.empty(self.shape, dtype=self.handle.dtypes.shard, device="meta")


def divide(
    model: nn.Module, select: Select | None
) -> tuple[list[Found], list[tuple[str, nn.Parameter]]]:
    """The parameters to step as whole tensors, and all other trainable ones, in model order.

    By default the former are :func:`hidden_matrices`.
    """
    found = _managed(model)
    if select is None:
        default = hidden_matrices(model, found)
        chosen = [each for each in found if each in default]
    elif callable(select):
        chosen = [each for each in found if select(each.name, each.meta())]
    else:
        wanted = {select} if isinstance(select, str) else set(select)
        chosen = [each for each in found if each.name in wanted]
        _check_known(model, wanted - {each.name for each in chosen})
    if not chosen:
        raise ValueError(
            f"None of the {len(found)} trainable parameters in the units of "
            f"{type(model).__name__} was chosen to be stepped as a whole tensor. By default these "
            "are matrices, except those of embeddings and of the head; choose others with "
            "select=lambda name, parameter: ..."
        )
    for each in chosen:
        _check(each)
    taken = {each.parameter for each in chosen}
    names = _names(model)
    others = [(each.name, each.parameter) for each in found if each.parameter not in taken]
    taken.update(parameter for _, parameter in others)
    others += [
        (names[parameter], parameter)
        for parameter in model.parameters()
        if parameter.requires_grad and parameter not in taken
    ]
    return chosen, others


def _check_known(model: nn.Module, unknown: set[str]) -> None:
    if unknown:
        raise ValueError(
            f"select= has names of no trainable parameters in the units of {type(model).__name__}: "
            f"{sorted(unknown)}. Pass names of the unwrapped model's named_parameters()"
        )


def hidden_matrices(model: nn.Module, found: list[Found]) -> set[Found]:
    """Matrices inside units, except those of embeddings and of the head.

    The own parameters of an outermost unit with others inside count as first and last layers.
    """
    around = _around_others(model)
    edges = embeddings_and_heads(model)
    return {
        each
        for each in found
        if len(each.shape) == 2
        and each.unit not in around
        and not any(place.module in edges for place in each.handle.places[each.index])
    }


def _around_others(model: nn.Module) -> set[Unit]:
    """The units that are inside no other one, and have others inside."""
    units = units_in(model)
    inside = {unit: {*unit.module.modules()} - {unit.module} for unit in units}
    within = {other for unit in units for other in units if other.module in inside[unit]}
    return {
        unit
        for unit in units
        if unit not in within and any(other.module in inside[unit] for other in units)
    }


def embeddings_and_heads(model: nn.Module) -> set[nn.Module]:
    """The modules that turn tokens into vectors, and vectors into scores.

    A head is what ``get_output_embeddings`` returns, or goes by a usual name outside all layers.
    """
    output = None
    with contextlib.suppress(AttributeError, NotImplementedError):
        output = getattr(model, "get_output_embeddings", lambda: None)()
    found: set[nn.Module] = {output} if isinstance(output, nn.Module) else set()
    for path, module in model.named_modules():
        *parents, name = clean_tensor_name(f"{path}.").rstrip(".").split(".")
        is_head = name in _HEADS and not any(map(str.isdigit, parents))
        if is_head or isinstance(module, _EMBEDDINGS):
            found.add(module)
    return found


def _managed(model: nn.Module) -> list[Found]:
    """The trainable parameters of all units, in the order in which the model registers them."""
    units = units_in(model)
    if not units:
        raise ValueError(
            f"{type(model).__name__} is not sharded: wrap it in FullyShardedDataParallel, or apply "
            "fully_shard to it, before making its optimizer. An optimizer of a model that is not "
            "sharded needs no help to see whole tensors"
        )
    order: dict[nn.Module, tuple[int, str]] = {}
    for path, module in model.named_modules():
        order.setdefault(module, (len(order), f"{path}." if path else ""))
    found: list[tuple[tuple[int, int], Found]] = []
    for unit in units:
        for handle in unit.handles:
            if not handle.use_orig_params:
                raise ValueError(
                    f"Unit {unit.name!r} was wrapped with use_orig_params=False, so its optimizer "
                    "sees one flat parameter in place of the model's, which has no matrices. Wrap "
                    "the model with use_orig_params=True"
                )
            for index, parameter in enumerate(handle.params):
                if not parameter.requires_grad:
                    continue
                place = handle.places[index][0]
                position, prefix = order[place.module]
                name = clean_tensor_name(prefix + place.name)
                within = list(place.module._parameters).index(place.name)
                each = Found(name, parameter, unit, handle, index)
                found.append(((position, within), each))
    return [each for _, each in sorted(found, key=lambda pair: pair[0])]


def _names(model: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: clean_tensor_name(name) for name, parameter in model.named_parameters()}


def _check(found: Found) -> None:
    """Raise ValueError for a parameter that cannot be stepped as a whole tensor."""
    reason = None
    if found.handle.distribution(found.index) is not None:
        reason = (
            "is tensor-parallel: its parts are on the ranks of another process group, which do not "
            "exchange them"
        )
    elif not found.handle.dtypes.shard.is_floating_point:
        reason = f"has dtype {found.handle.dtypes.shard}, but a floating-point dtype is needed"
    elif not math.prod(found.shape):
        reason = f"has no elements (shape {tuple(found.shape)})"
    elif isinstance(found.handle, RowHandle) and type(local_part(found.parameter)) not in (
        torch.Tensor,
        nn.Parameter,
    ):
        reason = f"is a tensor subclass ({type(local_part(found.parameter)).__name__})"
    if reason is not None:
        raise ValueError(
            f"Parameter {found.name} {reason}; pass select= to leave it to the second optimizer"
        )
