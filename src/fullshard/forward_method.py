"""A method of a sharded module that runs with the unit's full parameters in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from .engine.runtime.untraced import untraced_itself


class Runs(Protocol):
    """What runs a function as a forward of its unit."""

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any: ...


class ForwardMethod:
    """Calls ``method`` as a forward of the unit that ``runs`` forwards.

    An object, since a copy of the model copies what it refers to: a function would go on to run the
    original.
    """

    def __init__(self, runs: Runs, method: Callable[..., Any]) -> None:
        functools.update_wrapper(self, method)
        self._runs = runs
        self._method = method

    @untraced_itself
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._runs._run(self._method, args, kwargs)
