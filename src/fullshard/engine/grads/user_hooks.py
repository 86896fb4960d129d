"""Runs hooks on complete gradients, and optimizers in backward."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..params.handle import FlatParamHandle

if TYPE_CHECKING:
    from .reduction import Reduction

_HOOKS = operator.attrgetter("_post_accumulate_grad_hooks")

#: The attribute in which ``_apply_optimizer_in_backward`` keeps a parameter's optimizers.
IN_BACKWARD = "_in_backward_optimizers"


def run_hooks_of_all(reductions: Sequence[Reduction]) -> None:
    """Call the user's hooks on parameters whose reduced gradients are in place."""
    for reduction in reductions:
        for handle in reduction.handles:
            _run_hooks(handle)


def _run_hooks(handle: FlatParamHandle) -> None:
    """Call the user's hooks on gradients that the last backward completed.

    Gradients left from an earlier backward had their hooks called then.
    """
    if any(map(_HOOKS, handle.optimizer_params)):
        for parameter in handle.received():
            if parameter.grad is not None and parameter.requires_grad:
                for hook in list((_HOOKS(parameter) or {}).values()):
                    hook(parameter)
    handle.forget_received()
    attributes = map(vars, handle.optimizer_params)
    if any(map(operator.contains, attributes, itertools.repeat(IN_BACKWARD))):
        _step_in_backward(handle)


def _step_in_backward(handle: FlatParamHandle) -> None:
    """Step the optimizers of torch's ``_apply_optimizer_in_backward``.

    Its hooks are on autograd nodes of the sharded parameters, which no backward reaches.
    """
    for parameter in handle.optimizer_params:
        if parameter.grad is not None and hasattr(parameter, IN_BACKWARD):
            for optimizer in getattr(parameter, IN_BACKWARD):
                optimizer.step()
            parameter.grad = None
