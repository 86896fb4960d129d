"""Between two attempts of the elastic launcher: why there is another one, or why there is none;
and within one, which ranks have ended long before the others.

The launcher itself tells of a failure only when it starts ranks no more, and starts them again
whatever the failure was, after half a minute if one of them does not end when it is told to. It
has no way to be asked for more than the method that its agents override; where a version of torch
has another one, ranks run all the same, and less is said.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from .failures import failures_of, render

__all__ = ["attempts_watched"]

#: The agent's method that looks at the ranks, and its number of restarts that are left.
_LOOKS = "_monitor_workers"
_RESTARTS = "_remaining_restarts"
#: The agent's ranks, and seconds in which they must end after one of them failed. Whatever they
#: would do in more, such as to save, they would have to do with that one.
_RANKS = "_pcontext"
_SECONDS_TO_END = 5
#: Those of its ranks that have not ended, by their places on this machine, and all of them.
_RUNNING = "_running_local_ranks"
_STARTED = "subprocess_handlers"
#: Seconds for which the ranks that go on must be idle before it is told that the others have ended;
#: who saves, or draws a picture, is not. Seconds after which it is told in any case: who waits for
#: others on a GPU is not idle either.
_SECONDS_IDLE = 20.0
_SECONDS_APART = 600.0
#: The part of a core that a process takes while it waits: torch has threads that wake up at times.
_IDLE = 0.1


@dataclass
class _EarlyEnds:
    """Ranks of an attempt that have ended before others, and what these have done since."""

    since: float
    idle_since: float
    seconds_of_cores: float | None
    told: bool = False


_early_ends: weakref.WeakKeyDictionary[Any, _EarlyEnds] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def attempts_watched() -> Iterator[None]:
    """Inside the context, say why ranks are started again, soon, and do not after bad input."""
    look = vars(LocalElasticAgent).get(_LOOKS)
    if not callable(look):
        yield
        return

    def look_closely(agent: Any, *arguments: Any, **options: Any) -> Any:
        _hasten_end(getattr(agent, _RANKS, None))
        result = look(agent, *arguments, **options)
        # A torch that is other than expected must not end a run that would go on.
        with contextlib.suppress(AttributeError, TypeError):
            _after_look(agent, result)
            _tell_of_early_ends(agent)
        return result

    setattr(LocalElasticAgent, _LOOKS, look_closely)
    try:
        yield
    finally:
        setattr(LocalElasticAgent, _LOOKS, look)


def _hasten_end(ranks: Any) -> None:
    """Have ``ranks`` be killed soon where they were not ended by a signal to the launcher."""
    close = getattr(ranks, "close", None)
    if close is None or "close" in vars(ranks):
        return

    def close_soon(death_sig: Any = None, timeout: int = _SECONDS_TO_END) -> None:
        if death_sig is None:
            timeout = min(timeout, _SECONDS_TO_END)
        close(death_sig, timeout)

    ranks.close = close_soon


def _after_look(agent: Any, result: Any) -> None:
    restarts = getattr(agent, _RESTARTS)
    if not result.is_failed() or restarts <= 0:
        return
    failures = failures_of(result.failures)
    if failures[0].bad_input:
        setattr(agent, _RESTARTS, 0)
        return
    print(
        f"{render(failures)}\nStarting again; {_restarts(restarts - 1)} after this.",
        file=sys.stderr,
        flush=True,
    )


def _restarts(number: int) -> str:
    return f"{number} more restart{'s' * (number != 1)}"


def _tell_of_early_ends(agent: Any) -> None:
    """Say, once, that ranks have ended without an error, where others may wait for them in vain."""
    ranks = getattr(agent, _RANKS)
    running = getattr(ranks, _RUNNING)
    ended = set(getattr(ranks, _STARTED)) - running
    if not (ended and running):
        return
    now = time.monotonic()
    processes = ranks.pids()
    used = _seconds_of_cores([processes[place] for place in running])
    known = _early_ends.setdefault(ranks, _EarlyEnds(now, now, used))
    if known.told:
        return
    idle = _is_idle(known, used, now)
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


def _is_idle(known: _EarlyEnds, used: float | None, now: float) -> bool:
    """Whether the ranks that go on have computed next to nothing for some time, as far as known."""
    if used is None or known.seconds_of_cores is None:
        return False
    spent = used - known.seconds_of_cores
    if not 0 <= spent <= _IDLE * max(now - known.idle_since, 1.0):  # less: another rank has ended
        known.idle_since, known.seconds_of_cores = now, used
    return now - known.idle_since >= _SECONDS_IDLE


def _seconds_of_cores(processes: list[int]) -> float | None:
    """What ``processes`` have computed so far; nothing where the kernel does not say."""
    ticks = 0
    try:
        for process in processes:
            facts = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            ticks += int(facts[11]) + int(facts[12])
        return ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def _numbered(workers: Any, places: set[int]) -> str:
    numbers = sorted(workers[place].global_rank for place in places)
    return f"{'Rank' if len(numbers) == 1 else 'Ranks'} {', '.join(map(str, numbers))}"
