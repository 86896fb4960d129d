"""Reporting restarts of the elastic launcher, and preventing useless ones.

The launcher reports a failure only when no restarts are left. It restarts ranks after any failure,
and waits half a minute if one of them does not react to SIGTERM. It has no public hook for this, so
a method of its agent is wrapped; with a version of torch that has another method, ranks run all the
same and less is reported.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from .early_ends import tell_of_early_ends
from .failures import failures_of, render

__all__ = ["attempts_watched"]

#: The agent's method that polls the ranks, and its attribute with the restarts that are left.
_LOOKS = "_monitor_workers"
_RESTARTS = "_remaining_restarts"
#: The agent's attribute with its ranks, and the seconds that ranks have to stop after a failure.
#: More time is of no use: to save, for example, they would need the rank that failed.
_RANKS = "_pcontext"
_SECONDS_TO_END = 5


@contextlib.contextmanager
def attempts_watched() -> Iterator[None]:
    """Inside the context, report why ranks restart, restart soon, and never after bad input."""
    look = vars(LocalElasticAgent).get(_LOOKS)
    if not callable(look):
        yield
        return

    def look_closely(agent: Any, *arguments: Any, **options: Any) -> Any:
        _hasten_end(getattr(agent, _RANKS, None))
        result = look(agent, *arguments, **options)
        # A version of torch with other internals must not end the run.
        with contextlib.suppress(AttributeError, TypeError):
            _after_look(agent, result)
            tell_of_early_ends(agent, getattr(agent, _RANKS))
        return result

    setattr(LocalElasticAgent, _LOOKS, look_closely)
    try:
        yield
    finally:
        setattr(LocalElasticAgent, _LOOKS, look)


def _hasten_end(ranks: Any) -> None:
    """Shorten the time to kill ``ranks``, unless a signal to the launcher stops them."""
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
