"""Between two attempts of the elastic launcher: why there is another one, or why there is none.

The launcher itself tells of a failure only when it starts ranks no more, and starts them again
whatever the failure was, after half a minute if one of them does not end when it is told to. It
has no way to be asked for more than the method that its agents override; where a version of torch
has another one, ranks run all the same, and less is said.
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

#: The agent's method that looks at the ranks, and its number of restarts that are left.
_LOOKS = "_monitor_workers"
_RESTARTS = "_remaining_restarts"
#: The agent's ranks, and seconds in which they must end after one of them failed. Whatever they
#: would do in more, such as to save, they would have to do with that one.
_RANKS = "_pcontext"
_SECONDS_TO_END = 5


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
            tell_of_early_ends(agent, getattr(agent, _RANKS))
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
