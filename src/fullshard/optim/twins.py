"""The optimizer that steps whole tensors, once per round, and the parameter groups users see.

Note: one optimizer per round
    Rounds are stepped one after the other, so that one travels while another is stepped; but an
    optimizer may count its own steps. So each round has an optimizer of its own: the same class,
    options and attributes as the one that the user's function made, with those of the round's
    parameters that this rank owns, and their state. The parameter groups that users and
    learning-rate schedulers see are separate from all of them. What changes there is told to every
    round's optimizer before a step, and what a step changes in its groups is shown there after it.
"""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ..engine.init.optimizer_warnings import OVER_ALL
from .parameters import WholeParameter
from .unread import ReadingIsRefused

#: Makes an optimizer of parameters, as ``lambda parameters: torch.optim.AdamW(parameters)`` does.
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_MEMBERS = ("params", "param_names")


def made(make: Make, parameters: list[nn.Parameter], what: str) -> torch.optim.Optimizer:
    """Call ``make`` for ``parameters``; check that its optimizer holds each of them once."""
    optimizer = make(parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"The function that makes the {what} has to return a torch optimizer of the parameters "
            f"that it is given, but it returned a {type(optimizer).__name__}"
        )
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if len(held) != len(parameters) or set(held) != set(parameters):
        raise ValueError(
            f"The {what} ({type(optimizer).__name__}) holds {len(set(held) & set(parameters))} of "
            f"the {len(parameters)} parameters that its function was given, and "
            f"{len(set(held) - set(parameters))} others. Give it exactly these, in any groups"
        )
    return optimizer


class Twins:
    """One optimizer per round: copies of the one that ``make`` made with all stand-ins."""

    def __init__(self, make: Make, parameters: Sequence[WholeParameter]) -> None:
        by_stand_in: dict[Any, WholeParameter] = {each.stand_in: each for each in parameters}
        with ReadingIsRefused({each.stand_in: each.name for each in parameters}):
            self._model = made(make, list(by_stand_in), "optimizer of whole tensors")
        for each in parameters:
            each.note_made()
        kind = type(self._model)
        if OVER_ALL & {cls.__name__ for cls in kind.__mro__}:
            raise ValueError(
                f"{kind.__name__} computes with all parameters together, which are on different "
                "ranks. Use an optimizer that computes with one parameter at a time"
            )
        groups = self._model.param_groups
        #: The parameters in the optimizer's order.
        self.parameters = [by_stand_in[p] for group in groups for p in group["params"]]
        #: The parameter groups that users see, with the model's own parameters.
        self.shown = [
            {**_options(group), "params": [by_stand_in[p].parameter for p in group["params"]]}
            for group in groups
        ]
        self._told = list(map(_options, groups))
        self.optimizers: list[Any] = []

    @property
    def defaults(self) -> dict[str, Any]:
        """The optimizer's default options."""
        return dict(self._model.defaults)

    def add(self, owned: Iterable[WholeParameter]) -> torch.optim.Optimizer:
        """An optimizer for a round of which this rank owns these parameters."""
        model: Any = self._model
        twin: Any = object.__new__(type(model))
        twin.__dict__.update(model.__dict__)
        for name, value in model.__dict__.items():
            if isinstance(value, types.MethodType) and value.__self__ is model:
                setattr(twin, name, types.MethodType(value.__func__, twin))
        stand_ins: set[Any] = {each.stand_in for each in owned}
        twin.param_groups = [
            {**_options(group), "params": [p for p in group["params"] if p in stand_ins]}
            for group in model.param_groups
        ]
        # Few optimizers make state before their first step, and few for other things.
        twin.state = defaultdict(dict)
        twin.state.update(
            (key, value)
            for key, value in model.state.items()
            if key in stand_ins or not isinstance(key, torch.Tensor)
        )
        self.optimizers.append(twin)
        return twin

    def forget_model(self) -> None:
        """Give back state that the optimizer made for parameters of other ranks."""
        self._model.state = defaultdict(dict)

    def forget_states(self) -> None:
        """Begin without state, as before the first step."""
        for twin in self.optimizers:
            twin.state = defaultdict(dict)

    def tell(self) -> None:
        """Copy users' changes of the parameter groups to every round's optimizer."""
        for position, (shown, told) in enumerate(zip(self.shown, self._told, strict=True)):
            for key, value in shown.items():
                if key not in _MEMBERS and (key not in told or told[key] is not value):
                    told[key] = value
                    for twin in self.optimizers:
                        twin.param_groups[position][key] = value

    def tell_all(self) -> None:
        """Let every round's optimizer have all that the groups have that users see."""
        self._told = [{} for _ in self.shown]
        self.tell()

    def listen(self) -> None:
        """Copy a step's changes of its parameter groups to those that users see."""
        groups = self.optimizers[0].param_groups
        for shown, told, group in zip(self.shown, self._told, groups, strict=True):
            for key, value in group.items():
                if key not in _MEMBERS and (key not in told or told[key] is not value):
                    shown[key] = told[key] = value


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _MEMBERS}
