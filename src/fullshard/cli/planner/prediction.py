"""The memory that training with given options will take on a rank, before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from fullshard.api import BackwardPrefetch, MixedPrecision, ShardingStrategy
from fullshard.engine.runtime.policy import UnitOptions, policy_for
from fullshard.wrap import describe
from fullshard.wrap.description import Description, UnitDescription

from ..model import GPT, VOCABULARY, next_token_loss
from ..options import Options
from ..sharding import STRATEGIES, checkpoint_units, compute_dtype, mixed_precision, wrap_policy
from .activations import record_step
from .memory import Facts, Prediction, UnitSizes, predict

__all__ = ["Loss", "Subject", "gpt_subject", "predict_memory", "token_loss"]

#: The loss of one backward of one rank: of a model, sequences, and tokens in each.
Loss = Callable[[nn.Module, int, int], torch.Tensor]


@dataclass(frozen=True)
class Subject:
    """A model on the meta device, in float32, and how its loss is computed."""

    model: nn.Module
    loss: Loss


def gpt_subject(options: Options, vocabulary: int = VOCABULARY) -> Subject:
    """The model that ``fullshard train`` trains with these options, on bytes or on other tokens."""
    with torch.device("meta"):
        return Subject(GPT(options.size(), options.sequence, vocabulary), token_loss)


def token_loss(model: nn.Module, sequences: int, length: int) -> torch.Tensor:
    """The loss of a language model, on tokens that have no values."""
    return next_token_loss(
        model, torch.empty(sequences, length + 1, dtype=torch.long, device="meta")
    )


def predict_memory(
    subject: Subject, options: Options, ranks: int, device: torch.device
) -> tuple[Description, Prediction]:
    """What the units are, and what a step takes on each of ``ranks`` ranks of ``device``.

    Leaves the subject's model in compute precision.
    """
    model = subject.model
    policy = wrap_policy(model, options.wrap)
    shards = 1 if options.strategy == "no_shard" else ranks
    description = describe(
        model,
        policy,
        world_size=shards,
        mixed_precision=mixed_precision(options),
        use_orig_params=True,
    )
    if options.checkpoint_activations:
        checkpoint_units(model, policy)
    sequences = options.batch // (ranks * options.accumulate)
    moments = record_step(
        model.to(compute_dtype(options)),
        [unit.path for unit in description.units],
        lambda: subject.loss(model, sequences, options.sequence),
        device,
    )
    is_accelerator = device.type != "cpu"
    facts = Facts(
        _unit_options(options, ranks),
        policy_for(device.type),
        ranks,
        offloaded=options.offload and is_accelerator,
        accumulates=options.accumulate > 1,
        received_part=0.0 if is_accelerator else 0.5 if ranks == 2 else 1.0,
    )
    units = [_sizes(unit, options, facts) for unit in description.units]
    return description, predict(units, moments, facts)


def _unit_options(options: Options, ranks: int) -> UnitOptions:
    """What training asks of every unit; a rank alone has nothing to shard."""
    strategy = ShardingStrategy.NO_SHARD if ranks == 1 else STRATEGIES[options.strategy]
    return UnitOptions(
        strategy,
        mixed_precision(options) or MixedPrecision(),
        BackwardPrefetch.BACKWARD_PRE,
        forward_prefetch=False,
        limit_all_gathers=True,
        use_orig_params=True,
    )


def _sizes(unit: UnitDescription, options: Options, facts: Facts) -> UnitSizes:
    trained = 1 - unit.frozen_elements / unit.elements if unit.elements else 0
    gradient_shard = int(unit.shard_bytes * trained)
    whole = not facts.options.is_sharded
    # Where nothing is sharded, the shard itself is computed on, if its precision is right.
    stands = whole and options.precision == "float32" and not facts.offloaded
    # A rank alone has nothing to reduce, and uses its gradients as they are.
    reduces = facts.ranks > 1
    shards_in_all = 1 if whole else facts.ranks
    return UnitSizes(
        path=unit.path,
        shard=unit.shard_bytes,
        gradient_shard=gradient_shard,
        full=0 if stands else unit.gathered_bytes,
        reduce_buffer=gradient_shard * shards_in_all if reduces else 0,
        reduced=gradient_shard,
    )
