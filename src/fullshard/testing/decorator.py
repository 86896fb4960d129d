"""The decorator that turns a function into a test that runs on every rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec
from weakref import WeakSet

from .errors import RankSetupError
from .pool import DEFAULT_GRACE, DEFAULT_TIMEOUT, checked_world_size
from .shared import shared_pool
from .shipping import declared_functions

Parameters = ParamSpec("Parameters")
_tests: WeakSet[Callable[..., None]] = WeakSet()


def ranks(
    world_size: int, *, timeout: float = DEFAULT_TIMEOUT, grace: float = DEFAULT_GRACE
) -> Callable[[Callable[Parameters, Any]], Callable[Parameters, None]]:
    """Make a function a test that runs on ``world_size`` ranks.

    The function runs on every rank, with the default process group initialised, seeds set and
    one thread. The test fails when it fails on any rank. Arguments from
    ``pytest.mark.parametrize``, fixtures or hypothesis are sent to the ranks by pickle. Put
    ``hypothesis.given`` above this decorator. ``timeout`` and ``grace`` are those of
    ``RankPool.run``.

    Example::

        @pytest.mark.parametrize("size", [1, 10])
        @ranks(2)
        def test_all_reduce_sums(size: int) -> None:
            ones = torch.ones(size, device=device())
            dist.all_reduce(ones)
            assert ones.sum() == 2 * size
    """
    checked_world_size(world_size)

    def make_test(function: Callable[Parameters, Any]) -> Callable[Parameters, None]:
        if hasattr(function, "hypothesis"):
            raise RankSetupError(
                f"{function.__qualname__} has @ranks above @given, which would generate different "
                "examples on every rank: put @given above @ranks"
            )
        declared_functions[function.__module__, function.__qualname__] = function

        @functools.wraps(function)
        def test(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
            __tracebackhide__ = True
            shared_pool(world_size).run(function, args, kwargs, timeout=timeout, grace=grace)

        _tests.add(test)
        return test

    return make_test


def is_test_on_ranks(test: object) -> bool:
    """Return True if the test was made by ``ranks``."""
    return test in _tests
