"""The peak memory of a step on a rank: pure arithmetic over sizes and a list of moments.

``activations.py`` records the moments by running the unwrapped model on the meta device. The
engine's own policy decides which units are unsharded, resharded and reduced at each of them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from fullshard.engine.runtime.policy import AfterForward, Policy, UnitOptions, UnitPlan

__all__ = ["Event", "Facts", "Moment", "Parts", "Prediction", "UnitSizes", "Walk", "predict"]


class Event(Enum):
    """An event of a unit that changes the memory in use."""

    FORWARD = auto()
    FORWARD_END = auto()
    BACKWARD = auto()
    GRADIENTS = auto()
    END = auto()


@dataclass(frozen=True)
class Moment:
    """An event of a unit, with the memory of the unwrapped model then and until the next one.

    ``tensors`` are activations and all other results of operations; ``gradients`` are unreduced
    gradients of parameters, kept until their unit has all of them. All in bytes.
    """

    event: Event
    unit: str
    tensors: int
    gradients: int
    peak_tensors: int
    peak_gradients: int
    #: Seconds of compute from the beginning of the step to this moment, if they were estimated.
    seconds: float = 0.0
    #: Operations that the host has given out until then.
    operations: int = 0


@dataclass(frozen=True)
class UnitSizes:
    """The memory of one unit on a rank, in bytes.

    ``shard`` and ``gradient_shard`` are persistent. ``full`` is in use while the unit is unsharded,
    ``reduce_buffer`` from the last gradient until the reduce-scatter is done. ``reduced`` is the
    output of the reduce-scatter. ``gathered`` is what an all-gather fills apart from the full
    parameters, until they are copied from it. ``messages`` are encoded gradients, those that are
    sent and those that are received, in place of what a reduce-scatter receives otherwise.
    """

    path: str
    shard: int
    gradient_shard: int
    full: int
    reduce_buffer: int
    reduced: int
    gathered: int = 0
    messages: int = 0


@dataclass(frozen=True)
class Facts:
    """Everything else that the prediction depends on: unit options, device and communication."""

    options: UnitOptions
    policy: Policy
    ranks: int
    #: Bytes of optimizer state per byte of gradient shards; AdamW keeps two values per element.
    optimizer_factor: float = 2.0
    #: True if shards, gradient shards and optimizer state are in host memory.
    offloaded: bool = False
    #: True if gradients of an earlier backward are kept while the next one runs.
    accumulates: bool = False
    #: Receive buffer of a reduce-scatter over gloo, relative to what it sends; half with two ranks.
    received_part: float = 1.0

    @functools.cached_property
    def plan(self) -> UnitPlan:
        """The engine's decisions for units with these options."""
        return self.policy.plan(self.options)


@dataclass(frozen=True)
class Parts:
    """The device memory of a rank in bytes, by purpose.

    ``whole_gradients`` are unreduced gradients, with the buffers of their reduce-scatter.
    """

    shards: int
    gradients: int
    optimizer: int
    full_parameters: int
    whole_gradients: int
    activations: int

    @property
    def each(self) -> Iterable[int]:
        """The parts, in the order above."""
        # Ten times as fast as dataclasses.astuple, which copies: there are many in a walk.
        return vars(self).values()

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(self.each)


@dataclass(frozen=True)
class Prediction:
    """The parts at the peak, the maximum of each part during the step, and the time of the peak.

    ``host`` is the persistent memory on the host, in bytes.
    """

    peak: Parts
    at_most: Parts
    when: str
    host: int

    @property
    def total(self) -> int:
        """The device memory at the peak."""
        return self.peak.total


def predict(units: Sequence[UnitSizes], moments: Sequence[Moment], facts: Facts) -> Prediction:
    """Simulate one step and return its peak."""
    forwards = [moment.unit for moment in moments if moment.event is Event.FORWARD]
    walk = Walk({unit.path: unit for unit in units}, facts, forwards)
    for moment in moments:
        walk.follow(moment)
    peak, when = max(walk.seen, key=lambda seen: seen[0].total)
    each = zip(*(parts.each for parts, _ in walk.seen), strict=True)
    resting = sum(walk.resting)
    return Prediction(peak, Parts(*map(max, each)), when, resting if facts.offloaded else 0)


@dataclass
class Walk:
    """The state of the simulated engine during a step; ``step_time.py`` adds when things happen."""

    units: dict[str, UnitSizes]
    facts: Facts
    #: The units whose forwards have not begun yet, in order; one may come more than once.
    forwards_to_come: list[str]
    seen: list[tuple[Parts, str]] = field(default_factory=list)
    #: Paths of the units that are unsharded.
    gathered: dict[str, None] = field(default_factory=dict)
    #: Those of them whose full parameters are where modules compute with them.
    in_place: set[str] = field(default_factory=set)
    #: Units in the order in which their forward ended; backward runs in reverse order.
    passed: list[str] = field(default_factory=list)
    #: The unit whose forward began last.
    begun: str | None = None
    #: The unit whose reshard after forward is due, if the device reshards late.
    owed: str | None = None
    #: The unit whose gradients wait for their reduce-scatter, and the one whose is running.
    pending: UnitSizes | None = None
    in_flight: UnitSizes | None = None
    gradients: int = 0

    def __post_init__(self) -> None:
        shards = sum(unit.shard for unit in self.units.values())
        trained = sum(unit.gradient_shard for unit in self.units.values())
        #: Bytes of shards, of gradient shards once all exist, and of optimizer state.
        self.resting = (shards, trained, int(trained * self.facts.optimizer_factor))
        if self.facts.accumulates:
            self.gradients = trained

    def follow(self, moment: Moment) -> None:
        unit = self.units.get(moment.unit)
        if moment.event in (Event.BACKWARD, Event.GRADIENTS, Event.END):
            self._carry_out_reduce(moment)
        if unit is not None:
            self._apply(moment, unit)
        self._consider_all(moment)
        if moment.event is Event.END and self.in_flight is not None:
            # The last reduce-scatter that overlapped with compute ends with backward.
            self._carry_out_reduce(moment)
            self._consider_all(moment)

    def _consider_all(self, moment: Moment) -> None:
        """Record the memory at a moment, including gradients that are being reduced."""
        waiting = self.pending.reduce_buffer if self.pending else 0
        waiting += self._reduce_memory(self.in_flight) if self.in_flight else 0
        self._consider(moment.peak_tensors, moment.peak_gradients + waiting, moment)

    def _apply(self, moment: Moment, unit: UnitSizes) -> None:
        is_root = moment.unit == ""
        if moment.event is Event.FORWARD:
            is_first = self.begun is None
            self._show_full(unit, moment)
            self.begun = unit.path
            del self.forwards_to_come[0]
            if self.facts.plan.prefetches_in_training:
                self._prefetch_forward(is_first)
        elif moment.event is Event.FORWARD_END:
            self.passed.append(unit.path)
            decision = self.facts.plan.after_forward(
                is_outermost=is_root,
                forwards_left=len(self.forwards_to_come) + 1 if self.begun == unit.path else None,
                # Under NO_SHARD a unit may compute with its shard itself.
                holds_copy=not self.facts.options.is_sharded,
            )
            if decision is AfterForward.RESHARD:
                self._free_after_forward(unit.path)
        elif moment.event is Event.BACKWARD:
            self._settle()
            self._show_full(unit, moment)
            if self.facts.plan.prefetches_before_backward and self._may_prefetch(is_first=is_root):
                position = self.passed.index(unit.path)
                for ahead in self.facts.policy.positions_ahead_in_backward(position):
                    self._gather(self.passed[ahead])
        elif moment.event is Event.GRADIENTS:
            self._free(unit.path)
            # The gradients are copied into the reduce buffer while autograd still holds them.
            self._consider(moment.tensors, moment.gradients + unit.reduce_buffer, moment)
            self._stage(unit)

    def _gather(self, path: str) -> None:
        """A unit is all-gathered, unless it is already."""
        self.gathered[path] = None

    def _stage(self, unit: UnitSizes) -> None:
        """A unit's gradients are in its reduce buffer."""
        self.pending = unit

    def _start_reduce(self, unit: UnitSizes) -> None:
        """A host begins to reduce a unit's gradients; an accelerator began when they arrived."""

    def _prefetch_forward(self, is_first: bool) -> None:
        keeps_all = self.facts.options.keeps_full_after_forward
        left = len(self.forwards_to_come)
        ahead = self.facts.policy.units_ahead(left, is_first=is_first, keeps_all=keeps_all)
        for path in self.forwards_to_come[:ahead]:
            if path in self.units:
                self._gather(path)

    def _may_prefetch(self, is_first: bool) -> bool:
        return self.facts.policy.may_prefetch_in_backward(self.facts.options, is_first=is_first)

    def _free_after_forward(self, path: str) -> None:
        self._settle()
        if self.facts.plan.releases_late_in_forward:
            self.owed = path
        else:
            self._free(path)

    def _settle(self) -> None:
        if self.owed is not None:
            self._free(self.owed)
            self.owed = None

    def _show_full(self, unit: UnitSizes, moment: Moment) -> None:
        """Unshard a unit, unless a prefetch has already."""
        self._gather(unit.path)
        if unit.path not in self.in_place:
            self.in_place.add(unit.path)
            self._consider(moment.tensors, moment.gradients, moment, copied=unit.gathered)

    def _free(self, path: str) -> None:
        self.gathered.pop(path, None)
        self.in_place.discard(path)

    def _carry_out_reduce(self, moment: Moment) -> None:
        if self.in_flight is not None:
            self._finish_reduce(self.in_flight)
            self.in_flight = None
        unit, self.pending = self.pending, None
        if unit is None:
            return
        self._start_reduce(unit)
        if self.facts.plan.reduces_behind_compute:
            self.in_flight = unit
            return
        self._consider(moment.tensors, moment.gradients + self._reduce_memory(unit), moment)
        self._finish_reduce(unit)

    def _finish_reduce(self, unit: UnitSizes) -> None:
        if not self.facts.accumulates:
            self.gradients += unit.gradient_shard

    def _reduce_memory(self, unit: UnitSizes) -> int:
        """The memory of a reduce-scatter: send buffer, receive buffer and output."""
        if not self.facts.options.is_sharded:
            return unit.reduce_buffer
        if unit.messages:
            return unit.reduce_buffer + unit.messages + unit.reduced
        received = int(unit.reduce_buffer * self.facts.received_part)
        return unit.reduce_buffer + received + unit.reduced

    def _consider(
        self, tensors: int, whole_gradients: int, moment: Moment, copied: int = 0
    ) -> None:
        shards, _, optimizer = self.resting
        on_device = (shards, self.gradients, optimizer) if not self.facts.offloaded else (0, 0, 0)
        full = sum(self.units[path].full for path in self.gathered) + copied
        self.seen.append((Parts(*on_device, full, whole_gradients, tensors), _in_words(moment)))


def _in_words(moment: Moment) -> str:
    name = moment.unit or "the root"
    if moment.event in (Event.FORWARD, Event.FORWARD_END):
        return f"in forward, at {name}"
    return f"in backward, at {name}" if moment.event is not Event.END else "at the end of backward"
