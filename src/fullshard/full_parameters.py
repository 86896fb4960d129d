"""The wrapper's methods that put full parameters in place between steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from torch import nn

from .engine.runtime.forward import Schedule
from .engine.runtime.unit import Unit
from .state.model.summon import summon_full_params


class UnshardHandle:
    """An all-gather that :meth:`FullyShardedDataParallel.unshard` started."""

    def __init__(self, schedule: Schedule, *units: Unit) -> None:
        self._schedule = schedule
        self._units = units

    def wait(self) -> None:
        """Return when the full parameters are in place."""
        for unit in self._units:
            self._schedule.finish_unshard(unit)


class FullParameters(nn.Module):
    """The public methods of the wrapper that unshard parameters outside of a forward."""

    _schedule: Schedule | None
    _unit: Unit

    if TYPE_CHECKING:

        def _assert_idle(self) -> None: ...
        def _start(self) -> Schedule: ...
        def _outermost(self) -> FullParameters: ...

    @staticmethod
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> contextlib.AbstractContextManager[None]:
        """Inside the context ``module`` has its full parameters, under their original names.

        Changes made inside are kept if ``writeback``; with ``rank0_only`` the other ranks keep
        seeing their shards; ``with_grads`` shows full gradients too. The same as
        :func:`fullshard.summon_full_params`.
        """
        return summon_full_params(
            module, recurse, writeback, rank0_only, offload_to_cpu, with_grads
        )

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gather this wrapper's own parameters now, ahead of their use, in compute precision.

        Those of nested wrappers stay sharded. The next forward uses the full parameters, and
        reshards them as the strategy says; :meth:`reshard` does so earlier. All ranks call this.
        With ``async_op`` the call returns at once; parameters are full after ``wait()`` of the
        handle, or in the forward, whichever comes first.

        >>> handle = model.blocks[0].unshard(async_op=True)
        """
        schedule = self._schedule or self._outermost()._start()
        schedule.unshard(self._unit)
        handle = UnshardHandle(schedule, self._unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Reshard this wrapper's full parameters; changes that were made to them are kept."""
        if self._schedule is not None:
            self._schedule.reshard(self._unit)

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """``nn.Module.apply`` with full parameters in place; changes are kept.

        Refused inside ``summon_full_params``, whose options decide whether changes are kept.
        """
        if self._applying:
            return super().apply(fn)
        wrappers = [m for m in self.modules() if isinstance(m, FullParameters)]
        for wrapper in wrappers:
            if wrapper._unit.summoned:
                wrapper._assert_idle()
        with self.summon_full_params(self):
            for wrapper in wrappers:
                wrapper._applying = True
            try:
                return super().apply(fn)
            finally:
                for wrapper in wrappers:
                    wrapper._applying = False

    #: Whether ``apply`` of this wrapper, or of one around it, has its full parameters in place.
    _applying = False
