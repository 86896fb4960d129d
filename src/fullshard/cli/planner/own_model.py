"""A model of the user's own for ``fullshard plan``: found, called, and checked as what it is.

Whatever its code raises is told in one line, with the place in that code: it is input.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..problems import BadInput
from .own_loss import NotUnderstood, loss_on_tokens, prepare_for_training
from .prediction import Loss, Subject

__all__ = ["own_subject", "repeated_class", "step_told"]

#: Code below these folders is not the user's.
_NOT_OWN = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parents[2]),
    importlib.__file__,
    "<frozen",
)


def own_subject(given: str) -> Subject:
    """The model, and the loss, that ``given`` as ``module:function`` returns."""
    function = _import(given)
    with _told(f"model expects module:function, but {given!r} raised"), torch.device("meta"):
        made = function()
    model, loss = made if isinstance(made, tuple) and len(made) == 2 else (made, loss_on_tokens)
    if not isinstance(model, nn.Module) or not callable(loss):
        raise BadInput(
            f"model expects a function that returns a module, or a module and its loss, but "
            f"{given!r} returned {_type_of(made)}"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise BadInput(
            f"model expects a module to train, but {given!r} returned a {type(model).__name__} "
            "without parameters that require gradients"
        )
    prepare_for_training(model)
    return Subject(model.to("meta"), _checked_loss(given, loss))


def repeated_class(model: nn.Module) -> str | None:
    """The class of which lists of modules hold most parameters: a transformer's block, mostly.

    It counts from two elements in one ``ModuleList`` or ``Sequential``. Of two that hold the same,
    it is the outer one; None where nothing is repeated.
    """
    held: dict[str, dict[nn.Parameter, None]] = {}
    for container in model.modules():
        if isinstance(container, nn.ModuleList | nn.Sequential):
            names = [type(element).__name__ for element in container]
            for name, element in zip(names, container, strict=True):
                if names.count(name) > 1:
                    held.setdefault(name, {}).update(dict.fromkeys(element.parameters()))
    sizes = {name: sum(p.numel() for p in parameters) for name, parameters in held.items()}
    return max(sizes, key=lambda name: sizes[name], default=None) if any(sizes.values()) else None


def step_told(given: str) -> contextlib.AbstractContextManager[None]:
    """What the model's backward raises inside the context, as bad input."""
    return _told(f"{given}: a step of the model fails on the meta device")


def _import(given: str) -> Callable[[], Any]:
    module_name, _, function_name = given.partition(":")
    if not module_name or not function_name:
        raise BadInput(f"model expects module:function, but got {given!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with _told(f"model expects module:function, but {module_name!r} cannot be imported"):
        module = importlib.import_module(module_name)
    function = getattr(module, function_name, None)
    if function is None:
        raise BadInput(
            f"model expects module:function, but {module_name!r} has no {function_name!r}"
        )
    if not callable(function):
        raise BadInput(
            f"model expects module:function, but {given!r} is not a function but a "
            f"{type(function).__name__}"
        )
    return function


def _checked_loss(given: str, loss: Loss) -> Loss:
    """``loss``, with checks of what it raises and returns."""
    is_own = loss is not loss_on_tokens

    def checked(model: nn.Module, sequences: int, length: int) -> torch.Tensor:
        size = f"{sequences} x {length}"
        what = f"its loss fails for {size}" if is_own else f"the model fails on {size} tokens"
        advice = "" if is_own else "; return the model and loss(model, sequences, length)"
        try:
            with _told(f"{given}: {what}, on the meta device", advice):
                value = loss(model, sequences, length)
        except NotUnderstood as problem:
            raise BadInput(f"{given}: {problem}") from None
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
            raise BadInput(
                f"{given}: the loss must be one number that depends on the parameters, but it is "
                f"{_type_of(value)}"
            )
        return value

    return checked


@contextlib.contextmanager
def _told(beginning: str, end: str = "") -> Iterator[None]:
    """What the user's code raises inside the context, as bad input."""
    try:
        yield
    except (BadInput, NotUnderstood):
        raise
    except (Exception, SystemExit) as error:
        raise BadInput(f"{beginning}: {_in_one_line(error)}{end}") from None


def _in_one_line(error: BaseException) -> str:
    """What was raised, and where in the user's own code."""
    reason = [line for line in str(error).splitlines() if line.strip()]
    steps = traceback.extract_tb(error.__traceback__)
    own = [step for step in steps if not step.filename.startswith(_NOT_OWN)]
    place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    what = reason[0].strip().rstrip(".") if reason else "no message"
    return f"{type(error).__name__}: {what}{place}"


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        without = "" if value.requires_grad else ", without gradient"
        return f"a tensor of shape {tuple(value.shape)}{without}"
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(part).__name__ for part in value) or 'nothing'}"
    return type(value).__name__
