"""Between two attempts of the elastic launcher: why there is another one, or why there is none;
and within one, which ranks have ended long before the others.

The launcher itself tells of a failure only when it starts ranks no more, and starts them again
whatever the failure was, after half a minute if one of them does not end when it is told to. It
has no way to be asked for more than the method that its agents override; where a version of torch
has another one, ranks run all the same, and less is said.
"""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from collections.abc import Iterator
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
#: Seconds after which it is told that some ranks have ended and others have not.
_SECONDS_APART = 20.0

#: When the first of an attempt's ranks had ended, and whether that was told.
_first_ends: weakref.WeakKeyDictionary[Any, tuple[float, bool]] = weakref.WeakKeyDictionary()


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
        f"{render(failures)}\nStarting again; {restarts - 1} more restarts after this.",
        file=sys.stderr,
        flush=True,
    )


def _tell_of_early_ends(agent: Any) -> None:
    """Say, once, which ranks have ended without an error while others go on: maybe in vain."""
    ranks = getattr(agent, _RANKS)
    running = getattr(ranks, _RUNNING)
    ended = set(getattr(ranks, _STARTED)) - running
    if not (ended and running):
        return
    since, told = _first_ends.setdefault(ranks, (time.monotonic(), False))
    seconds = time.monotonic() - since
    if told or seconds < _SECONDS_APART:
        return
    _first_ends[ranks] = since, True
    workers = agent._worker_group.workers
    print(
        f"Ended {seconds:.0f} s ago, without an error: {_numbered(workers, ended)}. Still running: "
        f"{_numbered(workers, running)}. Who waits for a rank that has ended does so in vain: look "
        "whether all ranks have the same number of batches.",
        file=sys.stderr,
        flush=True,
    )


def _numbered(workers: Any, places: set[int]) -> str:
    numbers = sorted(workers[place].global_rank for place in places)
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(map(str, numbers))}"
