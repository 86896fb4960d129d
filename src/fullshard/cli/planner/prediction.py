"""Predicting the memory that a training step takes on a rank, from the options of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fullshard.api import BackwardPrefetch, MixedPrecision, ShardingStrategy
from fullshard.engine.runtime.policy import UnitOptions, policy_for
from fullshard.wrap import describe
from fullshard.wrap.description import Description, Layout, UnitDescription

from ..model import GPT, VOCABULARY, next_token_loss
from ..options import Options
from ..sharding import STRATEGIES, checkpoint_units, compute_dtype, mixed_precision, wrap_policy
from .activations import Cost, record_step
from .memory import Facts, Moment, Prediction, UnitSizes, predict
from .optimizer_state import optimizer_factor

__all__ = ["Loss", "Subject", "gpt_subject", "predict_memory", "token_loss"]

#: By option, the bytes of an encoded number, with its part of a scale; none, where it is sent as it
#: is, in memory that is counted elsewhere.
_BYTES_ON_THE_WIRE = {"full": 0.0, "bfloat16": 2.0, "int8": 1 + 4 / 256, "float8": 1 + 4 / 256}

#: Computes the loss of one pass on one rank: ``loss(model, sequences, length)``.
Loss = Callable[[nn.Module, int, int], torch.Tensor]


@dataclass(frozen=True)
class Subject:
    """A model on the meta device, in float32, with its loss function."""

    model: nn.Module
    loss: Loss


def gpt_subject(options: Options, vocabulary: int = VOCABULARY) -> Subject:
    """The model that ``fullshard train`` trains with these options, for any vocabulary size."""
    with torch.device("meta"):
        return Subject(GPT(options.size(), options.sequence, vocabulary), token_loss)


def token_loss(model: nn.Module, sequences: int, length: int) -> torch.Tensor:
    """The loss of a language model on meta tokens, which have no values."""
    return next_token_loss(
        model, torch.empty(sequences, length + 1, dtype=torch.long, device="meta")
    )


@dataclass(frozen=True)
class Rehearsal:
    """A step that was run on the meta device: all that memory and time follow from."""

    description: Description
    sizes: Sequence[UnitSizes]
    moments: Sequence[Moment]
    facts: Facts


def predict_memory(
    subject: Subject,
    options: Options,
    ranks: int,
    device: torch.device,
    layout: Layout = "flat",
) -> tuple[Description, Prediction]:
    """Return the units of a model, and the memory that a step takes on each of ``ranks`` ranks.

    The units are the wrapper's, or with the layout in rows those of ``fully_shard``.
    Converts the subject's model to compute precision.
    """
    found = rehearse(subject, options, ranks, device, layout)
    return found.description, predict(found.sizes, found.moments, found.facts)


def rehearse(
    subject: Subject,
    options: Options,
    ranks: int,
    device: torch.device,
    layout: Layout = "flat",
    seconds_of: Cost | None = None,
) -> Rehearsal:
    """Run a step on the meta device; ``seconds_of`` estimates how long its operations take.

    Converts the subject's model to compute precision.
    """
    description = describe_units(subject.model, options, ranks, layout)
    moments = record_moments(subject, options, ranks, device, description, seconds_of)
    return assemble(subject.model, description, moments, options, ranks, device, layout)


def describe_units(
    model: nn.Module, options: Options, ranks: int, layout: Layout = "flat"
) -> Description:
    """The units that a model would have."""
    return describe(
        model,
        wrap_policy(model, options.wrap),
        world_size=1 if options.strategy == "no_shard" else ranks,
        mixed_precision=mixed_precision(options),
        use_orig_params=True,
        layout=layout,
    )


def record_moments(
    subject: Subject,
    options: Options,
    ranks: int,
    device: torch.device,
    description: Description,
    seconds_of: Cost | None = None,
) -> list[Moment]:
    """The events of a pass of the unwrapped model, with their memory and maybe their times.

    Converts the subject's model to compute precision, and checkpoints its activations if asked.
    """
    model = subject.model
    if options.checkpoint_activations:
        checkpoint_units(model, wrap_policy(model, options.wrap))
    sequences = options.batch // (ranks * options.accumulate)
    return record_step(
        model.to(compute_dtype(options)),
        [unit.path for unit in description.units],
        lambda: subject.loss(model, sequences, options.sequence),
        device,
        seconds_of,
    )


def assemble(
    model: nn.Module,
    description: Description,
    moments: Sequence[Moment],
    options: Options,
    ranks: int,
    device: torch.device,
    layout: Layout = "flat",
) -> Rehearsal:
    """All that memory and time follow from; only ``moments`` had to be found by a rehearsal."""
    is_accelerator = device.type != "cpu"
    below = [path for unit in description.units if unit.path for path in unit.places]
    is_sharded = options.strategy != "no_shard" and ranks > 1
    factor = optimizer_factor(options.optimizer, model, below, ranks, is_sharded)
    facts = Facts(
        _unit_options(options, ranks),
        policy_for(device.type),
        ranks,
        optimizer_factor=factor,
        offloaded=options.offload and is_accelerator,
        accumulates=options.accumulate > 1,
        received_part=0.0 if is_accelerator else 0.5 if ranks == 2 else 1.0,
    )
    units = [_sizes(unit, options, facts, layout) for unit in description.units]
    return Rehearsal(description, units, moments, facts)


def _unit_options(options: Options, ranks: int) -> UnitOptions:
    """The options of every unit; on a single rank the strategy is ``NO_SHARD``."""
    strategy = ShardingStrategy.NO_SHARD if ranks == 1 else STRATEGIES[options.strategy]
    return UnitOptions(
        strategy,
        mixed_precision(options) or MixedPrecision(),
        BackwardPrefetch.BACKWARD_PRE,
        forward_prefetch=False,
        limit_all_gathers=True,
        use_orig_params=True,
    )


def _sizes(unit: UnitDescription, options: Options, facts: Facts, layout: Layout) -> UnitSizes:
    trained = 1 - unit.frozen_elements / unit.elements if unit.elements else 0
    gradient_shard = int(unit.shard_bytes * trained)
    whole = not facts.options.is_sharded
    # Without sharding and mixed precision, the unit computes with the shard itself.
    uses_shard = whole and options.precision == "float32" and not facts.offloaded
    # A single rank reduces nothing.
    reduces = facts.ranks > 1
    shards_in_all = 1 if whole else facts.ranks
    gathered = unit.gathered_bytes if layout == "rows" and not whole else 0
    reduce_buffer, messages = gradient_shard * shards_in_all if reduces else 0, 0
    if not whole:
        gathered += int(unit.elements * _BYTES_ON_THE_WIRE[options.all_gather])
        others = (facts.ranks - 1) / facts.ranks
        # Those that are sent, and as many that are received.
        messages = int(2 * others * unit.elements * trained * _BYTES_ON_THE_WIRE[options.reduce])
        if messages and options.precision == "bfloat16" and facts.policy.runs_ahead:
            # Not widened to float32 before they are encoded.
            reduce_buffer //= 2
    return UnitSizes(
        path=unit.path,
        shard=unit.shard_bytes,
        gradient_shard=gradient_shard,
        full=0 if uses_shard else unit.gathered_bytes,
        reduce_buffer=reduce_buffer,
        reduced=gradient_shard,
        gathered=gathered,
        messages=messages,
    )
