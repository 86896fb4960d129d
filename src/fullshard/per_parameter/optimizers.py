"""Optimizer steps on local tensors instead of DTensors.

Note: a twin steps
    Each operation on a DTensor costs its Python dispatch, many times the cost of the same step on
    plain tensors. An optimizer that updates element by element gives the same result on local
    parts. So a hook that torch calls before every step runs the step on a twin of the optimizer:
    the same class and options, with the local parts as its parameters and the local parts of its
    state as its state. The optimizer itself is not changed while the twin steps, whatever the step
    raises. Its state keeps DTensors, which share their memory with the twin's; tensors that a step
    adds to the state are made DTensors after it.

    Of a step's time on the host, torch's optimizers take a good part to look up what they hand to
    their kernels, parameter by parameter. A twin remembers it (see :class:`GroupCollector`).

    It is known which of torch's own optimizers compute element by element. Others are left alone,
    and compute with DTensors as always.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .collecting import GroupCollector, gradients_of

#: Classes of ``torch.optim`` whose ``step`` updates each element on its own.
_ELEMENTWISE = frozenset(
    {
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    }
)
#: Set on an optimizer: its twin. Copies and pickles of an optimizer go without.
_TWIN = "_fullshard_twin"
#: What a twin has of its own; the rest it shares with its optimizer.
_OWN = frozenset({"param_groups", "state", "_init_group", _TWIN})
#: Those of them that add to a parameter's state, but never replace what is there.
_IN_PLACE = frozenset({"Adam", "AdamW", "SGD"})
_LOCAL = operator.attrgetter("_local_tensor")
#: Set on a parameter: what stands for it in a twin.
_STAND_IN = "_fullshard_stand_in"


@functools.cache
def watch_steps() -> None:
    """Have every optimizer's step looked at, from now on; torch calls the hooks for all."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    kind: Any = type(optimizer)
    if torch.compiler.is_compiling() or not _is_elementwise(kind):
        return None
    twin: _Twin | None = vars(optimizer).get(_TWIN)
    if twin is None:
        if not any(_is_ours(p) for group in optimizer.param_groups for p in group["params"]):
            return None
        twin = _Twin(type(optimizer))
        vars(optimizer)[_TWIN] = twin
    twin.prepare(optimizer)
    _, *rest = args
    return (twin.optimizer, *map(twin.around, rest)), {k: twin.around(v) for k, v in kwargs.items()}


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    twin: _Twin | None = vars(optimizer).get(_TWIN)
    if twin is not None and args and args[0] is twin.optimizer:
        twin.publish(optimizer)


@functools.cache
def _is_elementwise(kind: Any) -> bool:
    """True if the class steps by the code of a known optimizer of torch's."""
    return _owner_of_step(kind) in _ELEMENTWISE


def _owner_of_step(kind: Any) -> str | None:
    """The class of ``torch.optim`` whose ``step`` the class has; None if it has its own."""
    step: Any = inspect.unwrap(kind.step)
    name: str = step.__qualname__.partition(".")[0]
    return name if step.__module__.startswith("torch.optim.") else None


def _is_ours(parameter: Any) -> bool:
    return type(parameter) is DTensor and hasattr(parameter, "_fullshard_unit")


def _collects_like_torchs(kind: Any) -> bool:
    """Whether the class collects what it steps as torch's Adam and SGD do."""
    method = getattr(kind, "_init_group", None)
    if method is None or not method.__module__.startswith("torch.optim."):
        return False
    names = list(inspect.signature(method).parameters)
    return names[:2] == ["self", "group"] and names[3] == "grads"


class _Twin:
    """An optimizer over local tensors that steps in place of the user's: see the note above."""

    def __init__(self, kind: type[torch.optim.Optimizer]) -> None:
        self.optimizer: Any = object.__new__(kind)
        self.optimizer.state = defaultdict(dict)
        self._collector: GroupCollector | None = None
        if _owner_of_step(kind) in _IN_PLACE and _collects_like_torchs(kind):
            self._collector = GroupCollector(self.optimizer)
            vars(self.optimizer)["_init_group"] = self._collector
        self._params: list[Any] = []
        self._stand_ins: list[Any] = []
        #: The stand-ins of each group's parameters.
        self._by_group: list[list[Any]] = []
        #: The DTensors among the parameters, their local tensors and their stand-ins.
        self._sharded: list[Any] = []
        self._local: list[torch.Tensor] = []
        self._sharded_stand_ins: list[Any] = []
        #: The contents of the optimizer's state and of the twin's when the two last agreed. While
        #: both still hold the same objects, nothing has to be converted.
        self._shown: list[Any] = []
        self._stepped: list[Any] = []

    def prepare(self, optimizer: Any) -> None:
        """Bring the twin up to date with the optimizer."""
        twin = self.optimizer
        mine, theirs = twin.__dict__, optimizer.__dict__
        for name in [name for name in mine if name not in theirs and name not in _OWN]:
            # Such as what a gradient scaler has given it for the last step alone.
            del mine[name]
        for name, value in theirs.items():
            if name not in _OWN:
                mine[name] = value
        groups = optimizer.param_groups
        sizes = [len(group["params"]) for group in groups]
        params = [p for group in groups for p in group["params"]]
        replaced = not (
            sizes == list(map(len, self._by_group))
            and all(map(operator.is_, params, self._params))
            and all(map(operator.is_, map(_LOCAL, self._sharded), self._local))
        )
        if replaced:
            self._stand_in_for(params, sizes)
        twin.param_groups = [
            {**group, "params": stand_ins}
            for group, stand_ins in zip(groups, self._by_group, strict=True)
        ]
        shown = _contents(optimizer.state)
        if replaced or not _same(shown, self._shown):
            self._take_state(optimizer.state)
            self._shown, self._stepped = shown, _contents(twin.state)
            if self._collector is not None:
                self._collector.forget()
        if self._collector is None:
            self._take_gradients()
        else:
            self._collector.begin_step([group["params"] for group in groups])

    def _stand_in_for(self, params: list[Any], sizes: list[int]) -> None:
        self._params = params
        self._stand_ins = list(map(_stand_in_of, params))
        remaining = iter(self._stand_ins)
        self._by_group = [list(itertools.islice(remaining, size)) for size in sizes]
        self._sharded = [p for p in params if type(p) is DTensor]
        self._local = list(map(_LOCAL, self._sharded))
        self._sharded_stand_ins = list(map(_stand_in_of, self._sharded))

    def _take_state(self, state: Any) -> None:
        """Give the twin the local parts of the optimizer's state."""
        states = self.optimizer.state
        states.clear()
        for parameter, stand_in in zip(self._params, self._stand_ins, strict=True):
            shown = state.get(parameter)
            if shown:
                states[stand_in] = {name: _local(value) for name, value in shown.items()}

    def _take_gradients(self) -> None:
        gradients = gradients_of(self._sharded)
        for stand_in, gradient in zip(self._sharded_stand_ins, gradients, strict=True):
            stand_in.grad = gradient

    def around(self, argument: Any) -> Any:
        """Wrap a closure so that the stand-ins get its gradients, too; return anything else."""
        if not callable(argument):
            return argument
        closure: Callable[[], Any] = argument

        @functools.wraps(closure)
        def run() -> Any:
            result = closure()
            if self._collector is None:
                self._take_gradients()
            return result

        return run

    def publish(self, optimizer: Any) -> None:
        """Copy the results of the step from the twin to the optimizer."""
        twin = self.optimizer
        for name, value in twin.__dict__.items():
            if name not in _OWN and optimizer.__dict__.get(name) is not value:
                setattr(optimizer, name, value)
        for group, stepped in zip(optimizer.param_groups, twin.param_groups, strict=True):
            for name, value in stepped.items():
                if name != "params":
                    group[name] = value
        if self._collector is None:
            for stand_in in self._sharded_stand_ins:
                stand_in.grad = None
        if self._has_changed(twin.state):
            if self._collector is not None:
                self._collector.forget()
            self._show_state(optimizer.state)
            self._shown = _contents(optimizer.state)
            self._stepped = _contents(twin.state)

    def _has_changed(self, state: Any) -> bool:
        """Whether the step has added to the twin's state, or replaced some of it."""
        if self._collector is not None:
            return len(state) + sum(map(len, state.values())) != len(self._stepped)
        return not _same(_contents(state), self._stepped)

    def _show_state(self, state: Any) -> None:
        """Copy state that the step added or replaced in the twin to the optimizer."""
        for parameter, stand_in in zip(self._params, self._stand_ins, strict=True):
            stepped = self.optimizer.state.get(stand_in)
            if stepped is None:
                continue
            shown = state[parameter]
            for name, value in stepped.items():
                old = shown.get(name)
                if old is not value and _local(old) is not value:
                    shown[name] = _shown(parameter, value)


def _stand_in_of(parameter: Any) -> Any:
    """The plain parameter that replaces a DTensor in a twin; any other parameter itself."""
    if type(parameter) is not DTensor:
        return parameter
    local = parameter._local_tensor
    known = parameter.__dict__.get(_STAND_IN)
    if known is None or known[0] is not local:
        known = (local, nn.Parameter(local, requires_grad=parameter.requires_grad))
        setattr(parameter, _STAND_IN, known)
    return known[1]


def _contents(state: Any) -> list[Any]:
    """The parameters that have state, and its values, one parameter's after the other's.

    In insertion order: looking parameters up would take as long as all the rest, because their
    hash is a Python function.
    """
    return [*state, *itertools.chain.from_iterable(map(dict.values, state.values()))]


def _same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _local(value: Any) -> Any:
    return value._local_tensor if type(value) is DTensor else value


def _shown(parameter: Any, value: Any) -> Any:
    """A value of the state as users see it: a DTensor if it is shaped like the local part."""
    if type(parameter) is not DTensor or not isinstance(value, torch.Tensor):
        return value
    if value.shape != parameter._local_tensor.shape:
        return value
    spec = parameter._spec
    if value.dtype != parameter.dtype:
        return DTensor.from_local(
            value,
            spec.device_mesh,
            spec.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return DTensor(value, spec, requires_grad=False)
