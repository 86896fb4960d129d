"""Communication hooks: functions that reduce a unit's gradients instead of the engine.

The engine calls a hook with the state it was registered with, a unit's full flat gradient and, for
a sharded unit, the tensor into which the hook writes this rank's shard of the average. The hooks
here have the names and arguments of those in ``torch.distributed.algorithms._comm_hooks``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch

from ..engine.comm.collectives import group_for
from ..engine.grads.comm_hook import CommHook
from ..engine.runtime.forward import Schedule
from ..engine.runtime.unit import Unit

Hook = Callable[..., Any]

#: The name of the unit, in the order check and in errors, when a hook calls a collective.
_UNIT = "(in a communication hook)"


class DefaultState:
    """The process group to average over, and the factors to divide by before and after the sum.

    The product of both factors is the number of ranks. Dividing in two steps avoids overflow and
    underflow in low precision.
    """

    def __init__(self, process_group: Any) -> None:
        if process_group is None:
            raise ValueError(f"Expected to pass in an explicit ProcessGroup to {self}.")
        self.process_group = process_group
        self.world_size: int = process_group.size()
        self.gradient_predivide_factor = _predivide_factor(self.world_size)
        self.gradient_postdivide_factor = self.world_size / self.gradient_predivide_factor


class LowPrecisionState(DefaultState):
    """State of hooks that communicate in low precision and return ``parameter_type``."""

    def __init__(self, process_group: Any, parameter_type: torch.dtype = torch.float32) -> None:
        super().__init__(process_group)
        self.parameter_type = parameter_type


def _predivide_factor(world_size: int) -> float:
    """The least power of two that is at least the root of ``world_size`` or does not divide it."""
    powers = (2**exponent for exponent in count())
    return float(next(f for f in powers if world_size % f or f * f >= world_size))


def allreduce_hook(state: DefaultState, grad: torch.Tensor) -> None:
    """All-reduce ``grad`` to its average in place, as ``NO_SHARD`` does without a hook."""
    if state.gradient_predivide_factor > 1:
        grad.div_(state.gradient_predivide_factor)
    group_for(state.process_group, grad.device).all_reduce(grad, _UNIT)
    if state.gradient_postdivide_factor > 1:
        grad.div_(state.gradient_postdivide_factor)


def reduce_scatter_hook(state: DefaultState, grad: torch.Tensor, output: torch.Tensor) -> None:
    """Reduce-scatter the average of ``grad`` into ``output``; overwrites ``grad``."""
    if state.gradient_predivide_factor > 1:
        grad.div_(state.gradient_predivide_factor)
    group_for(state.process_group, grad.device).reduce_scatter(output, grad, _UNIT)
    if state.gradient_postdivide_factor > 1:
        output.div_(state.gradient_postdivide_factor)


def fp16_compress_hook(
    state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> None:
    """Average gradients in float16, for sharded and unsharded units."""
    _compress(torch.float16, state, grad, output)


def bf16_compress_hook(
    state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> None:
    """Average gradients in bfloat16, for sharded and unsharded units."""
    _compress(torch.bfloat16, state, grad, output)


def _compress(
    dtype: torch.dtype, state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None
) -> None:
    low = grad.to(dtype)
    if output is None:
        allreduce_hook(state, low)
        grad.data = low.to(state.parameter_type)
    else:
        shard = torch.empty_like(output, dtype=dtype)
        reduce_scatter_hook(state, low, shard)
        output.data = shard.to(state.parameter_type)


_HOOKS: dict[str, Hook] = {
    hook.__name__: hook
    for hook in (allreduce_hook, reduce_scatter_hook, fp16_compress_hook, bf16_compress_hook)
}


def _adopt(hook: Hook) -> Hook:
    """Replace a hook of torch by ours of the same name, which also runs without an accelerator."""
    is_torch_hook = getattr(hook, "__module__", "").startswith("torch.distributed.algorithms.")
    return _HOOKS.get(getattr(hook, "__name__", ""), hook) if is_torch_hook else hook


def register(units: Sequence[Unit], schedule: Schedule, state: object, hook: Hook) -> None:
    """Let ``hook`` reduce the gradients of ``units`` from now on."""
    if not callable(hook):
        raise ValueError(f"The communication hook must be callable but got {hook!r}")
    if any(unit.reduction.comm_hook is not None for unit in units):
        raise AssertionError("A communication hook is already registered")
    if not schedule.wait_until_idle():
        raise RuntimeError(
            "register_comm_hook was called in the middle of a forward or backward, when some units "
            "may have reduced their gradients already. Call it between steps"
        )
    registered = make_hook(state, hook)
    for unit in units:
        unit.reduction.set_comm_hook(registered)


def make_hook(state: object, hook: Hook) -> CommHook:
    """The hook as the engine calls it; hooks of torch are replaced by those of this file."""
    return CommHook(state, _adopt(hook), hook)


def check_fits_some_unit(units: Sequence[Unit], hook: Hook) -> None:
    """Raise TypeError if ``hook`` has the wrong arguments for all units with parameters.

    A hook with the right arguments for some units is accepted: the others may never call it.
    """
    own = make_hook(None, hook)
    problem: TypeError | None = None
    for unit in (unit for unit in units if unit.handles):
        try:
            own.check_arguments(unit.options.strategy, unit.name)
        except TypeError as error:
            problem = problem or error
        else:
            return
    if problem is not None:
        raise problem
