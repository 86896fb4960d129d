"""Where parameters hang in the module tree, and the containers in which they are swapped.

A parameter is swapped by assigning into ``module._parameters`` (or ``module.__dict__`` when only
the flat parameter is registered), never by ``setattr``: the step's path pays 0.04 µs for it
instead of 1.3 µs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn

IsUnit = Callable[[nn.Module], bool]

#: The name under which a wrapper holds the module it wraps.
WRAPPED_MODULE = "_fsdp_wrapped_module"
_PREFIXES = (f"{WRAPPED_MODULE}.", "_checkpoint_wrapped_module.", "_orig_mod.")


class ParameterLocation(NamedTuple):
    """One attribute through which a parameter is reached."""

    module: nn.Module
    name: str
    path: str

    @property
    def parent(self) -> str:
        """The path of the module; empty for the unit's own."""
        return self.path.rpartition(".")[0]

    def containers(self, registered: bool) -> Iterable[tuple[Any, Any]]:
        """(container, key) pairs to assign to when the parameter changes its form."""
        yield (self.module._parameters if registered else self.module.__dict__, self.name)
        if isinstance(self.module, nn.RNNBase) and self.name in self.module._flat_weights_names:
            yield _RecurrentWeights(self.module), self.module._flat_weights_names.index(self.name)


class _RecurrentWeights:
    """The list that a recurrent module computes with, beside its attributes.

    The module makes a new list now and then, so it is looked up at every assignment.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        # On a GPU it would move parameters into memory of its own, away from the full buffer.
        module.__dict__["flatten_parameters"] = _leave_in_place

    def __getitem__(self, index: int) -> Any:
        return self._module._flat_weights[index]

    def __setitem__(self, index: int, value: Any) -> None:
        self._module._flat_weights[index] = value
        # Without a reference to compare with, the module takes the list as it is.
        self._module._flat_weight_refs[index] = None


def _leave_in_place() -> None:
    pass


def own_modules(root: nn.Module, is_unit: IsUnit) -> Iterator[nn.Module]:
    """The modules below ``root``, those in nested units left out."""
    stack, seen = [root], {root}
    while stack:
        module = stack.pop()
        yield module
        for child in reversed(module._modules.values()):
            if child is not None and child not in seen and not is_unit(child):
                seen.add(child)
                stack.append(child)


def find_locations(
    root: nn.Module, parameters: Iterable[nn.Parameter]
) -> dict[Any, list[ParameterLocation]]:
    """Every place of each parameter below ``root``, in module order."""
    places: dict[Any, list[ParameterLocation]] = {parameter: [] for parameter in parameters}
    for prefix, module in root.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter in places:
                path = f"{prefix}.{name}" if prefix else name
                places[parameter].append(ParameterLocation(module, name, clean_tensor_name(path)))
    missing = [tuple(p.shape) for p, found in places.items() if not found]
    if missing:
        raise ValueError(
            f"Parameters of shapes {missing} are not part of {type(root).__name__}; a unit manages "
            "parameters of the module it wraps only"
        )
    return places


def clean_tensor_name(tensor_name: str) -> str:
    """The name as in the model that people wrote: without the prefixes that wrappers add."""
    if any(prefix in tensor_name for prefix in _PREFIXES):
        # Whole names of modules only: a name of the user's own may end in one of them.
        *path, name = tensor_name.split(".")
        kept = (part for part in path if f"{part}." not in _PREFIXES)
        tensor_name = ".".join([*kept, name])
    return tensor_name
