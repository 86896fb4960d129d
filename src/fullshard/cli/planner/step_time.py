"""Simulates the times of a step's all-gathers, compute and reduce-scatters.

``memory.py`` asks the engine's policy what happens at each moment of the rehearsed step; this walk
is the same, but each decision takes time, on two resources: compute, and a network that carries one
collective after the other. The result is a trace like one that was recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fullshard.tracing.records import Memory, RankTrace, Record, Step, What

from .machine import Machine
from .memory import Event, Facts, Moment, Parts, UnitSizes, Walk

__all__ = ["Rates", "host_seconds", "simulate"]

#: What AdamW reads and writes per byte of a float32 parameter: parameter, gradient, two averages.
_OPTIMIZER_TRAFFIC = 7


@dataclass(frozen=True)
class Rates:
    """The machine, and what else the time of a step depends on."""

    machine: Machine
    #: Backward passes in a step.
    passes: int = 1
    #: Bytes that a rank's shards have in the dtype that is all-gathered, per byte that they have.
    gathered_part: float = 1.0
    root: str = ""


def simulate(
    units: Sequence[UnitSizes], moments: Sequence[Moment], facts: Facts, rates: Rates
) -> RankTrace:
    """The trace of one step, as it would be."""
    records: list[Record] = []
    memory: list[Memory] = []
    now = 0.0
    forwards = [moment.unit for moment in moments if moment.event is Event.FORWARD]
    events = Counter(moment.unit for moment in moments if moment.event is not Event.END)
    for _ in range(rates.passes):
        walk = TimedWalk(
            {unit.path: unit for unit in units},
            facts,
            forwards.copy(),
            rates=rates,
            compute=now,
            network=now,
            host=now,
            records=records,
            memory=memory,
            events=events,
        )
        for moment in moments:
            walk.follow(moment)
        now = walk.compute
    now = _optimizer(units, facts, rates, now, records)
    records.sort(key=lambda record: record.issued)
    return RankTrace(0, "", rates.machine.name, [Step(1, 0.0, now)], records, memory)


def host_seconds(units: Sequence[UnitSizes], moments: Sequence[Moment], rates: Rates) -> float:
    """The time that the host takes to issue a step."""
    operations = max((moment.operations for moment in moments), default=0)
    machine = rates.machine
    return rates.passes * (operations * machine.per_operation + len(units) * machine.per_unit)


def _optimizer(
    units: Sequence[UnitSizes], facts: Facts, rates: Rates, now: float, records: list[Record]
) -> float:
    trained = sum(unit.gradient_shard for unit in units)
    machine = rates.machine
    bandwidth = machine.host_memory if facts.offloaded else machine.memory
    seconds = _OPTIMIZER_TRAFFIC * trained / bandwidth
    records.append(Record(What.OPTIMIZER, "", now, now, now + seconds))
    return now + seconds


@dataclass
class TimedWalk(Walk):
    """A walk through a step that knows what time it is.

    A device cannot have computed what its host has not given out yet: a unit's forward or backward
    lasts until then, as it does in a trace of a step that ran.
    """

    rates: Rates = field(default_factory=lambda: Rates(Machine("", 1, 1, 1, 1)))
    #: When compute, and the network, have done what they were given, and when the host gave it.
    compute: float = 0.0
    network: float = 0.0
    host: float = 0.0
    records: list[Record] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    #: The times at which all-gathers and reduce-scatters in flight end, by unit.
    gathers: dict[str, float] = field(default_factory=dict)
    reduces: dict[str, float] = field(default_factory=dict)
    #: The times at which the memory of the unit before the last, and of the last, became free.
    freed: list[float] = field(default_factory=lambda: [0.0, 0.0])
    #: The units inside of whose forward or backward compute is.
    inside: list[tuple[What, str]] = field(default_factory=list)
    seconds: float = 0.0
    operations: int = 0
    #: How many events a unit has in a pass, over which the host's work for it is spread.
    events: Mapping[str, int] = field(default_factory=dict)

    def follow(self, moment: Moment) -> None:
        self._compute_until(moment)
        before = len(self.seen)
        super().follow(moment)
        self._enter_or_leave(moment)
        parts = max((parts for parts, _ in self.seen[before:]), key=_total, default=None)
        if parts is not None:
            self.memory.append(_as_memory(self.compute, parts))

    def _compute_until(self, moment: Moment) -> None:
        end = self.compute + moment.seconds - self.seconds
        given_out = (moment.operations - self.operations) * self.rates.machine.per_operation
        if moment.event is not Event.END:
            given_out += self.rates.machine.per_unit / self.events[moment.unit]
        self.seconds, self.operations = moment.seconds, moment.operations
        if self.facts.policy.runs_ahead:
            self.host += given_out
            end = max(end, self.host)
        else:
            end += given_out
        if end <= self.compute:
            return
        if self.inside:
            what, unit = self.inside[-1]
            self._occupy(what, unit, end - self.compute)
        else:
            self.compute = end

    def _enter_or_leave(self, moment: Moment) -> None:
        unit, event = moment.unit, moment.event
        if event is Event.FORWARD:
            self.inside.append((What.FORWARD, unit))
        elif event is Event.BACKWARD:
            self.inside.append((What.BACKWARD, unit))
        elif self.inside and event is not Event.END:
            what = What.FORWARD if event is Event.FORWARD_END else What.BACKWARD
            if (what, unit) in self.inside:
                self.inside.remove((what, unit))

    def _name(self, path: str) -> str:
        return path or self.rates.root

    def _occupy(self, what: What, unit: str, seconds: float) -> None:
        begin, self.compute = self.compute, self.compute + seconds
        self.records.append(Record(what, self._name(unit), begin, begin, self.compute))

    def _communicate(self, what: What, path: str, nbytes: int, ready: float) -> float:
        """A collective that may begin when it is ``ready``; returns when it ends."""
        machine = self.rates.machine
        begin = max(self.network, ready)
        seconds = machine.collective(nbytes, self.facts.ranks)
        if self.facts.offloaded:
            # Shards come from the host, and gradient shards go there.
            seconds += self.units[path].shard / machine.host_link
        self.network = begin + seconds
        name = self._name(path)
        self.records.append(Record(what, name, ready, begin, self.network, nbytes))
        if machine.takes_compute:
            self._occupy(What.ENGINE, path, machine.takes_compute * seconds)
        return self.network

    # -- what the walk decides ----------------------------------------------------------------

    def _gather(self, path: str) -> None:
        if path not in self.gathered and self.facts.options.is_sharded:
            # A device is given it ahead of time, and gathers into what the last unit but one left.
            runs_ahead = self.facts.policy.runs_ahead
            ready = max(self.freed[0], self.host) if runs_ahead else self.compute
            self.gathers[path] = self._communicate(
                What.ALL_GATHER, path, self.units[path].full, ready
            )
        super()._gather(path)

    def _show_full(self, unit: UnitSizes, moment: Moment) -> None:
        super()._show_full(unit, moment)
        ended = self.gathers.pop(unit.path, 0.0)
        if ended > self.compute:
            self._occupy(What.WAIT_ALL_GATHER, unit.path, ended - self.compute)
        # Shards are cast as they are gathered, or copied where they are used.
        cast = unit.gathered or (unit.full if not self.facts.options.is_sharded else 0)
        if cast:
            self._occupy(What.COPY, unit.path, self.rates.machine.traffic(2 * cast))

    def _free(self, path: str) -> None:
        if path in self.gathered:
            self.freed = [self.freed[1], self.compute]
        super()._free(path)

    def _stage(self, unit: UnitSizes) -> None:
        # Full gradients in the compute dtype are read, and written in the reduce dtype.
        moved = unit.reduce_buffer * (1 + self.rates.gathered_part)
        self._occupy(What.COPY, unit.path, self.rates.machine.traffic(moved))
        super()._stage(unit)
        if self.facts.policy.reduces_at_once:
            self._reduce(unit)

    def _start_reduce(self, unit: UnitSizes) -> None:
        if not self.facts.policy.reduces_at_once:
            self._reduce(unit)

    def _reduce(self, unit: UnitSizes) -> None:
        # An all-reduce is a reduce-scatter and an all-gather.
        times = 1 if self.facts.options.is_sharded else 2
        self.reduces[unit.path] = self._communicate(
            What.REDUCE_SCATTER, unit.path, times * unit.reduce_buffer, self.compute
        )

    def _finish_reduce(self, unit: UnitSizes) -> None:
        super()._finish_reduce(unit)
        ended = self.reduces.pop(unit.path, 0.0)
        if ended > self.compute:
            self._occupy(What.WAIT_REDUCE, unit.path, ended - self.compute)


def _total(parts: Parts) -> int:
    return parts.total


def _as_memory(at: float, parts: Parts) -> Memory:
    return Memory(
        at,
        parts.shards,
        parts.optimizer,
        parts.gradients,
        parts.full_parameters,
        parts.whole_gradients,
        parts.activations,
    )
