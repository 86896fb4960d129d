"""What a wrapper offers for gradients: when they are reduced, by what, and how they are clipped."""

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
        """The units below, this wrapper's own first."""
        return [m._unit for m in self.modules() if isinstance(m, GradientMethods)]

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Gradients of backwards inside stay local and whole; the next one outside reduces all."""
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
        """As for any module; between forward and backward as well.

        There a module may be showing full parameters, which are not those that have gradients.
        """
        showing = [unit for unit in self._units() if unit.shows_full and not unit.summoned]
        hidden = [p for unit in showing for handle in unit.handles for p in handle.optimizer_params]
        visible = [p for p in self.parameters() if p.is_leaf]
        nn.ParameterList([*hidden, *visible]).zero_grad(set_to_none)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Switch what :meth:`no_sync` switches, without a context; with ``recurse`` below, too."""
        for unit in self._units() if recurse else [self._unit]:
            unit.sync_gradients(requires_gradient_sync)

    @untraced
    def clip_grad_norm_(
        self, max_norm: float | torch.Tensor, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale gradients so that the norm of all of the model's is at most ``max_norm``.

        Returns the norm before scaling, equal on all ranks. To be called on the root, by all
        ranks, between backward and the optimizer's step.
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
        """Have ``hook`` average the gradients of all units, in place of the engine.

        Called as ``hook(state, gradient, shard)`` with a unit's whole flat gradient and the tensor
        in which to leave this rank's shard of the average; as ``hook(state, gradient)``, in place,
        under ``NO_SHARD``. Under the hybrid strategies the hook averages inside the sharding group
        and the engine over the copies. See :mod:`fullshard.grad.hooks` for compressing ones.
        """
        units, schedule = self._units(), self._schedule_for_hooks()
        if callable(hook):
            check_fits_some_unit(units, hook)
        register(units, schedule, state, hook)

    def _schedule_for_hooks(self) -> Schedule:
        if not self.check_is_root():
            raise AssertionError("register_comm_hook can only be called on a root instance.")
        return self._schedule or self._start()
