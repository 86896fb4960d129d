"""Ranks that have ended without an error while others go on, and maybe wait for them in vain.

The launcher cannot see whether a rank is inside a collective. It can see whether a rank computes:
one that saves or draws at the end of a training does, one that waits over gloo does not. One that
waits on a GPU looks busy, too. So idle ranks are told of soon, others only after minutes, and what
is said is true of a healthy run as well.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["tell_of_early_ends"]

#: The launcher's ranks that have not ended, by their places on this machine, and all of them.
_RUNNING = "_running_local_ranks"
_STARTED = "subprocess_handlers"
#: Seconds for which ranks must have been idle before it is told that they are, and seconds after
#: which it is told that the others have ended even so.
_SECONDS_IDLE = 20.0
_SECONDS_APART = 600.0
#: The part of a core that a process takes while it waits: torch has threads that wake up at times.
_IDLE = 0.1


@dataclass(frozen=True)
class _Activity:
    """Seconds that processes have computed so far, and whether one of them wants to right now.

    On a machine with too much to do, who wants to compute may not be let for a while.
    """

    seconds: float
    wants_to: bool


@dataclass
class _EarlyEnds:
    """When the first rank of an attempt had ended, and since when those that go on are idle."""

    since: float
    idle_since: float
    activity: _Activity | None = None
    told: bool = False


_early_ends: weakref.WeakKeyDictionary[Any, _EarlyEnds] = weakref.WeakKeyDictionary()


def tell_of_early_ends(agent: Any, ranks: Any) -> None:
    """Say, once in an attempt, which ranks have ended and which go on. Called again and again.

    ``agent`` and ``ranks`` are the launcher's own.
    """
    running = getattr(ranks, _RUNNING)
    ended = set(getattr(ranks, _STARTED)) - running
    if not (ended and running):
        return
    now = time.monotonic()
    known = _early_ends.setdefault(ranks, _EarlyEnds(now, now))
    if known.told:
        return
    processes = ranks.pids()
    idle = _are_idle(known, _activity_of([processes[place] for place in running]), now)
    if not idle and now - known.since < _SECONDS_APART:
        return
    known.told = True
    workers = agent._worker_group.workers
    print(
        f"{_numbered(workers, ended)} ended {now - known.since:.0f} s ago, without an error. "
        f"{'Still running, but idle' if idle else 'Still running'}: "
        f"{_numbered(workers, running).lower()}. Who waits in a collective for a rank that has "
        "ended waits in vain: if nothing more happens, look whether all ranks have the same number "
        "of batches.",
        file=sys.stderr,
        flush=True,
    )


def _are_idle(known: _EarlyEnds, activity: _Activity | None, now: float) -> bool:
    """Whether the ranks that go on have computed next to nothing for some time, as far as known."""
    before, seconds = known.activity, now - known.idle_since
    if before is None or activity is None or activity.wants_to:
        busy = True
    else:
        # Fewer than before: one of them has ended, and does not count any more.
        spent = activity.seconds - before.seconds
        busy = not 0 <= spent <= _IDLE * max(seconds, 1.0)
    if busy:
        known.activity, known.idle_since = activity, now
    return not busy and seconds >= _SECONDS_IDLE


def _activity_of(processes: list[int]) -> _Activity | None:
    """What the kernel says of ``processes``, see proc(5); nothing where it says nothing."""
    ticks, wants_to = 0, False
    try:
        for process in processes:
            facts = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            wants_to |= facts[0] in "RD"
            ticks += int(facts[11]) + int(facts[12])
        return _Activity(ticks / os.sysconf("SC_CLK_TCK"), wants_to)
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def _numbered(workers: Any, places: set[int]) -> str:
    numbers = sorted(workers[place].global_rank for place in places)
    return f"{'Rank' if len(numbers) == 1 else 'Ranks'} {', '.join(map(str, numbers))}"
