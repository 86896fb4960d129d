"""How much memory a step takes on a rank: pure arithmetic over sizes and a list of moments.

``activations.py`` finds the moments, by running the bare model without memory. What is unsharded,
resharded and reduced at each of them, the engine's own policy says.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from fullshard.engine.runtime.policy import AfterForward, Policy, UnitOptions, UnitPlan

__all__ = ["Event", "Facts", "Moment", "Parts", "Prediction", "UnitSizes", "predict"]


class Event(Enum):
    """What happens to a unit, and so to memory."""

    FORWARD = auto()
    FORWARD_END = auto()
    BACKWARD = auto()
    GRADIENTS = auto()
    END = auto()


@dataclass(frozen=True)
class Moment:
    """An event of a unit, with the memory that the bare model takes then and until the next one.

    ``tensors`` are activations and whatever else operations returned; ``gradients`` are whole
    parameter gradients that wait until their unit has all of them. All in bytes.
    """

    event: Event
    unit: str
    tensors: int
    gradients: int
    peak_tensors: int
    peak_gradients: int


@dataclass(frozen=True)
class UnitSizes:
    """One unit's bytes on a rank.

    ``shard`` and ``gradient_shard`` stay; ``full`` is there while gathered, ``reduce_buffer`` from
    the last gradient until they are reduced, and ``reduced`` is what the reduce writes.
    """

    path: str
    shard: int
    gradient_shard: int
    full: int
    reduce_buffer: int
    reduced: int


@dataclass(frozen=True)
class Facts:
    """What else decides: the units' options, their device, and how the ranks talk."""

    options: UnitOptions
    policy: Policy
    ranks: int
    #: Bytes of optimizer state per byte of gradient shards; AdamW keeps two numbers.
    optimizer_factor: float = 2.0
    #: Whether shards, their gradients and the optimizer's state are in the host's memory.
    offloaded: bool = False
    #: Whether gradients of an earlier backward are there while the next one runs.
    accumulates: bool = False
    #: Over gloo a reduce receives into memory as large as what it sends; two ranks, half of it.
    received_part: float = 1.0

    @functools.cached_property
    def plan(self) -> UnitPlan:
        """What the engine decides for units with these options."""
        return self.policy.plan(self.options)


@dataclass(frozen=True)
class Parts:
    """Bytes that a device has to have on a rank, by what they are for.

    ``whole_gradients`` are those that are not reduced yet, with the buffers that reduce them.
    """

    shards: int
    gradients: int
    optimizer: int
    full_parameters: int
    whole_gradients: int
    activations: int

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(dataclasses.astuple(self))


@dataclass(frozen=True)
class Prediction:
    """The parts at the moment when their sum is largest, what each is at most, and when it is.

    ``host`` is what rests in the host's memory beside the device's.
    """

    peak: Parts
    at_most: Parts
    when: str
    host: int

    @property
    def total(self) -> int:
        """What the device has to have."""
        return self.peak.total


def predict(units: Sequence[UnitSizes], moments: Sequence[Moment], facts: Facts) -> Prediction:
    """Follow one step and return its largest moment."""
    forwards = sum(moment.event is Event.FORWARD for moment in moments)
    walk = _Walk({unit.path: unit for unit in units}, facts, forwards)
    for moment in moments:
        walk.follow(moment)
    peak, when = max(walk.seen, key=lambda seen: seen[0].total)
    each = zip(*(dataclasses.astuple(parts) for parts, _ in walk.seen), strict=True)
    resting = sum(walk.resting)
    return Prediction(peak, Parts(*map(max, each)), when, resting if facts.offloaded else 0)


@dataclass
class _Walk:
    """Where the engine is in its step."""

    units: dict[str, UnitSizes]
    facts: Facts
    #: Forwards of units that have not begun yet.
    forwards_to_come: int
    seen: list[tuple[Parts, str]] = field(default_factory=list)
    #: Units with full parameters, by path.
    gathered: dict[str, None] = field(default_factory=dict)
    #: Units in the order in which their forward ended, which backward follows in reverse.
    passed: list[str] = field(default_factory=list)
    #: The unit whose forward began last.
    begun: str | None = None
    owed: str | None = None
    #: The unit whose gradients are staged, and the one whose are being reduced.
    pending: UnitSizes | None = None
    in_flight: UnitSizes | None = None
    gradients: int = 0

    def __post_init__(self) -> None:
        shards = sum(unit.shard for unit in self.units.values())
        trained = sum(unit.gradient_shard for unit in self.units.values())
        #: Shards, their gradients when all are there, and the optimizer's state.
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
            # What was reduced behind compute has none left to run behind.
            self._carry_out_reduce(moment)
            self._consider_all(moment)

    def _consider_all(self, moment: Moment) -> None:
        """Count what is there at a moment, with the gradients that are on their way."""
        waiting = self.pending.reduce_buffer if self.pending else 0
        waiting += self._reduce_memory(self.in_flight) if self.in_flight else 0
        self._consider(moment.peak_tensors, moment.peak_gradients + waiting, moment)

    def _apply(self, moment: Moment, unit: UnitSizes) -> None:
        is_root = moment.unit == ""
        if moment.event is Event.FORWARD:
            self.gathered[unit.path] = None
            self.begun = unit.path
            self.forwards_to_come -= 1
        elif moment.event is Event.FORWARD_END:
            self.passed.append(unit.path)
            decision = self.facts.plan.after_forward(
                is_outermost=is_root,
                forwards_left=self.forwards_to_come + 1 if self.begun == unit.path else None,
                # Whole shards that are computed with as they are take nothing.
                holds_copy=not self.facts.options.is_sharded,
            )
            if decision is AfterForward.RESHARD:
                self._free_after_forward(unit.path)
        elif moment.event is Event.BACKWARD:
            self._settle()
            self.gathered[unit.path] = None
            before = self.passed.index(unit.path) - 1
            ahead = self.facts.plan.prefetches_before_backward
            if before >= 0 and ahead and self._may_prefetch(is_first=is_root):
                self.gathered[self.passed[before]] = None
        elif moment.event is Event.GRADIENTS:
            self.gathered.pop(unit.path, None)
            # Copied into the reduce buffer while autograd still holds them.
            self._consider(moment.tensors, moment.gradients + unit.reduce_buffer, moment)
            self.pending = unit

    def _may_prefetch(self, is_first: bool) -> bool:
        return self.facts.policy.may_prefetch_in_backward(self.facts.options, is_first=is_first)

    def _free_after_forward(self, path: str) -> None:
        self._settle()
        if self.facts.plan.releases_late_in_forward:
            self.owed = path
        else:
            self.gathered.pop(path, None)

    def _settle(self) -> None:
        if self.owed is not None:
            self.gathered.pop(self.owed, None)
            self.owed = None

    def _carry_out_reduce(self, moment: Moment) -> None:
        if self.in_flight is not None:
            self._finish_reduce(self.in_flight)
            self.in_flight = None
        unit, self.pending = self.pending, None
        if unit is None:
            return
        if self.facts.plan.reduces_behind_compute:
            self.in_flight = unit
            return
        self._consider(moment.tensors, moment.gradients + self._reduce_memory(unit), moment)
        self._finish_reduce(unit)

    def _finish_reduce(self, unit: UnitSizes) -> None:
        if not self.facts.accumulates:
            self.gradients += unit.gradient_shard

    def _reduce_memory(self, unit: UnitSizes) -> int:
        """What a reduce takes: what it sends, what it receives, and what it writes."""
        if not self.facts.options.is_sharded:
            return unit.reduce_buffer
        received = int(unit.reduce_buffer * self.facts.received_part)
        return unit.reduce_buffer + received + unit.reduced

    def _consider(self, tensors: int, whole_gradients: int, moment: Moment) -> None:
        shards, _, optimizer = self.resting
        on_device = (shards, self.gradients, optimizer) if not self.facts.offloaded else (0, 0, 0)
        full = sum(self.units[path].full for path in self.gathered)
        self.seen.append((Parts(*on_device, full, whole_gradients, tensors), _in_words(moment)))


def _in_words(moment: Moment) -> str:
    name = moment.unit or "the root"
    if moment.event in (Event.FORWARD, Event.FORWARD_END):
        return f"in forward, at {name}"
    return f"in backward, at {name}" if moment.event is not Event.END else "at the end of backward"
