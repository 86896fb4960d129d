"""The part of ``fullshard plan`` about time: of a step, of candidates, and a page of both."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from fullshard.tracing.analysis import seconds_by_kind, summarized
from fullshard.tracing.records import TraceData, UnitFacts, What
from fullshard.tracing.report import duration_text
from fullshard.wrap.render import size_text

from ..options import Options
from ..words import counted
from .fit import Candidate, Question, rates_of
from .machine import MACHINES, Machine, machine_named
from .prediction import Rehearsal
from .step_time import host_seconds, simulate

__all__ = [
    "Timing",
    "fit_table",
    "fit_text",
    "foretold_trace",
    "machine_for",
    "network_text",
    "time_text",
]

#: The fact that says what limits a foretold step, if it is the host.
LIMIT = "limit"
#: Rows of the table of candidates.
_ROWS = 8
#: A host that needs this part of a step to give it out is what limits it.
_LIMITS = 0.9
#: As many GPUs as a host usually has.
_RANKS_OF_A_HOST = 8


@dataclass(frozen=True)
class Timing:
    """The options about time: a page, the machine's speed, the fastest options that fit."""

    picture: Path | None = None
    fit: str | None = None
    machine: str | None = None
    flops: str | None = None
    bandwidth: str | None = None

    @property
    def is_asked_for(self) -> bool:
        return any(value is not None for value in dataclasses.astuple(self))


def machine_for(timing: Timing, device: torch.device, device_memory: str | None) -> Machine:
    """The machine that is named, or that the device's memory is named after."""
    name = timing.machine
    if name is None:
        wanted = (device_memory or "").lower()
        named = (known for known in MACHINES if known in wanted)
        name = next(named, "cpu" if device.type == "cpu" else "h100")
    return machine_named(name, timing.flops, timing.bandwidth)


def foretold_trace(found: Rehearsal, options: Options, machine: Machine) -> TraceData:
    """The step as a trace."""
    root = f"(root) {found.description.model_class}"
    rates = rates_of(options, machine, root)
    trace = simulate(found.sizes, found.moments, found.facts, rates)
    strategy = found.facts.options.strategy.name
    units = [UnitFacts(u.path or root, u.elements, strategy) for u in found.description.units]
    ranks = found.facts.ranks
    summaries = [dataclasses.replace(summarized(trace), rank=rank) for rank in range(ranks)]
    facts = {
        "machine": machine.name,
        "network": f"{machine.network / 1e9:g} GB/s",
        "batch": f"{options.batch} x {options.sequence} tokens per step",
    }
    host = host_seconds(found.sizes, found.moments, rates)
    if found.facts.policy.runs_ahead and host > _LIMITS * trace.steps[0].seconds:
        facts[LIMIT] = f"the host, which takes {duration_text(host)} to give out a step"
    model = found.description.model_class
    return TraceData(model, units, [trace], summaries, is_foretold=True, facts=facts)


def time_text(data: TraceData, machine: Machine) -> str:
    """A sentence on how long a step takes, and how much of it waits for communication."""
    (trace,) = data.ranks
    by_kind = seconds_by_kind(trace)
    waits = by_kind.get(What.WAIT_ALL_GATHER, 0.0) + by_kind.get(What.WAIT_REDUCE, 0.0)
    seconds = trace.steps[0].seconds
    limit = data.facts.get(LIMIT)
    advice = "larger batches, fewer units or captured steps help."
    return (
        f"A step takes about {duration_text(seconds)} on {machine.name} with a network of "
        f"{machine.network / 1e9:g} GB/s per rank; {100 * waits / seconds:.0f} % of it waits for "
        "communication." + (f" The limit is {limit}: {advice}" if limit else "")
    )


def network_text(timing: Timing, machine: Machine, ranks: int) -> str | None:
    """That ranks of several hosts are planned with the links of one, if that is so."""
    if timing.bandwidth is not None or machine.name == "cpu" or ranks <= _RANKS_OF_A_HOST:
        return None
    return (
        f"{machine.network / 1e9:g} GB/s is what the GPUs of one host have between them, and "
        f"{ranks} ranks are on several hosts: give the bandwidth of the network between these for "
        "each rank, such as --bandwidth 50G."
    )


def nothing_fits_text(question: Question, tried: Sequence[Candidate], device: str) -> str:
    """That nothing fits, and what comes closest."""
    ranks = counted(question.ranks, "rank")
    least = min(tried, key=lambda each: each.memory, default=None)
    closest = (
        "a single unit is larger"
        if least is None
        else f"the least is {size_text(least.memory)} ({_in_words(question, least)})"
    )
    return (
        f"No combination fits {device} on {ranks}, of which 0.9 is usable: {closest}. Use more "
        "ranks, shorter sequences, or a smaller model."
    )


def fit_text(question: Question, best: Candidate, device: str) -> str:
    """Name the fastest options that fit, in a sentence."""
    tokens = best.sequences_per_second * best.options.sequence
    host = f" It takes {size_text(best.host)} of each rank's host." if best.host else ""
    return (
        f"The fastest that fits {device}: {_in_words(question, best)}: "
        f"{duration_text(best.seconds)} per step, {tokens:,.0f} tokens/s on "
        f"{counted(question.ranks, 'rank')} of {question.machine.name} with a network of "
        f"{question.machine.network / 1e9:g} GB/s.{host}"
    )


def fit_table(question: Question, found: Sequence[Candidate]) -> Table:
    """The fastest candidates, the best batch of each combination."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    # Wide enough for the longest of the words, also in a narrow terminal.
    table.add_column("strategy", min_width=len("shard_grad_op"))
    table.add_column("with", min_width=len("checkpointing,"))
    table.add_column("units", overflow="fold")
    for name in ("seq/rank", "memory", "step", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    seen: set[tuple[object, ...]] = set()
    for each in found:
        options = each.options
        kind = (options.strategy, *_extras(options), options.wrap)
        if kind in seen or len(seen) == _ROWS:
            continue
        seen.add(kind)
        table.add_row(
            options.strategy,
            ", ".join(_extras(options)) or "-",
            "one" if options.wrap == "none" else options.wrap,
            str(options.batch // question.shares),
            size_text(each.memory),
            duration_text(each.seconds),
            f"{each.sequences_per_second * options.sequence:,.0f}",
        )
    return table


def _in_words(question: Question, candidate: Candidate) -> str:
    options = candidate.options
    units = "one unit" if options.wrap == "none" else f"units by {options.wrap}"
    each = counted(options.batch // question.shares, "sequence") + " per rank and pass"
    return ", ".join([options.strategy, *_extras(options), units, each])


def _extras(options: Options) -> list[str]:
    return [
        *(["checkpointing"] if options.checkpoint_activations else []),
        *(["offload"] if options.offload else []),
    ]
