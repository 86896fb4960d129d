"""The learning rate of every step: warm-up, then a schedule. Pure arithmetic."""

from __future__ import annotations

import math

from ..options import Options

__all__ = ["learning_rate"]


def learning_rate(options: Options, step: int) -> float:
    """The rate at ``step`` (the first is 1): up to the peak, then down to a fraction of it."""
    peak, end = options.learning_rate, options.learning_rate * options.final_fraction
    if step <= options.warmup:
        return peak * step / options.warmup
    done = (step - options.warmup) / max(1, options.steps - options.warmup)
    if options.schedule == "constant":
        return peak
    if options.schedule == "linear":
        return peak + (end - peak) * min(done, 1.0)
    return end + (peak - end) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
