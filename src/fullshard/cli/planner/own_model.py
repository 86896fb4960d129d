"""Building a user's own model for ``fullshard plan --model module:function``.

An error in the user's code is bad input: it is reported in one line, with its place in that code.
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

__all__ = ["own_subject", "repeated_class", "step_errors_as_bad_input"]

#: Code in these files and folders is not the user's.
_NOT_OWN = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parents[2]),
    importlib.__file__,
    "<frozen",
)


def own_subject(given: str) -> Subject:
    """Call ``given``, a ``module:function``, and return the model and the loss that it returns."""
    function = _import(given)
    failure = f"model expects module:function, but {given!r} raised"
    with _errors_as_bad_input(failure), torch.device("meta"):
        made = function()
    model, loss = made if isinstance(made, tuple) and len(made) == 2 else (made, loss_on_tokens)
    if not isinstance(model, nn.Module) or not callable(loss):
        raise BadInput(
            f"model expects a function that returns an nn.Module, or a tuple of a module and a "
            f"loss function, but {given!r} returned {_type_of(made)}"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise BadInput(
            f"model expects a module with trainable parameters, but {given!r} returned a "
            f"{type(model).__name__} without parameters that require gradients"
        )
    prepare_for_training(model)
    return Subject(model.to("meta"), _checked_loss(given, loss))


def repeated_class(model: nn.Module) -> str | None:
    """The repeated module class with the most parameters: usually a transformer's block.

    A class is repeated if one ``ModuleList`` or ``Sequential`` has at least two modules of it. If
    two classes have equally many parameters, the outer one is returned; None if none is repeated.
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


def step_errors_as_bad_input(given: str) -> contextlib.AbstractContextManager[None]:
    """Raise errors of the model's step inside the context as ``BadInput``."""
    return _errors_as_bad_input(f"{given}: a step of the model fails on the meta device")


def _import(given: str) -> Callable[[], Any]:
    module_name, _, function_name = given.partition(":")
    if not module_name or not function_name:
        raise BadInput(f"model expects module:function, but got {given!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    failure = f"model expects module:function, but {module_name!r} cannot be imported"
    with _errors_as_bad_input(failure):
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
    """Wrap ``loss`` so that its errors, and a wrong return value, become ``BadInput``."""
    is_own = loss is not loss_on_tokens

    def checked(model: nn.Module, sequences: int, length: int) -> torch.Tensor:
        size = f"{sequences} x {length}"
        what = f"its loss fails for {size}" if is_own else f"the model fails on {size} tokens"
        advice = "" if is_own else "; return the model and loss(model, sequences, length)"
        try:
            with _errors_as_bad_input(f"{given}: {what}, on the meta device", advice):
                value = loss(model, sequences, length)
        except NotUnderstood as problem:
            raise BadInput(f"{given}: {problem}") from None
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
            raise BadInput(
                f"{given}: the loss must be a scalar tensor that depends on the parameters, but it "
                f"is {_type_of(value)}"
            )
        return value

    return checked


@contextlib.contextmanager
def _errors_as_bad_input(beginning: str, end: str = "") -> Iterator[None]:
    """Raise errors of the user's code inside the context as ``BadInput``."""
    try:
        yield
    except (BadInput, NotUnderstood):
        raise
    except (Exception, SystemExit) as error:
        raise BadInput(f"{beginning}: {_in_one_line(error)}{end}") from None


def _in_one_line(error: BaseException) -> str:
    """The type and message of an error, and its place in the user's code."""
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
