"""A wrapper's forward as ``torch.compile`` sees it: apart from ``FullyShardedDataParallel._run``,
because what Dynamo must not trace has to be a function of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .engine.suitability import note_places

if TYPE_CHECKING:
    from .fsdp import FullyShardedDataParallel


@torch._disable_dynamo(recursive=False)
def run_traced(
    wrapper: FullyShardedDataParallel,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """``wrapper._run`` for Dynamo: ``function`` is traced, what surrounds it is not."""
    args, kwargs, call = _before(wrapper, args, kwargs)
    try:
        output = function(*args, **kwargs)
    except BaseException as error:
        _abandon(wrapper, error, (args, kwargs))
        raise
    return _after(wrapper, output, call)


@torch._disable_dynamo
def _before(wrapper: FullyShardedDataParallel, args: Any, kwargs: Any) -> Any:
    schedule = wrapper._schedule or wrapper._start()
    schedule.enter(wrapper._unit)
    try:
        return wrapper._before_module(schedule, args, kwargs)
    except BaseException as error:
        _abandon(wrapper, error, (args, kwargs))
        raise


@torch._disable_dynamo
def _after(wrapper: FullyShardedDataParallel, output: Any, call: Any) -> Any:
    schedule = wrapper._schedule
    assert schedule is not None
    try:
        output = wrapper._after_module(schedule, output, call)
    except BaseException as error:
        _abandon(wrapper, error, output)
        raise
    schedule.leave(wrapper._unit)
    return output


@torch._disable_dynamo
def _abandon(wrapper: FullyShardedDataParallel, error: BaseException, given: Any) -> None:
    schedule = wrapper._schedule
    assert schedule is not None
    schedule.abandon(wrapper._unit)
    note_places(error, wrapper._unit, given)
    schedule.leave(wrapper._unit)
