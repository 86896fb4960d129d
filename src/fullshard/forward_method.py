"""A method of a sharded module that runs with the unit's full parameters in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from .engine.runtime.untraced import untraced_itself
from .wrap import is_unit


class Runs(Protocol):
    """An object that runs a function as a forward of its unit."""

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any: ...


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make calls of ``module``'s method run with the unit's full parameters in place.

    ``module`` is a wrapper, or ``fully_shard`` was applied to it; for other modules nothing
    happens. The method then counts as a forward of the unit. It can be called through the wrapper
    or on the wrapped module, with gradients or without.
    """
    in_place: Any = getattr(type(module), "_register_forward_method", None)
    if in_place is not None:
        in_place(module, method_name)
        return
    if not is_unit(module):
        return
    wrapper: Any = module
    method = getattr(wrapper.module, method_name, None)
    if not callable(method):
        raise AttributeError(
            f"{type(wrapper.module).__name__} has no method {method_name!r} to register"
        )
    setattr(wrapper.module, method_name, ForwardMethod(wrapper, method))


class ForwardMethod:
    """Calls ``method`` as a forward of the unit that ``runs`` forwards.

    This is an object because deep copies of a model copy it together with its references; a
    function would still run the original's method.
    """

    def __init__(self, runs: Runs, method: Callable[..., Any]) -> None:
        functools.update_wrapper(self, method)
        self._runs = runs
        self._method = method

    @untraced_itself
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._runs._run(self._method, args, kwargs)
