"""Traces the steps of a program that knows nothing of it, for ``fullshard run --trace``.

The first model that trains is traced, from its fifth optimizer step on.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..engine.runtime.capturing import watching
from ..engine.runtime.forward import Schedule
from ..engine.runtime.unit import Unit
from .trace import Trace

#: Where to write the trace, and how many steps of it: set for ranks by the launcher.
TRACE, TRACE_STEPS = "FULLSHARD_TRACE", "FULLSHARD_TRACE_STEPS"
#: Optimizer steps before the trace begins: ranks agree on new operations in the first ones.
_STEPS_BEFORE = 4


class Automatic:
    """Waits for a model that trains, and then for a few optimizer steps."""

    def __init__(self, path: Path, steps: int) -> None:
        self._path, self._steps = path, steps
        self._schedule: Schedule | None = None
        self._count = 0

    def install(self) -> None:
        """Begin to watch passes and optimizers."""
        watching.append(self)
        self._hook = register_optimizer_step_post_hook(self._note_step)

    def note_pass(self, schedule: Schedule) -> None:
        """A pass begins; that of a model that trains is what was waited for."""
        if torch.is_grad_enabled():
            self._schedule = schedule
            watching.remove(self)

    def _note_step(self, *_: Any) -> None:
        if self._schedule is None:
            return
        self._count += 1
        if self._count == _STEPS_BEFORE:
            self._hook.remove()
            Trace(self._units, (), [self._path], self._steps).start()

    def _units(self) -> list[tuple[Unit, Schedule | None]]:
        assert self._schedule is not None
        return [(unit, self._schedule) for unit in self._schedule.units]


def install() -> None:
    """Trace what this process will train; called on each rank before its program begins."""
    Automatic(Path(os.environ[TRACE]), int(os.environ[TRACE_STEPS])).install()
