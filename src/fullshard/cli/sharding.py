"""Turning options into the wrapper's arguments: strategy, wrapping policy, precision. Pure."""

from __future__ import annotations

import difflib
import functools

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullshard import Communication, MixedPrecision, ShardingStrategy
from fullshard.wrap import ModuleWrapPolicy, decide, size_based_auto_wrap_policy
from fullshard.wrap.selection import Policy

from .options import Options
from .problems import BadInput

__all__ = [
    "STRATEGIES",
    "checkpoint_units",
    "communication",
    "compute_dtype",
    "mixed_precision",
    "wrap_policy",
]

STRATEGIES = {
    "full_shard": ShardingStrategy.FULL_SHARD,
    "shard_grad_op": ShardingStrategy.SHARD_GRAD_OP,
    "no_shard": ShardingStrategy.NO_SHARD,
    "hybrid_shard": ShardingStrategy.HYBRID_SHARD,
}


_ON_THE_WIRE = {
    "full": None,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "float8": torch.float8_e4m3fn,
}


def compute_dtype(options: Options) -> torch.dtype:
    """The dtype of full parameters and activations."""
    return torch.bfloat16 if options.precision == "bfloat16" else torch.float32


def mixed_precision(options: Options) -> MixedPrecision | None:
    """The mixed precision of the options; gradients are always reduced in float32."""
    if options.precision == "float32":
        return None
    return MixedPrecision(param_dtype=compute_dtype(options), reduce_dtype=torch.float32)


def communication(options: Options) -> Communication | None:
    """The communication options; None if they are the defaults."""
    all_gather, reduce = _ON_THE_WIRE[options.all_gather], _ON_THE_WIRE[options.reduce]
    if all_gather is None and reduce is None and not options.secondary_shards:
        return None
    return Communication(all_gather, reduce, secondary_shards=options.secondary_shards)


def wrap_policy(model: nn.Module, wrap: str) -> Policy | None:
    """The policy for the option ``wrap``: class names, ``size=N``, or ``none``."""
    if wrap == "none":
        return None
    if wrap.startswith("size="):
        number = wrap.removeprefix("size=").replace("_", "")
        if not number.isdigit():
            raise BadInput(f"wrap expects size=N with a whole number N, but got {wrap!r}")
        return functools.partial(size_based_auto_wrap_policy, min_num_params=int(number))
    known: dict[str, set[type[nn.Module]]] = {}
    for module in model.modules():
        known.setdefault(type(module).__name__, set()).add(type(module))
    names = [name.strip() for name in wrap.split(",")]
    for name in names:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.3) or [*known]
            raise BadInput(
                f"wrap expects names of module classes, size=N or none, but "
                f"{type(model).__name__} has no {name!r}; did you mean {' or '.join(nearest)}?"
            )
    return ModuleWrapPolicy(set().union(*(known[name] for name in names)))


def checkpoint_units(model: nn.Module, policy: Policy | None) -> None:
    """Apply activation checkpointing to every module that will become a unit."""
    for decision in decide(model, policy).decisions:
        module = decision.module
        # A captured step cannot keep the state of random numbers, of which no preset uses any.
        module.forward = functools.partial(
            checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False
        )
