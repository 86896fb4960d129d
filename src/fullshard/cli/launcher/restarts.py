"""Reporting restarts of the elastic launcher, and preventing useless ones.

The launcher reports a failure only when no restarts are left. It restarts ranks after any failure,
and waits half a minute if one of them does not react to SIGTERM. It has no public hook for this, so
a method of its agent is wrapped; with a version of torch that has another method, ranks run all the
same and less is reported.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from .early_ends import tell_of_early_ends
from .failures import failures_of, render
from .hosts import HostsLost, watch_of

__all__ = ["Attempts", "attempts_watched"]

#: The agent's method that polls the ranks, and its attribute with the restarts that are left.
_LOOKS = "_monitor_workers"
_RESTARTS = "_remaining_restarts"
#: The agent's attribute with its ranks, and the seconds that ranks have to stop after a failure.
#: More time is of no use: to save, for example, they would need the rank that failed.
_RANKS = "_pcontext"
_STARTED = "subprocess_handlers"
_SECONDS_TO_END = 5


@dataclass
class Attempts:
    """Facts about the last attempt, beside the failures of its ranks on this host."""

    #: Why ranks failed on other hosts, a line for each.
    elsewhere: list[str] = field(default_factory=list)
    #: Ranks that had not ended when the time was up that a signal to the launcher left them.
    killed: list[int] = field(default_factory=list)


@contextlib.contextmanager
def attempts_watched(soon: Sequence[signal.Signals] = ()) -> Iterator[Attempts]:
    """Inside the context, report why ranks restart, restart soon, and never after bad input.

    An attempt also fails when another host is lost. ``soon`` are signals after which ranks have no
    more time to stop than after a failure.
    """
    attempts = Attempts()
    look = vars(LocalElasticAgent).get(_LOOKS)
    if not callable(look):
        yield attempts
        return

    def look_closely(agent: Any, *arguments: Any, **options: Any) -> Any:
        _hasten_end(agent, soon, attempts)
        result = look(agent, *arguments, **options)
        # A version of torch with other internals must not end the run.
        with contextlib.suppress(AttributeError, TypeError):
            _after_look(agent, result, attempts)
            tell_of_early_ends(agent, getattr(agent, _RANKS))
            if result.state == WorkerState.HEALTHY and _has_lost_hosts(agent):
                return RunResult(state=WorkerState.FAILED)
        return result

    setattr(LocalElasticAgent, _LOOKS, look_closely)
    try:
        yield attempts
    finally:
        setattr(LocalElasticAgent, _LOOKS, look)


def _hasten_end(agent: Any, soon: Sequence[signal.Signals], attempts: Attempts) -> None:
    """Shorten the time to kill ranks, unless a signal to the launcher stops them."""
    ranks: Any = getattr(agent, _RANKS, None)
    close = getattr(ranks, "close", None)
    if close is None or "close" in vars(ranks):
        return

    def close_soon(death_sig: Any = None, timeout: int = _SECONDS_TO_END) -> None:
        if death_sig is None or death_sig in soon:
            timeout = min(timeout, _SECONDS_TO_END)
        close(death_sig, timeout)
        if death_sig is not None:
            with contextlib.suppress(AttributeError, TypeError, KeyError):
                attempts.killed = _killed(agent, ranks)

    ranks.close = close_soon


def _killed(agent: Any, ranks: Any) -> list[int]:
    handlers = getattr(ranks, _STARTED)
    places = [p for p, handler in handlers.items() if handler.proc.returncode == -signal.SIGKILL]
    return sorted(agent._worker_group.workers[place].global_rank for place in places)


def _after_look(agent: Any, result: Any, attempts: Attempts) -> None:
    restarts = getattr(agent, _RESTARTS)
    if not result.is_failed():
        return
    failures = failures_of(result.failures)
    watch = watch_of(agent, getattr(agent, _RANKS, None))
    attempts.elsewhere = []
    if watch is not None:
        first = failures[0]
        attempts.elsewhere = watch.failures_elsewhere(f"rank {first.rank}: {first.reason}")
    if restarts <= 0:
        return
    if failures[0].bad_input or failures[0].stopped:
        setattr(agent, _RESTARTS, 0)
        return
    told = "\n".join([render(failures), *attempts.elsewhere])
    print(f"{told}\nStarting again; {_restarts(restarts - 1)}.", file=sys.stderr, flush=True)


def _has_lost_hosts(agent: Any) -> bool:
    """True if ranks, which have ended, must be started again because other hosts are lost.

    Raises :class:`HostsLost` where they may not.
    """
    ranks = getattr(agent, _RANKS)
    watch = watch_of(agent, ranks)
    lost = watch.lost() if watch is not None else None
    if lost is None:
        return False
    ranks.close()
    restarts = getattr(agent, _RESTARTS)
    if restarts <= 0:
        raise HostsLost(lost)
    print(
        f"fullshard: {lost}\nStarting again when all hosts are back; {_restarts(restarts - 1)}.",
        file=sys.stderr,
        flush=True,
    )
    return True


def _restarts(number: int) -> str:
    return f"{number} more restart{'s' * (number != 1)} after this"
