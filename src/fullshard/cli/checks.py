"""Whether a run can work, found out before anything is written or started."""

from __future__ import annotations

import os

import torch

from .data import read_text
from .model import GPT, Size
from .options import Options
from .problems import BadInput
from .sharding import wrap_policy
from .words import counted

__all__ = ["check_batch", "check_ranks", "check_run", "check_size", "cores"]

#: More ranks than this on each core only wait for each other.
_RANKS_PER_CORE = 4


def check_run(options: Options, ranks: int) -> None:
    """Refuse what cannot work, with one line that says why. ``ranks`` are those of all machines."""
    check_size(options)
    check_batch(options, ranks)
    text = read_text(options.data)
    if len(text) <= options.sequence:
        raise BadInput(
            f"a sequence of {options.sequence:,} tokens is longer than the data, "
            f"{text.description}; give more text with --data, or a shorter --sequence"
        )
    # Any size has the same classes. On the meta device, drawing values takes torch a second.
    with torch.random.fork_rng():
        wrap_policy(GPT(Size(layers=1, heads=1, width=1), context=1), options.wrap)


def check_size(options: Options) -> None:
    """Refuse heads that do not divide the width."""
    size = options.size()
    if size.width % size.heads:
        raise BadInput(
            f"width {size.width} is not divisible by {size.heads} heads; change one of them"
        )


def check_batch(options: Options, ranks: int) -> None:
    """Refuse a batch of which ranks would get unequal parts, or none."""
    parts = ranks * options.accumulate
    if options.batch % parts:
        passes = f" x {options.accumulate} passes" if options.accumulate > 1 else ""
        nearest = max(parts, round(options.batch / parts) * parts)
        raise BadInput(
            f"a batch of {counted(options.batch, 'sequence')} is not divisible by "
            f"{counted(ranks, 'rank')}{passes}; "
            f"the nearest that is: --batch {nearest}"
        )


def check_ranks(ranks: int, device: str) -> None:
    """Refuse more ranks on this machine than it has use for."""
    if device == "cuda":
        available = torch.cuda.device_count()
        if not available:
            raise BadInput("device cuda was asked for, but torch finds no GPU; use --device cpu")
        if ranks > available:
            raise BadInput(f"{ranks} ranks need a GPU each, but this machine has {available}")
    elif ranks > _RANKS_PER_CORE * cores():
        raise BadInput(
            f"{ranks} ranks are more than make sense on {counted(cores(), 'core')}; give at most "
            f"--ranks {_RANKS_PER_CORE * cores()}"
        )


def cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
