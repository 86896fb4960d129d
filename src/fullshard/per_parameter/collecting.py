"""What an optimizer hands to its kernels, collected once instead of at every step."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

_GRADIENT = operator.attrgetter("grad")
#: The list of gradients among those that ``_init_group`` of torch's optimizers fills.
_GRADIENTS = 1


@dataclass(frozen=True)
class _Collected:
    """What a group's step was given: lists of tensors, of which gradients are left out."""

    lists: tuple[list[Any], ...]
    options: dict[str, Any]
    kind_of_lr: type

    def fits(self, group: dict[str, Any]) -> bool:
        """Whether a step with this group's options would be given the same."""
        return (
            len(group) == len(self.options) + 2
            and type(group["lr"]) is self.kind_of_lr
            and all(group.get(name) is value for name, value in self.options.items())
        )


class GroupCollector:
    """Replaces ``_init_group`` of a twin of torch's Adam, AdamW or SGD.

    The method looks up each parameter's gradient and state, and appends them to lists, from which
    the step goes on. Between two steps only gradients change, mostly: then the lists of the last
    step are handed out again, with the new gradients. Their owner calls :meth:`forget` when the
    parameters or their state have become other tensors.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # The optimizer has its collector as an attribute: no cycle should keep its state alive.
        self._optimizer = weakref.ref(optimizer)
        self._init_group: Callable[..., Any] = type(optimizer)._init_group  # type: ignore[attr-defined]
        self._params: Sequence[Sequence[Any]] = ()
        self._collected: dict[int, _Collected] = {}

    def begin_step(self, params: Sequence[Sequence[Any]]) -> None:
        """Take the gradients of these parameters, group by group, whose stand-ins step."""
        self._params = params

    def forget(self) -> None:
        """Look everything up again in the next step."""
        self._collected.clear()

    def __call__(self, group: dict[str, Any], *lists: list[Any]) -> Any:
        optimizer: Any = self._optimizer()
        place = next(i for i, each in enumerate(optimizer.param_groups) if each is group)
        gradients = gradients_of(self._params[place])
        complete = all(map(operator.is_not, gradients, itertools.repeat(None)))
        collected = self._collected.get(place)
        if complete and collected is not None and collected.fits(group):
            for given, known in zip(lists, collected.lists, strict=True):
                given.extend(known)
            lists[_GRADIENTS].extend(gradients)
            return False
        sharded = [
            (stand_in, gradient)
            for parameter, stand_in, gradient in zip(
                self._params[place], group["params"], gradients, strict=True
            )
            if stand_in is not parameter
        ]
        for stand_in, gradient in sharded:
            stand_in.grad = gradient
        try:
            unusual = self._init_group(optimizer, group, *lists)
        finally:
            for stand_in, _ in sharded:
                stand_in.grad = None
        # Unusual are complex parameters and sparse gradients.
        if complete and not unusual and len(lists[_GRADIENTS]) == len(gradients):
            self._collected[place] = _collected(group, lists)
        return unusual


def _collected(group: dict[str, Any], lists: Sequence[list[Any]]) -> _Collected:
    return _Collected(
        tuple([] if place == _GRADIENTS else list(each) for place, each in enumerate(lists)),
        {name: value for name, value in group.items() if name not in ("params", "lr")},
        type(group["lr"]),
    )


def gradients_of(params: Sequence[Any]) -> list[Any]:
    """The gradients of the parameters, local tensors of those that are sharded."""
    # Torch need not ask the class of a DTensor for a way of its own to tell its gradient.
    with torch._C.DisableTorchFunctionSubclass():
        return [g._local_tensor if type(g) is DTensor else g for g in map(_GRADIENT, params)]
