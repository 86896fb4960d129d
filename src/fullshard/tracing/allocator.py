"""Reads how much memory is in use from the allocator's own counters."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

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


class InUse(NamedTuple):
    """The bytes in use now, and the most that were since the allocator's own peak was reset; 0 if
    it keeps no peak.
    """

    now: int
    most: int = 0


def counter_of(device: torch.device) -> Callable[[], InUse] | None:
    """A function that returns the memory of ``device`` in use; None if it is not counted."""
    if device.type == "cpu":
        return _host_in_use if _mallinfo is not None else None
    # Not memory_allocated, which takes many times as long: it flattens all statistics.
    statistics = getattr(torch.get_device_module(device), "memory_stats_as_nested_dict", None)
    if statistics is None:
        return None

    def in_use() -> InUse:
        allocated = statistics(device)["allocated_bytes"]["all"]
        return InUse(int(allocated["current"]), int(allocated["peak"]))

    return in_use


def forget_peak(device: torch.device) -> None:
    """Have the allocator of ``device`` count its peak from now on, if it keeps one."""
    if device.type != "cpu":
        torch.get_device_module(device).reset_peak_memory_stats(device)


def _host_in_use() -> InUse:
    return InUse(host_bytes_in_use())
