"""The loss of a user's language model on tokens.

Such models return logits or a loss, or an object, a dictionary or a tuple that contains one of
them, as those of transformers do. Any other output raises an error that describes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["NotUnderstood", "loss_on_tokens", "prepare_for_training"]

_ADVICE = "return the model and loss(model, sequences, length)"


class NotUnderstood(Exception):
    """A model's output contains neither a loss nor logits. The message describes the output."""


def prepare_for_training(model: nn.Module) -> None:
    """Turn off the key-value cache of a transformers model.

    The cache is for generating text. Training programs turn it off, and with activation
    checkpointing they have to: the recomputed forward would append to it a second time.
    """
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False


def loss_on_tokens(model: nn.Module, sequences: int, length: int) -> torch.Tensor:
    """The loss of ``model`` on meta tokens, which have no values."""
    tokens = torch.empty(sequences, length, dtype=torch.long, device="meta")
    parameters = inspect.signature(model.forward).parameters
    if "targets" in parameters:
        # As in nanoGPT, which without targets computes the logits of the last position only.
        return _loss_of(model(tokens, targets=torch.empty_like(tokens)), has_targets=True)
    if "decoder_input_ids" in parameters:
        return _loss_of(model(tokens, decoder_input_ids=torch.empty_like(tokens)))
    return _loss_of(model(tokens))


def _loss_of(output: Any, has_targets: bool = False) -> torch.Tensor:
    """The loss in a model's output, or the loss of the logits in it."""
    found = _loss_or_logits(output, has_targets)
    if found is None:
        raise NotUnderstood(
            f"the model returned {_described(output)}, but a tensor, or 'loss' or 'logits' in an "
            f"object, dictionary or tuple was expected; {_ADVICE}"
        )
    if found.numel() == 1:
        return found
    if found.dim() < 2:
        raise NotUnderstood(
            f"the model returned a tensor of shape {tuple(found.shape)}, which is neither a loss "
            f"nor logits; {_ADVICE}"
        )
    targets = torch.empty(found.shape[:-1], dtype=torch.long, device=found.device)
    return F.cross_entropy(found.float().flatten(0, -2), targets.flatten())


def _loss_or_logits(output: Any, has_targets: bool) -> torch.Tensor | None:
    if isinstance(output, torch.Tensor):
        return output
    for name in ("loss", "logits"):
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(value, torch.Tensor):
            return value
    if not isinstance(output, tuple | list):
        return None
    tensors = [part for part in output if isinstance(part, torch.Tensor)]
    # A scalar is the loss only if targets were given. Otherwise it may be an auxiliary loss.
    losses = [part for part in tensors if has_targets and part.numel() == 1]
    return next(iter([*losses, *tensors]), None)


def _described(output: Any) -> str:
    """Describe a model's output by its type and the names or types in it."""
    kind = type(output).__name__
    if isinstance(output, Mapping):
        return f"a {kind} with {', '.join(map(str, output)) or 'nothing in it'}"
    if isinstance(output, tuple | list):
        return f"a {kind} of {', '.join(type(part).__name__ for part in output) or 'nothing'}"
    return f"a value of type {kind}"
