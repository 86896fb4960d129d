"""Traces the steps of a program that knows nothing of it, for ``fullshard run --trace``.

The first model that trains is traced, from its fifth optimizer step on.
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path
from typing import Any

import torch

from ..engine.runtime.capturing import watching
from ..engine.runtime.forward import Schedule
from ..engine.runtime.unit import Unit
from .own_optimizers import has_parameters_of, watch_steps
from .report import counted
from .trace import Path_, Trace

#: Where to write the trace, and how many steps of it: set for ranks by the launcher.
TRACE, TRACE_STEPS = "FULLSHARD_TRACE", "FULLSHARD_TRACE_STEPS"
#: Optimizer steps before the trace begins: ranks agree on new operations in the first ones.
_STEPS_BEFORE = 4


class AnnouncedTrace(Trace):
    """A trace that says where it was written, as soon as it is."""

    def save(self, *paths: Path_) -> None:
        super().save(*paths)
        steps = counted(self.steps_recorded, "step")
        print(f"fullshard: trace of {steps} in {', '.join(map(str, paths))}", file=sys.stderr)


class Automatic:
    """Waits for a model that trains, and then for a few optimizer steps."""

    def __init__(self, path: Path, steps: int) -> None:
        self._path, self._steps = path, steps
        self._schedule: Schedule | None = None
        self._count = 0
        self._trace: Trace | None = None

    def install(self) -> None:
        """Begin to watch passes and optimizers."""
        watching.append(self)
        self._stop_watching = watch_steps(_nothing, self._note_step)
        atexit.register(self._end)

    def note_pass(self, schedule: Schedule) -> None:
        """A pass begins: if it is a training model's, that model is traced."""
        if torch.is_grad_enabled():
            self._schedule = schedule
            watching.remove(self)

    def _note_step(self, optimizer: Any) -> None:
        if self._schedule is None or not has_parameters_of(optimizer, self._schedule.units):
            return
        self._count += 1
        if self._count == _STEPS_BEFORE:
            trace = AnnouncedTrace(self._units, [optimizer], [self._path], self._steps)
            trace.start()
            self._trace = trace
            # After the trace has begun to watch: hooks of torch's cannot be removed by a hook.
            self._stop_watching()

    def _end(self) -> None:
        """The program ends: without a trace, if it did not train for long enough."""
        if (self._trace is None or self._trace.is_recording) and os.environ.get("RANK") == "0":
            print(
                f"fullshard: no trace in {self._path}: the program ended before the forward that "
                f"follows {_STEPS_BEFORE + self._steps} optimizer steps; let it train "
                "for longer, or ask for fewer steps (--trace-steps)",
                file=sys.stderr,
            )

    def _units(self) -> list[tuple[Unit, Schedule | None]]:
        assert self._schedule is not None
        return [(unit, self._schedule) for unit in self._schedule.units]


def _nothing(_: Any) -> None:
    """Steps count when they have ended."""


def install() -> None:
    """Trace what this process will train; called on each rank before its program begins."""
    Automatic(Path(os.environ[TRACE]), int(os.environ[TRACE_STEPS])).install()
