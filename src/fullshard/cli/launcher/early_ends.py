"""Reporting ranks that have ended without an error while others may wait for them forever.

The launcher cannot see whether a rank is inside a collective, only whether it uses the CPU. A rank
that saves a checkpoint at the end of training does; one that waits over gloo does not; one that
waits on a GPU looks busy. So idle ranks are reported soon and busy ones only after minutes, in
words that also hold for a healthy run.
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

#: The launcher's attributes with the local ranks that are running, and with all local ranks.
_RUNNING = "_running_local_ranks"
_STARTED = "subprocess_handlers"
#: Seconds after which idle ranks are reported, and seconds after which busy ranks are.
_SECONDS_IDLE = 20.0
_SECONDS_APART = 600.0
#: The fraction of a core that a waiting process uses: some threads of torch's wake up at times.
_IDLE = 0.1


@dataclass(frozen=True)
class _Activity:
    """CPU seconds that processes have used so far, and whether one of them is runnable now.

    On an overloaded machine, a runnable process may get no CPU time for a while.
    """

    seconds: float
    wants_to: bool


@dataclass
class _EarlyEnds:
    """The time when the first rank of an attempt ended, and since when the others are idle."""

    since: float
    idle_since: float
    activity: _Activity | None = None
    told: bool = False


_early_ends: weakref.WeakKeyDictionary[Any, _EarlyEnds] = weakref.WeakKeyDictionary()


def tell_of_early_ends(agent: Any, ranks: Any) -> None:
    """Print, once per attempt, which ranks have ended and which are still running.

    The launcher calls this repeatedly; ``agent`` and ``ranks`` are its own objects.
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
        f"{_numbered(workers, running).lower()}. A rank that waits in a collective for one that "
        "has ended waits forever: if nothing more happens, check that all ranks have the same "
        "number of batches.",
        file=sys.stderr,
        flush=True,
    )


def _are_idle(known: _EarlyEnds, activity: _Activity | None, now: float) -> bool:
    """Return True if the running ranks have used almost no CPU time for some time."""
    before, seconds = known.activity, now - known.idle_since
    if before is None or activity is None or activity.wants_to:
        busy = True
    else:
        # Negative if one of the processes has ended and its time no longer counts.
        spent = activity.seconds - before.seconds
        busy = not 0 <= spent <= _IDLE * max(seconds, 1.0)
    if busy:
        known.activity, known.idle_since = activity, now
    return not busy and seconds >= _SECONDS_IDLE


def _activity_of(processes: list[int]) -> _Activity | None:
    """The activity of ``processes`` according to the kernel, see proc(5); None if unknown."""
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
