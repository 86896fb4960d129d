"""The backends of a process group: one group may have several, for tensors on different devices.

``init_process_group()`` and ``init_process_group("cpu:gloo,cuda:nccl")`` make such groups, and
``torch.distributed.get_backend`` then names no single backend.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def backend_of(group: Any, device_type: str) -> str:
    """The name of the backend that runs ``group``'s collectives on tensors of a type of device.

    Empty for objects that are not process groups.
    """
    if not isinstance(group, dist.ProcessGroup):
        return ""
    try:
        name: str = group._get_backend(torch.device(device_type)).name().lower()
    except (AttributeError, RuntimeError):
        # The group has no backend for this device, or is one that is written in Python.
        name = dist.get_backend(group)
    return name


def is_gloo(group: Any, device_type: str | None = None) -> bool:
    """Return True if gloo runs the collectives of ``group``: on one type of device, or on all."""
    if device_type is not None:
        return "gloo" in backend_of(group, device_type)
    types = [device.type for device in getattr(group, "_device_types", ())]
    return bool(types) and all("gloo" in backend_of(group, each) for each in types)
