"""Rejects passes that a CUDA graph cannot capture, and reports passes to watchers.

A graph replays the work that was given to the device, and nothing that the host did. So anything
that makes the host wait, decide or communicate is rejected when a captured pass begins, in one line
that names it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from .residency import Reason, Residency
from .unit import State, Unit

if TYPE_CHECKING:
    from .forward import Schedule


class Watcher(Protocol):
    """Is notified of every pass that begins."""

    def note_pass(self, schedule: Schedule) -> None: ...


#: The watchers of passes; usually none.
watching: list[Watcher] = []


@contextlib.contextmanager
def watch_passes(watcher: Watcher) -> Generator[None, None, None]:
    """Tell ``watcher`` of the passes that begin in this context."""
    watching.append(watcher)
    try:
        yield
    finally:
        watching.remove(watcher)


def tell_watchers(schedule: Schedule) -> None:
    """A pass of the schedule's units begins."""
    for watcher in watching:
        watcher.note_pass(schedule)


def tell_groups(units: Iterable[Unit], capturing: bool) -> None:
    """Tell the units' process groups that collectives are captured from now on, or carried out."""
    for group in {group for unit in units for group in unit.groups}:
        group.note_capturing(capturing)


def obstacle(units: Iterable[Unit]) -> str | None:
    """The reason why passes of these units cannot be captured in a CUDA graph; None if they can."""
    for unit in units:
        if unit.device.type != "cuda":
            return (
                f"unit {unit.name!r} computes on {unit.device.type}, and CUDA graphs are for GPUs"
            )
        if unit.offloads:
            return (
                f"unit {unit.name!r} keeps its parameters on the host (CPUOffload), which waits "
                "for the device in every backward"
            )
        if not all(group.runs_ahead for group in unit.groups if group.size > 1):
            return f"unit {unit.name!r} communicates over gloo, for which the host waits; use NCCL"
        if unit.reduction.comm_hook is not None:
            return (
                f"the gradients of unit {unit.name!r} are reduced by a hook (register_comm_hook), "
                "after which ranks vote on the host"
            )
        if unit.joining is not None:
            return f"unit {unit.name!r} runs inside Join, for which ranks communicate on the host"
    return None


def check_can_be_captured(
    units: Sequence[Unit], residencies: Mapping[Unit, Residency], is_first: bool
) -> None:
    """Refuse (RuntimeError) a captured pass that would break its capture, or fail in replays.

    ``is_first``: the pass before it was not captured.
    """
    reason = obstacle(units)
    if reason is None and is_first:
        reason = _left_over(units, residencies)
    if reason is not None:
        raise RuntimeError(f"This step cannot be captured in a CUDA graph: {reason}")


def _left_over(units: Sequence[Unit], residencies: Mapping[Unit, Residency]) -> str | None:
    """Work that was begun before a capture, and cannot be completed in it."""
    for unit in units:
        if unit.state is State.UNSHARDING:
            return (
                f"unit {unit.name!r} is being all-gathered since before the capture (unshard()); "
                "wait() for it, or call it in the captured step"
            )
        if residencies[unit].reason is Reason.PINNED:
            return (
                f"a backward with create_graph=True ended before the capture, and the one that "
                f"follows needs the full parameters of unit {unit.name!r}; run it first"
            )
        if any(handle.keeps_local_gradients for handle in unit.handles):
            return (
                f"unit {unit.name!r} has unreduced gradients from before the capture (no_sync), "
                "which replays would not find: run all micro-batches in the captured step"
            )
    return None
