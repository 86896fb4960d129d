"""A method of a wrapped module that runs with the unit's full parameters in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from .engine.runtime.untraced import untraced_itself
from .wrap import is_unit

if TYPE_CHECKING:
    from .fsdp import FullyShardedDataParallel


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let calls of ``module``'s method run with the unit's full parameters in place.

    ``module`` is a wrapper; on any other module nothing happens. The method is then a forward of
    the unit: it can be called through the wrapper or on the wrapped module, with gradients or
    without.
    """
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
