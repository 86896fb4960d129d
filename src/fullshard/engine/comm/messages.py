"""Tensors in the form in which backends get them: real numbers, or bytes."""

from __future__ import annotations

import torch


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or the real and imaginary parts of a complex one: backends sum real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of ``tensor``, since backends do not support all dtypes.

    As in :func:`own_alias`, nothing else holds the tensor that is returned.
    """
    return tensor.view(-1).view(torch.uint8)


def own_alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as real numbers, in a tensor that nothing else holds."""
    return as_real(tensor).detach()
