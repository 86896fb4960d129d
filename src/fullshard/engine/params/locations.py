"""The attributes through which modules reach parameters, and the containers to swap them in.

A parameter is swapped by assigning into ``module._parameters`` (or ``module.__dict__`` when only
the flat parameter is registered), never by ``setattr``: the step's path pays 0.04 µs for it
instead of 1.3 µs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import nn

IsUnit = Callable[[nn.Module], bool]

#: The name under which a wrapper holds the module it wraps.
WRAPPED_MODULE = "_fsdp_wrapped_module"
_PREFIXES = (f"{WRAPPED_MODULE}.", "_checkpoint_wrapped_module.", "_orig_mod.")
_ANY_PREFIX = re.compile("|".join(map(re.escape, _PREFIXES))).search


class ParameterLocation(NamedTuple):
    """One attribute through which a parameter is reached."""

    module: nn.Module
    name: str
    path: str

    @property
    def parent(self) -> str:
        """The path of the module; empty for the unit's own."""
        return self.path.rpartition(".")[0]


class _RecurrentWeights:
    """The list of weights with which a recurrent module computes, in addition to its attributes.

    The module replaces the list now and then, so every assignment looks it up.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        # On a GPU it would move parameters into memory of its own, away from the full buffer.
        module.__dict__["flatten_parameters"] = _leave_in_place

    def __getitem__(self, index: int) -> Any:
        return self._module._flat_weights[index]

    def __setitem__(self, index: int, value: Any) -> None:
        self._module._flat_weights[index] = value
        # Without this reference the module does not notice, and uses the list as it is.
        self._module._flat_weight_refs[index] = None


def _leave_in_place() -> None:
    pass


def containers_of(
    places: Sequence[Sequence[ParameterLocation]], registered: bool
) -> tuple[list[Any], list[Any], list[int]]:
    """Containers, keys and parameters' indices by which parameters are swapped.

    A container is ``module._parameters``, or ``module.__dict__`` when only the flat parameter is
    registered.
    """
    containers: list[Any] = []
    keys: list[Any] = []
    indices: list[int] = []
    for index, of_parameter in enumerate(places):
        for module, name, _ in of_parameter:
            containers.append(module._parameters if registered else module.__dict__)
            keys.append(name)
            indices.append(index)
            if isinstance(module, nn.RNNBase) and name in module._flat_weights_names:
                containers.append(_RecurrentWeights(module))
                keys.append(module._flat_weights_names.index(name))
                indices.append(index)
    return containers, keys, indices


def own_modules(root: nn.Module, is_unit: IsUnit) -> list[nn.Module]:
    """The modules below ``root``, those in nested units left out."""
    found: list[nn.Module] = []
    stack, seen = [root], {root}
    while stack:
        module = stack.pop()
        found.append(module)
        for child in reversed(module._modules.values()):
            if child is not None and child not in seen and not is_unit(child):
                seen.add(child)
                stack.append(child)
    return found


def find_locations(
    root: nn.Module, parameters: Iterable[nn.Parameter]
) -> dict[Any, list[ParameterLocation]]:
    """All locations of each parameter below ``root``, in module order."""
    places: dict[Any, list[ParameterLocation]] = {parameter: [] for parameter in parameters}
    for prefix, module in root.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter in places:
                path = f"{prefix}.{name}" if prefix else name
                places[parameter].append(ParameterLocation(module, name, clean_tensor_name(path)))
    if not all(places.values()):
        missing = [tuple(p.shape) for p, found in places.items() if not found]
        raise ValueError(
            f"Parameters of shapes {missing} are not part of {type(root).__name__}; a unit manages "
            "parameters of the module it wraps only"
        )
    return places


def clean_tensor_name(tensor_name: str) -> str:
    """The name in the user's own model, without the prefixes that wrappers add."""
    if _ANY_PREFIX(tensor_name):
        # Whole names of modules only: a name of the user's own may end in one of them.
        *path, name = tensor_name.split(".")
        kept = (part for part in path if f"{part}." not in _PREFIXES)
        tensor_name = ".".join([*kept, name])
    return tensor_name
