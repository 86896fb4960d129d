"""Records what the engine does on this rank, from the moment it is attached until it is detached.

Note: nothing while off
    The engine knows nothing of traces. A recorder gives the objects of the traced model (units,
    schedules, process groups) subclasses of their own classes, which record and then do what they
    always do (``traced.py``), and their own classes back at the end. Objects of other models are
    not touched. The subclasses are made for each recorder and hold it, so that the objects
    themselves hold nothing: a copy made of a model while it is traced is a model like any other.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import itertools
import os
import socket
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..engine.runtime.forward import Schedule
from ..engine.runtime.unit import Unit
from ..state.model.units import steps_of
from .clocks import Clock, Mark, clock_for
from .meter import Meter
from .own_optimizers import OwnOptimizers, watch_steps
from .records import RankTrace, Record, Step, UnitFacts, What


class _Span(NamedTuple):
    """Something that happened, with marks that are not resolved yet."""

    what: What
    unit: str
    issued: int
    started: Mark
    ended: Mark


class Collective:
    """A collective on its way, which has ended by the time that compute has waited for it."""

    __slots__ = ("ended", "held", "issued", "nbytes", "seen", "started", "unit", "what")

    def __init__(
        self, what: What, unit: str, issued: int, started: Mark, nbytes: int, held: Any
    ) -> None:
        self.what, self.unit, self.issued, self.started = what, unit, issued, started
        self.nbytes = nbytes
        #: When its backend said that it had ended.
        self.ended: Mark | None = None
        #: When compute had waited for it.
        self.seen: Mark | None = None
        #: Its tensors, which must not be freed before compute has waited.
        self.held = held

    def has_ended(self, mark: Mark) -> None:
        """The backend says that it, or a part of it, has ended."""
        self.ended = mark

    def was_awaited(self, mark: Mark) -> None:
        """Compute has waited for it."""
        self.seen, self.held = mark, None


def units_of(model: nn.Module) -> list[tuple[Unit, Schedule | None]]:
    """The units of a model, the root first, with what drives them; ValueError if there are none."""
    found = steps_of(model)
    if not found:
        raise ValueError(
            f"fullshard.trace expects a sharded model, but {type(model).__name__} has no units: "
            "wrap it in FullyShardedDataParallel, or apply fully_shard to it"
        )
    return found


class Recorder:
    """Records one rank: spans of compute, collectives beside it, and memory."""

    def __init__(self, found: Sequence[tuple[Unit, Schedule | None]]) -> None:
        self.units = [unit for unit, _ in found]
        self.schedules = list(dict.fromkeys(s for _, s in found if s is not None))
        self.device = self.units[0].device
        self.clock: Clock = clock_for(self.device)
        self.mark = self.clock.mark
        #: Whether marks are on a device that runs behind the host.
        self.runs_ahead = self.clock.runs_ahead
        self.meter = Meter(self.units, self.device)
        #: The collective that is about to be issued, and its unit; None for those not traced.
        self.issuing: tuple[What, Unit] | None = None
        #: The all-gathers that compute has not waited for yet.
        self.gathers: dict[Unit, Collective] = {}
        self._collectives: list[Collective] = []
        self._spans: list[_Span] = []
        #: The units whose forward or backward runs, with when it was given out and began.
        self._forward: dict[Unit, tuple[What, int, Mark]] = {}
        self._backward: dict[Unit, tuple[int, Mark]] = {}
        #: Ends of steps, after the beginning of the trace.
        self._bounds: list[Mark] = []
        #: When the step that runs seems to have ended: after its last optimizer's step.
        self._step_end: Mark | None = None
        self._has_backward = False
        self._optimizers = OwnOptimizers(self.units)
        self._attached: list[Any] = []
        self._stop_watching: Callable[[], None] | None = None
        #: Called when a step has ended and the next one is about to begin.
        self._on_step: Callable[[], object] = _nothing

    # -- attaching ------------------------------------------------------------------------------

    def call_after_steps(self, on_step: Callable[[], object]) -> None:
        """Call ``on_step`` whenever a step has ended and the next one is about to begin."""
        self._on_step = on_step

    def attach(self, things: Iterable[tuple[Any, Any]]) -> None:
        """Begin to record what ``things`` do, each extended by a class of ``traced.py``."""
        found = [*things]
        for thing, extension in found:
            if isinstance(thing, extension) and not extension.is_shared:
                raise RuntimeError(
                    f"fullshard.trace cannot record {type(self.units[0].module).__name__} twice at "
                    "the same time: leave the other trace of this model first"
                )
        for thing, extension in found:
            self._attached.append(thing)
            own: Any = type(thing)
            if isinstance(thing, extension):
                own.recorders.append(self)
                continue
            facts = {
                "recorder": self,
                "recorders": [self],
                "untraced": own,
                "__reduce_ex__": _as_one_of(own),
                "__module__": __name__,
            }
            thing.__class__ = type(f"Traced{own.__name__}", (extension, own), facts)
        self._stop_watching = watch_steps(self._optimizer_begins, self._optimizer_ended)
        at = self.mark()
        self._bounds.append(at)
        self.meter.sample(at)

    def detach(self) -> None:
        """Record no longer; everything is what it was."""
        if self._stop_watching is not None:
            self._stop_watching()
            self._stop_watching = None
        while self._attached:
            thing = self._attached.pop()
            traced: Any = type(thing)
            traced.recorders.remove(self)
            if not traced.recorders:
                thing.__class__ = traced.untraced

    # -- spans on what computes -----------------------------------------------------------------

    def begin(self) -> tuple[int, Mark]:
        """The host's time, and a mark, for a span that is issued now."""
        started = self.mark()
        return (time.perf_counter_ns(), started) if self.runs_ahead else (started, started)

    def add(self, what: What, unit: Unit, issued: int, started: Mark) -> Mark:
        """Record a span that started at ``started`` and ends now; returns the mark of its end."""
        ended = self.mark()
        self._spans.append(_Span(what, unit.name, issued, started, ended))
        return ended

    def add_work(self, unit: Unit, started: int, what: What = What.ENGINE) -> None:
        """The engine has worked for ``unit`` since then: on a host that computes, a span."""
        if not self.runs_ahead:
            self._spans.append(_Span(what, unit.name, started, started, self.mark()))

    def begin_forward(self, unit: Unit, recomputes: bool) -> None:
        self._forward[unit] = (What.RECOMPUTE if recomputes else What.FORWARD, *self.begin())

    def end_forward(self, unit: Unit) -> None:
        begun = self._forward.pop(unit, None)
        if begun is not None:
            self.meter.sample(self.add(begun[0], unit, begun[1], begun[2]))

    def begin_backward(self, unit: Unit) -> None:
        if unit not in self._backward:
            self._backward[unit] = begun = self.begin()
            # The loss lies before the root's backward, what it makes as large as activations.
            is_root = unit is self.units[0]
            (self.meter.sample if is_root else self.meter.sample_causes)(begun[1])

    def end_backward(self, unit: Unit) -> None:
        begun = self._backward.pop(unit, None)
        if begun is not None:
            self.meter.sample(self.add(What.BACKWARD, unit, *begun))

    def end_all_backwards(self) -> None:
        """The backward has ended, also of units that gave no gradients."""
        for unit in [*self._backward]:
            self.end_backward(unit)
        self._has_backward = True
        if self._step_end is not None:
            # Optimizers step inside of this backward, as soon as gradients are there.
            self._step_end = self.mark()

    # -- collectives ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def issuing_for(self, what: What, unit: Unit) -> Generator[None, None, None]:
        """Record the collectives that are issued inside this context as ``unit``'s."""
        self.issuing = (what, unit)
        try:
            yield
        finally:
            self.issuing = None

    def issue(
        self, works: Sequence[Any], begun: tuple[int, Mark], nbytes: int, tensors: Sequence[Any]
    ) -> Collective:
        """A collective on ``tensors`` was issued for the unit that is :attr:`issuing`."""
        assert self.issuing is not None
        what, unit = self.issuing
        # A backend may release its tensors once they were waited for, which the clock does first.
        held = tensors if self.runs_ahead else ()
        collective = Collective(what, unit.name, *begun, nbytes, held)
        self._collectives.append(collective)
        if what is What.ALL_GATHER:
            self.gathers[unit] = collective
        self.clock.mark_after(works, collective.has_ended)
        return collective

    # -- steps ----------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """A forward of a whole model begins: close the step before it, if that one is complete."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "fullshard.trace cannot record a step while it is captured in a CUDA graph, where "
                "nothing runs: trace the same step without capture"
            )
        self._end_step()
        if self._attached:
            # The program may have cleared gradients since the last sample.
            self.meter.sample(self.mark())

    def end(self) -> None:
        """Nothing follows: the step that runs has ended, if it got to its backward's end."""
        self._on_step = _nothing
        self._end_step()

    def _end_step(self) -> None:
        ended, self._step_end = self._step_end, None
        if not self._has_backward or (ended is None and self._has_seen_optimizer):
            self._step_end = ended
            return
        self._has_backward = False
        self._bounds.append(self.mark() if ended is None else ended)
        self.meter.note_all_gradients()
        self._on_step()

    @property
    def _has_seen_optimizer(self) -> bool:
        return self.meter.knows_optimizer

    @property
    def has_step_behind(self) -> bool:
        """True if an optimizer has stepped since the last step that has ended."""
        return self._step_end is not None and self._has_backward

    @property
    def steps_ended(self) -> int:
        """The number of steps that have ended."""
        return len(self._bounds) - 1

    def _optimizer_begins(self, optimizer: Any) -> None:
        if not self._optimizers.has(optimizer):
            return
        if not self.meter.knows_optimizer:
            # What seemed to be steps of backwards alone was accumulated for this optimizer.
            del self._bounds[1:]
        if not self.meter.knows(optimizer):
            self.meter.note_standing_optimizer(optimizer)
        self._optimizers.begin(optimizer, self.begin())

    def _optimizer_ended(self, optimizer: Any) -> None:
        begun = self._optimizers.end(optimizer)
        if begun is None:
            return
        self.meter.note_optimizer(optimizer)
        self._step_end = self.mark()
        self._spans.append(_Span(What.OPTIMIZER, "", *begun, self._step_end))
        self.meter.sample(self._step_end)

    # -- what was recorded ----------------------------------------------------------------------

    def trace(self, rank: int) -> RankTrace:
        """Everything, on the host's clock."""
        self.clock.settle()
        seconds = self.clock.seconds
        records = [
            Record(s.what, s.unit, s.issued * 1e-9, seconds(s.started), seconds(s.ended))
            for s in self._spans
        ]
        records += self._collective_records(seconds)
        records.sort(key=lambda record: record.issued)
        bounds = [*map(seconds, self._bounds)]
        memory = self.meter.memory(seconds)
        steps = [
            Step(number, *bound) for number, bound in enumerate(itertools.pairwise(bounds), start=1)
        ]
        return RankTrace(
            rank,
            host_name(),
            _device_name(self.device),
            steps,
            records,
            memory,
            max((moment.total for moment in memory), default=None),
        )

    def _collective_records(self, seconds: Callable[[Mark], float]) -> list[Record]:
        """The records of collectives; those of one kind run one after the other on a device."""
        found: list[Record] = []
        last: dict[What, float] = {}
        for each in self._collectives:
            ends = [seconds(mark) for mark in (each.ended, each.seen) if mark is not None]
            if not ends:
                continue
            # A backend may say so a moment after compute has gone on.
            started, ended = seconds(each.started), min(ends)
            if self.runs_ahead:
                started = min(max(started, last.get(each.what, started)), ended)
                last[each.what] = ended
            found.append(
                Record(each.what, each.unit, each.issued * 1e-9, started, ended, each.nbytes)
            )
        return found

    def unit_facts(self) -> list[UnitFacts]:
        """Facts about the units."""
        return [
            UnitFacts(
                unit.name,
                sum(handle.layout.padded_numel for handle in unit.handles),
                unit.options.strategy.name,
            )
            for unit in self.units
        ]


def _nothing() -> None:
    """Do nothing at the end of a step."""


def _as_one_of(own: type) -> Any:
    """A ``__reduce_ex__`` that copies and pickles an object as one of its own class."""

    # The class's own ``__reduce__``; None if it defines none.
    says: Any = None if own.__reduce__ is object.__reduce__ else own.__reduce__  # type: ignore[comparison-overlap]

    def reduce(self: Any, protocol: Any) -> Any:
        if says is not None:
            return says(self)
        return copyreg.__newobj__, (own,), self.__getstate__()  # type: ignore[attr-defined]

    return reduce


@functools.cache
def host_name() -> str:
    """The host's name and part of its boot id: equal on ranks that share a clock."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text()[:8]}"
    return f"{socket.gethostname()} {os.getpid()}"


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    module = torch.get_device_module(device)
    name = getattr(module, "get_device_name", None)
    return device.type if name is None else str(name(device))
