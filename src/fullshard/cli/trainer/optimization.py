"""The optimizer of ``fullshard train`` and its learning rate: warm-up, then decay."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

import fullshard

from ..options import Options

__all__ = ["keep_numbers_on_gpu", "learning_rate", "make_optimizer", "set_learning_rate"]


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


def make_optimizer(options: Options, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW; or Muon, which updates whole matrices by about as much as AdamW would."""

    def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        decay = options.weight_decay
        return torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=decay, fused=True)

    def muon(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        decay = options.weight_decay
        return torch.optim.Muon(parameters, weight_decay=decay, adjust_lr_fn="match_rms_adamw")

    if options.optimizer == "adamw":
        return adamw(model.parameters())
    return fullshard.optim.whole(muon, model, rest=adamw)


def keep_numbers_on_gpu(
    optimizer: torch.optim.Optimizer, captures: bool, device: torch.device
) -> None:
    """For captured steps, have the learning rate and the count of steps on the GPU, or not.

    After a checkpoint was loaded: its run may have been captured, and this one not, or vice versa.
    """
    for group in optimizer.param_groups:
        rate = float(group["lr"])
        group["lr"] = torch.tensor(rate, device=device) if captures else rate
        group["capturable"] = captures


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate; one that is a tensor is filled, since a graph reads its memory."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
