"""Local optimizer state dicts: this rank's state as it is, by the names of what the rank holds.

They fit the ranks, the wrapping and the options that they were saved with, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

from .consensus import States
from .params import Groups, Owned

#: Where a local state dict says which shapes it fits.
SHAPES = "local_shapes"


def local_state(groups: Groups, states: States, to_cpu: bool) -> dict[str, dict[str, Any]]:
    """The state of each parameter that the optimizer holds, by its name in the wrapped model."""

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().to("cpu" if to_cpu else leaf.device, copy=True)

    return {
        owned.path: tree_map(copied, dict(states[owned]))
        for group in groups
        for owned in group
        if owned in states
    }


def local_shapes(groups: Groups) -> dict[str, tuple[int, ...]]:
    """The shape of what this rank holds of each parameter."""
    return {owned.path: owned.local_shape for group in groups for owned in group}


def local_problems(groups: Groups, saved: Mapping[str, tuple[int, ...]]) -> list[str]:
    """What was saved by other ranks, or with another wrapping, in words."""
    return [
        f"size mismatch for {path}: a local state dict fits the ranks and the wrapping it was "
        f"saved with; it is for a part of shape {tuple(saved[path])}, this rank's has {shape}"
        for path, shape in local_shapes(groups).items()
        if path in saved and tuple(saved[path]) != shape
    ]


def local_state_to_load(
    groups: Groups, saved: Mapping[str, Mapping[str, Any]]
) -> dict[Owned, dict[str, Any]]:
    """What :func:`local_state` saved, for the optimizer."""
    return {
        owned: tree_map(_cloned, dict(saved[owned.path]))
        for group in groups
        for owned in group
        if owned.path in saved
    }


def _cloned(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
