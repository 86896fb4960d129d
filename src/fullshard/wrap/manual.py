"""Wrapping by hand with ``enable_wrap`` and ``wrap``. Depends on no policy or wrapper class."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["enable_wrap", "wrap"]


@dataclass(frozen=True)
class _Context:
    wrapper_class: Callable[..., nn.Module]
    arguments: dict[str, Any]


# A context variable, so that other threads and tasks, which build other models, are not affected.
_context: ContextVar[_Context | None] = ContextVar("fullshard_enable_wrap", default=None)


@contextmanager
def enable_wrap(*, wrapper_cls: Any, **wrapper_kwargs: Any) -> Generator[None, None, None]:
    """Make :func:`wrap` wrap modules with ``wrapper_cls`` and these arguments in this context.

    Contexts nest: the innermost one applies.

    >>> with enable_wrap(wrapper_cls=FullyShardedDataParallel, use_orig_params=True):
    ...     layer = wrap(nn.Linear(5, 5))
    """
    if not callable(wrapper_cls):
        raise TypeError(
            "enable_wrap expects a class such as FullyShardedDataParallel as wrapper_cls, "
            f"but got {wrapper_cls!r}"
        )
    token = _context.set(_Context(wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _context.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Return ``module`` wrapped if inside :func:`enable_wrap`, else ``module`` itself.

    ``wrap_overrides`` take precedence over the context's arguments. A model that builds its layers
    with ``wrap`` can be used with and without sharding.
    """
    context = _context.get()
    if context is None:
        return module
    return context.wrapper_class(module, **{**context.arguments, **wrap_overrides})
