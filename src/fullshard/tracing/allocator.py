"""Reads how much memory is in use from the allocator's own counters."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch


class _Mallinfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``, with the bytes in use in arenas and in mappings."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


_mallinfo: Any = getattr(ctypes.CDLL(None), "mallinfo2", None)
if _mallinfo is not None:
    _mallinfo.restype = _Mallinfo


def host_bytes_in_use() -> int:
    """The bytes that are allocated on the host now; 0 if they are not counted."""
    if _mallinfo is None:
        return 0
    found = _mallinfo()
    return int(found.uordblks + found.hblkhd)


def counter_of(device: torch.device) -> Callable[[], int] | None:
    """A function that returns the memory of ``device`` in use; None if it is not counted."""
    if device.type == "cpu":
        return host_bytes_in_use if _mallinfo is not None else None
    # Not memory_allocated, which takes many times as long: it flattens all statistics.
    statistics = getattr(torch.get_device_module(device), "memory_stats_as_nested_dict", None)
    if statistics is None:
        return None
    return lambda: int(statistics(device)["allocated_bytes"]["all"]["current"])
