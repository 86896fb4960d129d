"""The parts of a trace: pure data, made by the recorder, or by the planner for a predicted step.

Times are seconds since the trace began, on one clock for all ranks; sizes are bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class What(StrEnum):
    """Kinds of records. The first group occupies compute, the last one runs beside it."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    WAIT_ALL_GATHER = "wait for all-gather"
    WAIT_REDUCE = "wait for reduce-scatter"
    COPY = "copy"
    RESHARD = "reshard"
    ENGINE = "engine"
    OPTIMIZER = "optimizer"
    #: The program's own work: data, loss, clipping, logging.
    OUTSIDE = "outside of units"

    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"


#: What does not occupy compute.
COLLECTIVES = frozenset({What.ALL_GATHER, What.REDUCE_SCATTER})
#: What compute does while it has nothing to compute.
WAITS = {What.WAIT_ALL_GATHER: What.ALL_GATHER, What.WAIT_REDUCE: What.REDUCE_SCATTER}


@dataclass(frozen=True, slots=True)
class Record:
    """One thing that happened to one unit.

    ``issued`` is when the host gave it out, ``started`` and ``ended`` are when it ran. On a host
    that computes, compute starts when it is issued. ``unit`` is empty for the program's own work.
    """

    what: What
    unit: str
    issued: float
    started: float
    ended: float
    nbytes: int = 0

    @property
    def seconds(self) -> float:
        return self.ended - self.started


@dataclass(frozen=True, slots=True)
class Step:
    """One step: from the end of the one before it to the end of its optimizer's step."""

    number: int
    started: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.started


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a rank at one moment, by cause.

    ``rest`` is activations and all else; None if not all memory is counted.
    """

    at: float
    shards: int
    optimizer: int
    gradients: int
    unsharded: int
    reduce_buffers: int
    rest: int | None

    @property
    def total(self) -> int:
        return sum(getattr(self, cause) for cause in CAUSES if cause != "rest") + (self.rest or 0)


#: The causes of memory, from permanent to temporary ones, and their names for users.
CAUSES = {
    "shards": "parameter shards",
    "optimizer": "optimizer state",
    "gradients": "gradient shards",
    "unsharded": "unsharded parameters",
    "reduce_buffers": "reduce buffers",
    "rest": "activations and the rest",
}


@dataclass(frozen=True, slots=True)
class UnitFacts:
    """Facts about a unit that are known before anything is measured."""

    name: str
    elements: int
    strategy: str


@dataclass(frozen=True)
class RankTrace:
    """The records of one rank. ``device`` is the kind of device it computed on, such as cpu or
    cuda.
    """

    rank: int
    host: str
    device: str
    steps: Sequence[Step]
    #: In the order in which they were issued; those of compute may lie inside of others.
    records: Sequence[Record]
    memory: Sequence[Memory] = ()
    #: The largest total of all memory; None if nothing is known of it.
    peak: int | None = None

    def moved(self, seconds: float) -> RankTrace:
        """The same on a clock that is ahead by ``seconds``."""
        return dataclasses.replace(
            self,
            steps=[Step(s.number, s.started + seconds, s.ended + seconds) for s in self.steps],
            records=[
                dataclasses.replace(
                    r,
                    issued=r.issued + seconds,
                    started=r.started + seconds,
                    ended=r.ended + seconds,
                )
                for r in self.records
            ],
            memory=[dataclasses.replace(m, at=m.at + seconds) for m in self.memory],
        )


@dataclass(frozen=True, slots=True)
class RankSummary:
    """The little that is known of every rank, also of those whose records are not kept.

    Seconds per step: all of it, and what compute waited for all-gathers and reduce-scatters.
    """

    rank: int
    host: str
    step: float
    waits: float
    peak: int | None = None

    @property
    def busy(self) -> float:
        return self.step - self.waits


@dataclass(frozen=True)
class Foretold:
    """One predicted number, and the measured one; None if one is missing."""

    name: str
    foretold: float | None
    measured: float | None
    #: ``seconds`` or ``bytes``.
    measure: str


@dataclass(frozen=True)
class TraceData:
    """A whole trace: some ranks in detail, all of them in short."""

    model: str
    units: Sequence[UnitFacts]
    ranks: Sequence[RankTrace]
    summaries: Sequence[RankSummary]
    #: Whether the planner predicted this, and nothing was run.
    is_foretold: bool = False
    comparison: Sequence[Foretold] = ()
    facts: Mapping[str, str] = field(default_factory=dict)

    def steps_of(self, rank: int) -> Sequence[Step]:
        """The steps of one of the ranks that are kept in detail."""
        return next(trace.steps for trace in self.ranks if trace.rank == rank)


def as_plain(value: Any) -> Any:
    """``value`` as lists, dicts and numbers, for JSON; dataclasses become dicts."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: as_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_plain(each) for key, each in value.items()}
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Sequence):
        return [as_plain(each) for each in value]
    return value
