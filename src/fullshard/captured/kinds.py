"""Compares calls of a step: two calls of one kind can use one graph. Finds what no graph can do.

A graph repeats what the device did in one call. Another call may use it if nothing differs that the
host read: shapes, modes, which parameters are trained, numbers such as a learning rate.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Generator, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..engine.comm.collectives import Group
from ..engine.runtime.capturing import obstacle, watch_passes
from ..engine.runtime.forward import Schedule
from ..engine.runtime.pytrees import PLAIN_TYPES, replace_tensors, tensors_in
from ..engine.runtime.unit import Unit
from .schedulers import noting_schedulers

#: Of how many kinds it is kept what their calls did.
_KINDS_KEPT = 64

_TRAINING = operator.attrgetter("training")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_GRADIENT = operator.attrgetter("grad")
_SYNCS = operator.attrgetter("syncs_gradients")
_IS_THERE = functools.partial(operator.is_not, None)


class Kind(NamedTuple):
    """The facts that are equal in all calls that one graph serves; messages use their names."""

    batch: Hashable
    modes: Hashable
    trained_parameters: Hashable
    hyperparameters: Hashable
    gradients: Hashable
    surroundings: Hashable

    def differences(self, other: Kind) -> list[str]:
        """The names of the fields in which two kinds differ."""
        pairs = zip(self._fields, self, other, strict=True)
        return [name.replace("_", " ") for name, mine, theirs in pairs if mine != theirs]


class Step:
    """The models and optimizers that a step uses, as they are found while it runs."""

    def __init__(self) -> None:
        self._schedules: dict[Schedule, None] = {}
        #: With how many parameters each had when it last stepped eagerly.
        self._optimizers: dict[torch.optim.Optimizer, int] = {}
        self._units: list[Unit] = []
        self._modules: list[nn.Module] = []
        self.parameters: list[torch.Tensor] = []
        #: What the running call does, or the last one did; and what calls of each kind did.
        self._deeds: list[str] = []
        self._done: dict[Kind, list[str]] = {}
        #: The name of a learning-rate scheduler that has stepped in a call.
        self._scheduler: str | None = None

    @contextlib.contextmanager
    def watched(self) -> Generator[None, None, None]:
        """Note what a call, which runs in this context, uses and does."""
        self._deeds = []
        hook = register_optimizer_step_pre_hook(self.note_optimizer)
        try:
            with watch_passes(self), noting_schedulers(self._note_scheduler):
                yield
        finally:
            hook.remove()

    def note_pass(self, schedule: Schedule) -> None:
        """A forward of a sharded model begins."""
        self._deeds.append(f"a forward of {schedule.root.name!r}")
        if schedule not in self._schedules:
            self._schedules[schedule] = None
            self._look_again()

    def note_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note that an optimizer steps in this call."""
        self._deeds.append(f"a step of {type(optimizer).__name__}")
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._optimizers.get(optimizer) != count:
            self._optimizers[optimizer] = count
            self._look_again()

    def _note_scheduler(self, scheduler: object) -> None:
        self._scheduler = type(scheduler).__name__

    def _look_again(self) -> None:
        self._units = [unit for schedule in self._schedules for unit in schedule.units]
        roots = [schedule.root.module for schedule in self._schedules]
        self._modules = [module for root in roots for module in root.modules()]
        found: list[Iterable[torch.Tensor]] = [
            handle.optimizer_params for unit in self._units for handle in unit.handles
        ]
        found += [group["params"] for each in self._optimizers for group in each.param_groups]
        found.append(self._unmanaged())
        self.parameters = [*dict.fromkeys(p for group in found for p in group)]

    def _unmanaged(self) -> list[torch.Tensor]:
        """Parameters of the models that are leaves of autograd, those in no unit among them."""
        own = (p for module in self._modules for p in module._parameters.values())
        return [p for p in own if p is not None and p.is_leaf]

    # -- what is compared ---------------------------------------------------------------------

    def kind_of(self, leaves: Sequence[Any], structure: Hashable) -> Kind:
        """The kind of a call with this batch, now."""
        return Kind(
            (structure, *map(_of_leaf, leaves)),
            tuple(map(_TRAINING, self._modules)),
            tuple(map(_REQUIRES_GRAD, self.parameters)),
            tuple([_of_groups(optimizer) for optimizer in self._optimizers]),
            tuple(map(_IS_THERE, map(_GRADIENT, self.parameters))),
            (
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
                *map(_SYNCS, self._units),
            ),
        )

    @property
    def groups(self) -> list[Group]:
        """The groups that the models communicate over."""
        return [*dict.fromkeys(group for unit in self._units for group in unit.groups)]

    # -- what cannot be captured --------------------------------------------------------------

    def obstacle(self) -> str | None:
        """The reason why the step cannot be captured, as far as known before; None if it can."""
        for optimizer in self._optimizers:
            reason = _of_optimizer(optimizer)
            if reason is not None:
                return reason
        return obstacle(self._units) or self.leftover()

    def contradiction(self, kind: Kind) -> str | None:
        """Say how two calls of one kind did different things, so that no graph can replay both."""
        if len(self._done) > _KINDS_KEPT:
            del self._done[next(iter(self._done))]
        before = self._done.setdefault(kind, self._deeds)
        if before == self._deeds:
            return None
        one, other = (", ".join(deeds) or "nothing" for deeds in (before, self._deeds))
        return (
            f"calls that look alike do not do the same, but one ran {one}, and another {other}: if "
            "a counter decides, pass what it decides in the batch, as a number"
        )

    def leftover(self) -> str | None:
        """The reason why no replay can follow this call; None if one can."""
        if self._scheduler is not None:
            return (
                f"it steps a learning-rate scheduler ({self._scheduler}), which counts on the "
                "host: call its step() after the captured step"
            )
        for unit in self._units:
            if any(handle.keeps_local_gradients for handle in unit.handles):
                return (
                    f"it leaves gradients of unit {unit.name!r} unreduced (no_sync): have one "
                    "call run all micro-batches, up to the one that reduces"
                )
        return None


def check_batch(leaves: Sequence[Any]) -> None:
    """Raise TypeError for a batch with leaves that cannot be compared."""
    for leaf in leaves:
        try:
            hash(leaf)
        except TypeError:
            raise TypeError(
                f"A captured step was given a batch that holds a {type(leaf).__name__}, which is "
                "no tensor and cannot be hashed, so that calls cannot be compared; pass tensors, "
                "numbers and strings in dicts, lists, tuples and dataclasses (dict(batch) makes "
                "one of a mapping)"
            ) from None


def obstacle_in(leaves: Sequence[Any]) -> str | None:
    """Say why a batch cannot be copied to a graph's inputs; None if it can."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if leaf.layout is not torch.strided:
                return (
                    f"its batch holds a tensor with layout {leaf.layout}, which has not the same "
                    "memory in every call: pass it as dense tensors"
                )
        elif type(leaf) not in PLAIN_TYPES and any(True for _ in tensors_in(leaf)):
            return (
                f"its batch holds a {type(leaf).__name__} with tensors, which cannot be replaced "
                "in it: pass tensors in dicts, lists, tuples and dataclasses"
            )
    return None


def obstacle_in_result(result: Any) -> str | None:
    """Why a step's results cannot be copied from where a graph writes them; None if they can."""
    copied: set[int] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        copied.add(id(tensor))
        return tensor

    replace_tensors(result, note)
    if all(id(tensor) in copied for tensor in tensors_in(result)):
        return None
    return (
        "it returns tensors in an object that cannot be copied, so that the next call would "
        "overwrite them: return them in dicts, lists, tuples or dataclasses"
    )


def _of_leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype, leaf.requires_grad
    # 1, 1.0 and True are equal, and so are 0.0 and -0.0: not to what computes with them.
    return type(leaf), leaf.hex() if isinstance(leaf, float) else leaf


def _of_groups(optimizer: torch.optim.Optimizer) -> Hashable:
    return tuple(
        [
            tuple([(name, _of_value(v)) for name, v in group.items() if name != "params"])
            for group in optimizer.param_groups
        ]
    )


def _of_value(value: Any) -> Hashable:
    """A number by its value; a tensor by its address, since a graph reads its value in replays.

    On the host it was read when the graph was captured.
    """
    if isinstance(value, torch.Tensor):
        on_host = value.device.type == "cpu"
        return "tensor", value.data_ptr(), repr(value.tolist()) if on_host else None
    if isinstance(value, (list, tuple)):
        return tuple(map(_of_value, value))
    return value if isinstance(value, Hashable) else repr(value)


def _of_optimizer(optimizer: torch.optim.Optimizer) -> str | None:
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        if group.get("capturable") is False:
            return (
                f"{name} counts its steps on the host; construct it with capturable=True (and "
                "fused=True, which is the fastest)"
            )
    return None
