"""Runs what users attach to a complete gradient: hooks, and optimizers in backward."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..params.handle import FlatParamHandle

if TYPE_CHECKING:
    from .reduction import Reduction

_HOOKS = operator.attrgetter("_post_accumulate_grad_hooks")

#: Where torch's ``_apply_optimizer_in_backward`` keeps a parameter's optimizers.
IN_BACKWARD = "_in_backward_optimizers"


def run_hooks_of_all(reductions: Sequence[Reduction]) -> None:
    """Call the user's hooks on parameters whose reduced gradients are in place."""
    for reduction in reductions:
        for handle in reduction.handles:
            _run_hooks(handle)


def _run_hooks(handle: FlatParamHandle) -> None:
    """Call what the user registered to run when a parameter's gradient is complete.

    A gradient that is left from an earlier backward was complete then.
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
    """Do what torch's ``_apply_optimizer_in_backward`` has autograd do for a bare parameter.

    Its hooks hang on autograd nodes that no backward reaches here.
    """
    for parameter in handle.optimizer_params:
        if parameter.grad is not None and hasattr(parameter, IN_BACKWARD):
            for optimizer in getattr(parameter, IN_BACKWARD):
                optimizer.step()
            parameter.grad = None
