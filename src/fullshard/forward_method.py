"""A method of a wrapped module that runs with the unit's full parameters in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .engine.runtime.untraced import untraced_itself

if TYPE_CHECKING:
    from .fsdp import FullyShardedDataParallel


class ForwardMethod:
    """Calls ``method`` as a forward of ``wrapper``.

    An object, since a copy of the model copies what it refers to: a function would go on to run the
    original.
    """

    def __init__(self, wrapper: FullyShardedDataParallel, method: Callable[..., Any]) -> None:
        functools.update_wrapper(self, method)
        self._wrapper = wrapper
        self._method = method

    @untraced_itself
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapper._run(self._method, args, kwargs)
