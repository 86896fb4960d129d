"""``fullshard plan --fit``: the fastest combination of options that fits a device's memory.

Only running the model on the meta device takes time, and its memory and time grow by about as much
with every sequence of a batch. So it is run with three batches for each choice of units and of
checkpointing; all other candidates are arithmetic. The winner is then run as it is.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullshard.wrap.description import Description, Layout

from ..options import Options
from ..sharding import compute_dtype
from .machine import Machine
from .memory import Moment, predict
from .own_model import repeated_class
from .prediction import Rehearsal, Subject, assemble, describe_units, record_moments
from .step_time import Rates, simulate

__all__ = ["Candidate", "Question", "best_that_fit", "candidates_of", "rates_of", "time_of"]

#: Sequences of a rank that are tried, if the batch is not given.
_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128)
#: Those with which the model is run; what lies between and beyond is in proportion.
_REHEARSED = (1, 4, 16)


@dataclass(frozen=True)
class Question:
    """The question: which options are fastest for a model, a machine, and a limit of memory.

    ``given`` are options that stay as they are.
    """

    make_subject: Callable[[], Subject]
    options: Options
    given: Mapping[str, Any]
    ranks: int
    device: torch.device
    machine: Machine
    usable: int
    layout: Layout = "flat"

    @property
    def shares(self) -> int:
        """The parts of a batch: one for each rank and pass."""
        return self.ranks * self.options.accumulate


@dataclass(frozen=True)
class Candidate:
    """One combination of options, with its memory in bytes and its time in seconds."""

    options: Options
    memory: int
    host: int
    seconds: float

    @property
    def sequences_per_second(self) -> float:
        return self.options.batch / self.seconds


def best_that_fit(
    question: Question, candidates: Iterable[Candidate] | None = None
) -> list[Candidate]:
    """All combinations that fit, the one with most sequences per second first."""
    if candidates is None:
        candidates = candidates_of(question)
    found = [candidate for candidate in candidates if candidate.memory <= question.usable]
    exact: set[Options] = set()
    while found:
        # Of equally fast ones, that which takes least memory.
        found.sort(key=lambda each: (-round(each.sequences_per_second, 6), each.memory))
        best = found[0].options
        if best in exact:
            return found
        found[0] = _rehearsed(question, best)
        exact.add(best)
        if found[0].memory > question.usable:
            del found[0]
    return []


def candidates_of(question: Question) -> Iterator[Candidate]:
    """All combinations, but those of which a single unit does not fit."""
    for wrap, checkpoints in _ways_to_compute(question):
        base = dataclasses.replace(question.options, wrap=wrap, checkpoint_activations=checkpoints)
        model = question.make_subject().model
        if not _has_room_for_a_unit(question, base, model):
            continue
        passes = {sequences: _pass(question, base, sequences, model) for sequences in _REHEARSED}
        for strategy, offloads in _ways_to_shard(question, wrap):
            kept = dataclasses.replace(base, strategy=strategy, offload=offloads)
            one = passes[_REHEARSED[0]]
            description = describe_units(one.model, kept, question.ranks, question.layout)
            for sequences in _sequences(question):
                options = dataclasses.replace(kept, batch=sequences * question.shares)
                few, many = _REHEARSED[:2] if sequences < _REHEARSED[1] else _REHEARSED[1:]
                moments = between(
                    passes[few].moments,
                    passes[many].moments,
                    (sequences - few) / (many - few),
                )
                found = dataclasses.replace(one, moments=moments)
                yield _weighed(question, options, description, found)


def _has_room_for_a_unit(question: Question, options: Options, model: nn.Module) -> bool:
    units = describe_units(model, options, question.ranks, question.layout).units
    return max(unit.gathered_bytes for unit in units) < question.usable


@dataclass(frozen=True)
class _Pass:
    model: nn.Module
    moments: Sequence[Moment]


def _pass(question: Question, options: Options, sequences: int, model: nn.Module) -> _Pass:
    """Rehearse a step on ``model``, a model like the subject's that is not used otherwise."""
    options = dataclasses.replace(options, batch=sequences * question.shares)
    subject = question.make_subject()
    description = describe_units(subject.model, options, question.ranks, question.layout)
    seconds_of = question.machine.seconds_of
    moments = record_moments(
        subject, options, question.ranks, question.device, description, seconds_of
    )
    # The units' sizes are described by the model's own dtype, float32.
    return _Pass(model, moments)


def _rehearsed(question: Question, options: Options) -> Candidate:
    model = question.make_subject().model
    found = _pass(question, options, options.batch // question.shares, model)
    description = describe_units(found.model, options, question.ranks, question.layout)
    return _weighed(question, options, description, found)


def _weighed(
    question: Question, options: Options, description: Description, one_pass: _Pass
) -> Candidate:
    found = assemble(
        one_pass.model,
        description,
        one_pass.moments,
        options,
        question.ranks,
        question.device,
        question.layout,
    )
    predicted = predict(found.sizes, found.moments, found.facts)
    seconds = time_of(found, options, question.machine)
    return Candidate(options, predicted.total, predicted.host, seconds)


def time_of(found: Rehearsal, options: Options, machine: Machine) -> float:
    """Seconds of a rehearsed step."""
    trace = simulate(found.sizes, found.moments, found.facts, rates_of(options, machine))
    return trace.steps[0].seconds


def rates_of(options: Options, machine: Machine, root: str = "") -> Rates:
    """The rates that turn the moments of a step into its time."""
    part = compute_dtype(options).itemsize / torch.float32.itemsize
    return Rates(machine, options.accumulate, part, root)


def between(first: Sequence[Moment], second: Sequence[Moment], part: float) -> list[Moment]:
    """The moments of a pass that lies between two others, or beyond the second."""
    if len(first) != len(second):
        return list(second)

    def at(one: float, other: float) -> float:
        return one + (other - one) * part

    return [
        Moment(
            a.event,
            a.unit,
            int(at(a.tensors, b.tensors)),
            int(at(a.gradients, b.gradients)),
            int(at(a.peak_tensors, b.peak_tensors)),
            int(at(a.peak_gradients, b.peak_gradients)),
            at(a.seconds, b.seconds),
            b.operations,
        )
        for a, b in zip(first, second, strict=True)
    ]


def _ways_to_compute(question: Question) -> Iterator[tuple[str, bool]]:
    """Pairs of what to wrap and whether to checkpoint activations, which only units can do."""
    for wrap in _wraps(question):
        values = (False,) if wrap == "none" else (False, True)
        for checkpoints in _choices(question, "checkpoint_activations", values):
            yield wrap, checkpoints


def _ways_to_shard(question: Question, wrap: str) -> Iterator[tuple[str, bool]]:
    """Strategies, and whether to offload, where that makes a difference.

    The outermost unit stays unsharded after forward under both strategies.
    """
    differ = question.ranks > 1 and wrap != "none"
    strategies = ("full_shard", "shard_grad_op") if differ else ("full_shard",)
    offload = (False,) if question.device.type == "cpu" else (False, True)
    return itertools.product(
        _choices(question, "strategy", strategies), _choices(question, "offload", offload)
    )


def _choices(question: Question, name: str, values: Sequence[Any]) -> Sequence[Any]:
    return (question.given[name],) if name in question.given else values


def _sequences(question: Question) -> Sequence[int]:
    if "batch" in question.given:
        return (question.options.batch // question.shares,)
    return _SEQUENCES


def _wraps(question: Question) -> list[str]:
    """Units to try: the repeated modules, parts of these, and the whole model as one unit."""
    if "wrap" in question.given:
        return [question.options.wrap]
    model = question.make_subject().model
    repeated = repeated_class(model)
    if repeated is None:
        return ["none"]
    block = next(m for m in model.modules() if type(m).__name__ == repeated)
    parts = [type(m).__name__ for m in block.children() if len([*m.parameters()]) > 2]
    finer = [",".join(dict.fromkeys(parts))] if parts else []
    return [repeated, *finer, "none"]
