"""Local optimizer state dicts: this rank's state as it is, by the names of what the rank holds.

They fit the ranks, the wrapping and the options that they were saved with, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

from .optim_facts import States
from .optim_parameters import Groups, Owned


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


def local_problems(groups: Groups, saved: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What was saved by other ranks, or with another wrapping, in words."""
    found: dict[str, list[tuple[Owned, tuple[int, ...]]]] = {}
    for owned in (owned for group in groups for owned in group):
        for key, value in saved.get(owned.path, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                found.setdefault(key, []).append((owned, tuple(value.shape)))
    errors: list[str] = []
    for key, items in found.items():
        wrong = [(owned, shape) for owned, shape in items if shape != owned.local_shape]
        if len(wrong) == len(items) > 1 and len({shape for _, shape in wrong}) == 1:
            continue  # Of one shape for all parameters: not a value for each element.
        errors += [
            f"size mismatch for {key!r} of {owned.path}: a local state dict fits the ranks and the "
            f"wrapping it was saved with; it has shape {shape}, this rank's part of the parameter "
            f"{owned.local_shape}"
            for owned, shape in wrong
        ]
    return errors


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
