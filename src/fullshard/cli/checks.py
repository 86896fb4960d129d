"""Checking the options of a run before anything is written or started."""

from __future__ import annotations

import os

import torch

from .data import read_text
from .model import GPT, Size
from .options import Options
from .problems import BadInput
from .sharding import wrap_policy
from .words import counted

__all__ = ["check_batch", "check_communication", "check_ranks", "check_run", "check_size", "cores"]

#: With more ranks per core than this, ranks mostly wait for each other.
_RANKS_PER_CORE = 4


def check_run(options: Options, ranks: int) -> None:
    """Raise ``BadInput`` if a run with these options on ``ranks`` ranks in total cannot work."""
    check_size(options)
    check_batch(options, ranks)
    if options.optimizer == "muon" and options.capture:
        raise BadInput(
            "steps of muon cannot be captured, because it reads its learning rate on the host; "
            "leave out --capture, or use --optimizer adamw"
        )
    check_communication(options)
    if options.trace and options.capture:
        raise BadInput(
            "--trace records steps that Python runs, and with --capture none does: leave one of "
            "them out"
        )
    text = read_text(options.data)
    if len(text) <= options.sequence:
        raise BadInput(
            f"a sequence of {options.sequence:,} tokens is longer than the data, "
            f"{text.description}; pass a folder with more text as --data, or a shorter --sequence"
        )
    # A tiny model has the same classes. Not on the meta device, where torch takes a second to
    # initialise it.
    with torch.random.fork_rng():
        wrap_policy(GPT(Size(layers=1, heads=1, width=1), context=1), options.wrap)


def check_size(options: Options) -> None:
    """Raise ``BadInput`` if the width is not divisible by the number of heads."""
    size = options.size()
    if size.width % size.heads:
        raise BadInput(
            f"width {size.width} is not divisible by {size.heads} heads; change --width or --heads"
        )


def check_communication(options: Options) -> None:
    """Raise ``BadInput`` if communication options do not apply to the strategy."""
    encodes = options.all_gather != "full" or options.reduce != "full"
    if options.strategy == "no_shard" and (encodes or options.secondary_shards):
        raise BadInput(
            "--all-gather, --reduce and --secondary-shards are for sharded parameters, and "
            "--strategy no_shard shards none; choose another strategy"
        )
    if options.strategy == "shard_grad_op" and options.secondary_shards:
        raise BadInput(
            "--secondary-shards is for strategies that all-gather again for backward, and "
            "--strategy shard_grad_op does not; use full_shard or hybrid_shard"
        )


def check_batch(options: Options, ranks: int) -> None:
    """Raise ``BadInput`` if the batch cannot be divided equally among ranks and passes."""
    parts = ranks * options.accumulate
    if options.batch % parts:
        passes = f" x {options.accumulate} backward passes" if options.accumulate > 1 else ""
        nearest = max(parts, round(options.batch / parts) * parts)
        raise BadInput(
            f"a batch of {counted(options.batch, 'sequence')} is not divisible by "
            f"{counted(ranks, 'rank')}{passes}; use --batch {nearest}, the nearest multiple"
        )


def check_ranks(ranks: int, device: str) -> None:
    """Raise ``BadInput`` if this machine has too few GPUs or cores for ``ranks``."""
    if device == "cuda":
        available = torch.cuda.device_count()
        if not available:
            raise BadInput("--device cuda needs a GPU, but torch finds none; use --device cpu")
        if ranks > available:
            raise BadInput(
                f"{ranks} ranks need one GPU each, but this machine has {available}; use --ranks "
                f"{available}, or --device cpu"
            )
    elif ranks > _RANKS_PER_CORE * cores():
        raise BadInput(
            f"{ranks} ranks are too many for {counted(cores(), 'core')}; use at most --ranks "
            f"{_RANKS_PER_CORE * cores()}"
        )


def cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
