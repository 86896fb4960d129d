"""The learning rate schedule: warm-up, then decay. Pure arithmetic."""

from __future__ import annotations

import math

from ..options import Options

__all__ = ["learning_rate"]


def learning_rate(options: Options, step: int) -> float:
    """The learning rate at ``step``, counted from 1: up to the peak, then down to a fraction."""
    peak, end = options.learning_rate, options.learning_rate * options.final_fraction
    if step <= options.warmup:
        return peak * step / options.warmup
    done = (step - options.warmup) / max(1, options.steps - options.warmup)
    if options.schedule == "constant":
        return peak
    if options.schedule == "linear":
        return peak + (end - peak) * min(done, 1.0)
    return end + (peak - end) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
