"""What ``fullshard train --trace`` shows beside its measurements: the step that was planned."""

from __future__ import annotations

import torch

from fullshard.tracing.records import CAUSES, Foretold

from ..options import Options
from .fit import time_of
from .machine import Machine, machine_of
from .memory import Prediction, predict
from .prediction import Subject, rehearse

__all__ = ["foretold_step"]


def foretold_step(
    subject: Subject, options: Options, ranks: int, device: torch.device
) -> list[Foretold]:
    """The time of a step on ``device``, if its speed is known, and the memory at its peak.

    Converts the subject's model to compute precision.
    """
    machine: Machine | None = machine_of(device)
    seconds_of = None if machine is None else machine.seconds_of
    found = rehearse(subject, options, ranks, device, seconds_of=seconds_of)
    memory = _foretold_memory(predict(found.sizes, found.moments, found.facts))
    if machine is None:
        return memory
    return [Foretold("step", time_of(found, options, machine), None, "seconds"), *memory]


def _foretold_memory(predicted: Prediction) -> list[Foretold]:
    """The memory at the peak, by the names of a trace's causes."""
    parts = {
        "shards": predicted.peak.shards,
        "optimizer": predicted.peak.optimizer,
        "gradients": predicted.peak.gradients,
        "unsharded": predicted.peak.full_parameters,
        "reduce_buffers": predicted.peak.whole_gradients,
        "rest": predicted.peak.activations,
    }
    rows = [Foretold("peak memory", predicted.total, None, "bytes")]
    return rows + [Foretold(CAUSES[cause], size, None, "bytes") for cause, size in parts.items()]
