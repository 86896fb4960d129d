"""The wrapper's gradient methods: skipping reductions, communication hooks and clipping."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .engine.runtime.forward import Schedule
from .engine.runtime.unit import Unit
from .engine.runtime.untraced import untraced
from .grad.clip import clip_grad_norm
from .grad.hooks import check_fits_some_unit, register


class GradientMethods(nn.Module):
    """The public methods of the wrapper that concern gradients."""

    _schedule: Schedule | None
    _unit: Unit

    if TYPE_CHECKING:

        def check_is_root(self) -> bool: ...
        def _start(self) -> Schedule: ...
        def _outermost(self) -> GradientMethods: ...

    def _units(self) -> list[Unit]:
        """This wrapper's unit, followed by the units nested in it."""
        return [m._unit for m in self.modules() if isinstance(m, GradientMethods)]

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Accumulate gradients without communication.

        Inside this context, backward leaves each rank's unsharded gradients on that rank. The first
        backward after it reduces the accumulated sum.
        """
        units = self._units()
        before = [unit.syncs_gradients for unit in units]
        for unit in units:
            unit.sync_gradients(False)
        try:
            yield
        finally:
            for unit, syncs_gradients in zip(units, before, strict=True):
                unit.sync_gradients(syncs_gradients)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters; this also works between forward and backward.

        At that point a unit may be unsharded, and its modules then hold full parameters while the
        gradients belong to the sharded ones.
        """
        showing = [unit for unit in self._units() if unit.shows_full and not unit.summoned]
        hidden = [p for unit in showing for handle in unit.handles for p in handle.optimizer_params]
        visible = [p for p in self.parameters() if p.is_leaf]
        nn.ParameterList([*hidden, *visible]).zero_grad(set_to_none)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Turn gradient reduction on or off, as :meth:`no_sync` does, but without a context.

        With ``recurse``, this applies to nested units as well.
        """
        for unit in self._units() if recurse else [self._unit]:
            unit.sync_gradients(requires_gradient_sync)

    @untraced
    def clip_grad_norm_(
        self, max_norm: float | torch.Tensor, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale the gradients so that their total norm over all ranks is at most ``max_norm``.

        Returns the norm before scaling, which is the same on all ranks. Call it on the root, on
        every rank, between backward and the optimizer step.
        """
        schedule = self._schedule or self._outermost()._start()
        joining = self._unit.joining
        if joining is None:
            return clip_grad_norm(self, schedule, self._units(), max_norm, norm_type)
        joining.tell("clip", detail=(float(max_norm), float(norm_type)))
        norm = clip_grad_norm(self, schedule, self._units(), max_norm, norm_type)
        joining.note_gradients()
        return norm

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let ``hook`` average the gradients of all units instead of the engine.

        The hook is called as ``hook(state, gradient, shard)``: it reads a unit's unsharded flat
        gradient and writes this rank's shard of the average into ``shard``. Under ``NO_SHARD`` it
        is called as ``hook(state, gradient)`` and works in place. Under the hybrid strategies the
        hook averages within the sharding group, and the engine across replicas. See
        :mod:`fullshard.grad.hooks` for hooks that compress.
        """
        units, schedule = self._units(), self._schedule_for_hooks()
        if callable(hook):
            check_fits_some_unit(units, hook)
        register(units, schedule, state, hook)

    def _schedule_for_hooks(self) -> Schedule:
        if not self.check_is_root():
            raise AssertionError("register_comm_hook can only be called on a root instance.")
        return self._schedule or self._start()
