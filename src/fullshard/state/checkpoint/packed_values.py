"""Values that wrap inner tensors, outside of units: in a checkpoint as bytes, as inside of units.

So checkpoints of quantised weights are the same, whether the model is sharded or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...engine.params.packed import InnerTensors
from ...engine.params.tensor_parallel import is_distributed
from ..model.sharded_tensors import is_sharded


def as_bytes(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with the bytes of all inner tensors in place of each value that wraps them."""
    found = dict(state)
    for name, value in state.items():
        packing = _packing_of(value)
        if packing is not None:
            found[name] = packing.pack(value.detach())
    return found


def as_objects(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse, for a model that is to load the state dict."""
    found = dict(state)
    if not any(_packing_of(parameter) for parameter in model.parameters()):
        return found
    for name, value in model.state_dict().items():
        packing = _packing_of(value)
        if packing is not None and isinstance(found.get(name), torch.Tensor):
            found[name] = packing.saved(found[name].to(value.device))
    return found


def _packing_of(value: Any) -> InnerTensors | None:
    if not hasattr(value, "__tensor_flatten__") or is_distributed(value) or is_sharded(value):
        return None
    try:
        return InnerTensors.of(value)
    except ValueError:
        # Wraps tensors that wrap others: saving it says that it cannot be saved.
        return None
