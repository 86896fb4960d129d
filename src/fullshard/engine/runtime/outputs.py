"""Tensors by which autograd may enter a unit: finding them when its forward ends, and hooking them.

They are the forward's outputs, and outputs in all but name: tensors that modules keep as
attributes, such as auxiliary losses, put into containers among their inputs, or show to the user's
hooks.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Collection, Container, Sequence
from typing import Any

import torch
from torch import nn

from ..params.locations import own_modules
from .autograd import PARAMETER_NODE, is_handed_out
from .pytrees import PLAIN_TYPES, tensors_in
from .unit import Unit
from .untraced import untraced

#: What a module is called with, by position and by name.
Inputs = tuple[tuple[Any, ...], dict[str, Any]]

#: What ``nn.Module`` keeps for itself.
_INTERNAL = frozenset(vars(nn.Module()))
_WITHOUT_TENSORS = {types.NoneType, bool, int, float, str}


class SideOutputs:
    """The attributes of a unit's modules, other than outputs, by which autograd may enter the unit.

    Which attributes to check is decided at the unit's first forward, and again when modules get
    further attributes: those that contain tensors, and those that look like placeholders for a
    later value. Modules in nested units (``of_units`` are the units' own modules) belong to these.
    """

    def __init__(self, unit: Unit, of_units: Container[nn.Module]) -> None:
        self._unit = unit
        own = own_modules(unit.module, of_units.__contains__)
        self._attributes = [names for m in own for names in (vars(m), m._buffers)]
        self._modules = own
        self._hooks = [m._forward_hooks for m in own] + [m._forward_pre_hooks for m in own]
        self._hook_count = 0
        #: What modules with hooks were called with and returned, and what nested units put aside,
        #: while the unit's forward runs.
        self.shown: list[Any] | None = None
        self._count = -1
        self._places: list[tuple[dict[str, Any], str]] = []

    def watch(self) -> None:
        """Begin to note the arguments of the user's hooks on the unit's modules."""
        self.shown = []
        count = sum(map(len, self._hooks))
        if count != self._hook_count:
            for module in self._modules:
                hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
                watch = next((hook for hook in hooks if isinstance(hook, _Watch)), None)
                if watch is not None:
                    watch.watcher = weakref.ref(self)
                elif any(map(_is_users, hooks)):
                    module.register_forward_hook(_Watch(self), with_kwargs=True)
            self._hook_count = sum(map(len, self._hooks))

    def stop_watching(self) -> None:
        """Forget the noted arguments, since the unit's forward raised."""
        self.shown = None

    def note(self, shown: Any) -> None:
        """Note tensors in ``shown``, which code outside may keep, while the forward runs."""
        if self.shown is not None:
            self.shown.append(shown)

    def made_since(self, birth: int, inputs: Inputs | None) -> list[torch.Tensor]:
        """The tensors that lead into the unit by nodes not older than ``birth``, in autograd's
        count.

        They include tensors that the unit put into containers among its ``inputs``.
        """
        shown, self.shown = self.shown, None
        if sum(map(len, self._attributes)) != self._count:
            self._find_attributes()
        kept: list[Any] = []
        for attributes, name in self._places:
            value = attributes.get(name)
            if type(value) not in _WITHOUT_TENSORS:
                kept.append(_visible(name, value))
        if inputs is not None:
            args, kwargs = inputs
            if not (
                PLAIN_TYPES.issuperset(map(type, args))
                and PLAIN_TYPES.issuperset(map(type, kwargs.values()))
            ):
                kept.append(inputs)
        if shown:
            kept.append(shown)
        return [t for t in tensors_in(kept) if self._is_since(birth, t)] if kept else kept

    def _is_since(self, birth: int, tensor: torch.Tensor) -> bool:
        node = tensor.grad_fn
        return node is not None and node._sequence_nr() >= birth and self._unit.made(tensor)

    def _find_attributes(self) -> None:
        """Decide which attributes to look at after a forward."""
        self._count = sum(map(len, self._attributes))
        self._places = [
            (attributes, name)
            for attributes in self._attributes
            for name, value in attributes.items()
            if name not in _INTERNAL and self._is_of_interest(_visible(name, value))
        ]

    def _is_of_interest(self, value: Any) -> bool:
        """True if ``value`` contains such a tensor, or is a placeholder for one."""
        if isinstance(value, (int, float)):
            return value == 0 and value is not False
        if value is None:
            return True
        if isinstance(value, (list, dict)) and _are_to_come(_inside(value)):
            return True
        if isinstance(value, torch.Tensor) and value.grad_fn is None:
            # Larger ones are a module's constants, or parameters.
            return value.numel() == 1
        return any(map(self._unit.made, tensors_in(value)))


def _inside(container: list[Any] | tuple[Any, ...] | dict[Any, Any]) -> Collection[Any]:
    return container.values() if isinstance(container, dict) else container


def _are_to_come(items: Collection[Any]) -> bool:
    """True if all items, if any, look like placeholders for a later value."""
    return all(item is None or (type(item) in (int, float) and item == 0) for item in items)


def _visible(name: str, value: Any) -> Any:
    """The part of an attribute's value to search: of a private attribute, tensors and containers.

    Other objects may refer to the whole model, and searching them would take too long.
    """
    if not name.startswith("_") or value is None:
        return value
    if isinstance(value, (list, tuple, dict)):
        tensors = [item for item in _inside(value) if isinstance(item, torch.Tensor)]
        return tensors if tensors or _are_to_come(_inside(value)) else False
    return value if isinstance(value, (torch.Tensor, int, float)) else False


class _Watch:
    """A forward hook that notes a module's arguments and its output.

    Copies and pickles of it, made together with a module, note nothing.
    """

    def __init__(self, side_outputs: SideOutputs | None = None) -> None:
        self.watcher: Callable[[], SideOutputs | None] = (
            _nobody if side_outputs is None else weakref.ref(side_outputs)
        )

    def __reduce__(self) -> Any:
        return _Watch, ()

    @untraced
    def __call__(self, module: nn.Module, *shown: Any) -> None:
        side_outputs = self.watcher()
        if side_outputs is not None:
            side_outputs.note(shown)


def _nobody() -> None:
    return None


def _is_users(hook: Any) -> bool:
    """True if a hook may keep its arguments: torch's own hooks and ours do not."""
    module = getattr(hook, "__module__", None) or ""
    return not module.startswith(("torch.", "fullshard."))


# -- the forward's own outputs --------------------------------------------------------------------


def entries(
    outputs: Sequence[torch.Tensor], inputs: Inputs | None, birth: int
) -> list[torch.Tensor]:
    """Return the outputs through which autograd enters the operations of this forward.

    It does not enter by leaves and parameters, nor by inputs that the forward returned unchanged,
    whose nodes are older than the forward (``birth``). Unsharding the unit for those would be in
    vain.
    """
    found: list[torch.Tensor] = []
    given: set[int] | None = None
    for tensor in outputs:
        node = tensor.grad_fn
        if node is None or type(node) is PARAMETER_NODE:
            continue
        if inputs is not None and node._sequence_nr() < birth:
            if given is None:
                given = set(map(id, tensors_in(inputs)))
            if id(tensor) in given:
                continue
        found.append(tensor)
    return found


def hook_entries(
    tensors: Sequence[torch.Tensor], hook: Callable[[Any], None], birth: int, is_outermost: bool
) -> None:
    """Call ``hook`` when a gradient reaches one of ``tensors``.

    A following unit may have hooked the same tensor as its input, and has to be closed before this
    one is unsharded: hooks on a tensor's node run after hooks on the tensor. Only the outermost
    unit hooks tensors: its hook starts the backward, before any hook of the user.

    A view that is changed in place gets a new node, and its gradients pass through the base's node.
    """
    nodes: dict[Any, None] = {}
    for tensor in tensors:
        if is_outermost:
            tensor.register_hook(hook)
        else:
            nodes[tensor.grad_fn] = None
        base = tensor._base
        if base is not None and _leads_into(base, birth):
            nodes[base.grad_fn] = None
    for node in nodes:
        node.register_prehook(hook)


def hook_handed_on(outputs: Sequence[torch.Tensor]) -> None:
    """Put a hook on those outputs of a model that have none, and by which no gradient comes in.

    Torch's wrapper hooks every output that requires gradients, inputs that were handed on among
    them, and programs look for it there (``_backward_hooks``). One is enough for a tensor that is
    handed on at every step.
    """
    for tensor in outputs:
        if tensor._backward_hooks or not tensor.requires_grad or not torch.is_grad_enabled():
            continue
        if not (isinstance(tensor, torch.nn.Parameter) or is_handed_out(tensor)):
            tensor.register_hook(_let_past)


def _let_past(gradient: torch.Tensor) -> None:
    """Do nothing: the gradient does not enter the unit."""


def _leads_into(tensor: torch.Tensor, birth: int) -> bool:
    """True if gradients of ``tensor`` enter the forward that began at ``birth``."""
    node = tensor.grad_fn
    return not (node is None or type(node) is PARAMETER_NODE or node._sequence_nr() < birth)
