"""Running functions on pools that all tests share, one for each number of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from .pool import DEFAULT_GRACE, DEFAULT_TIMEOUT, RankPool, checked_world_size

# Enough for pools of 1, 2, 3, 4 and 8 ranks at once, and a few more.
_MOST_PROCESSES = 32

_pools: dict[int, RankPool] = {}
_owner = os.getpid()


def run_on_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = DEFAULT_TIMEOUT,
    grace: float = DEFAULT_GRACE,
    **kwargs: Any,
) -> list[Any]:
    """Call ``function(*args, **kwargs)`` on every rank; returns the values in order of rank.

    On each of the ``world_size`` ranks the default process group is initialised. The function may
    be defined anywhere, also inside a test; its arguments and return values are sent by pickle.
    ``timeout`` and ``grace`` are those of ``RankPool.run``.

    Example::

        def test_every_rank_knows_the_sum() -> None:
            def total() -> float:
                number = torch.tensor(float(dist.get_rank()))
                dist.all_reduce(number)
                return number.item()

            assert run_on_ranks(4, total) == [6.0] * 4
    """
    __tracebackhide__ = True
    pool = shared_pool(world_size)
    return pool.run(function, args, kwargs, timeout=timeout, grace=grace)


def shared_pool(world_size: int) -> RankPool:
    """The pool of ``world_size`` ranks that all tests of this process share."""
    global _owner
    checked_world_size(world_size)
    if _owner != os.getpid():
        # A forked process must not use the ranks of its parent.
        _pools.clear()
        _owner = os.getpid()
    pool = _pools.pop(world_size, None) or RankPool(world_size)
    _pools[world_size] = pool
    _close_least_recent()
    return pool


def _close_least_recent() -> None:
    *others, latest = _pools
    processes = sum(_pools)
    for world_size in others:
        if processes <= max(_MOST_PROCESSES, latest):
            return
        _pools.pop(world_size).close()
        processes -= world_size
