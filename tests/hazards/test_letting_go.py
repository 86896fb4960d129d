"""When an operation is over, no thread of the backend holds a tensor: see ``pending_work.py``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from fullshard.engine.comm import pending_work
from fullshard.engine.comm.collectives import group_for
from fullshard.engine.comm.pending_work import PendingWork
from fullshard.testing import ranks, run_on_ranks


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Tell what lets go late, on a machine that is busy, from what never does."""
    before = pending_work._PATIENCE
    pending_work._PATIENCE = seconds
    try:
        yield
    finally:
        pending_work._PATIENCE = before


@ranks(2)
def test_gloo_holds_nothing_that_was_waited_for() -> None:
    group = group_for(dist.group.WORLD)
    for _ in range(100):
        gathers = group.gather([torch.empty(1 << 16)], [torch.rand(1 << 15)], "unit")
        given = [tensor for operation in gathers for tensor in operation._tensors]
        assert given
        with patience(20):
            group.wait(*gathers)
        assert [tensor._use_count() for tensor in given] == [1] * len(given)  # type: ignore[attr-defined]


@ranks(2)
def test_a_sum_holds_nothing_either() -> None:
    group = group_for(dist.group.WORLD)
    for _ in range(100):
        full = torch.rand(1 << 16)
        finish = group.start_reduce_scatter(torch.empty(1 << 15), full, "unit")
        given = list(finish.args[0]._tensors)  # type: ignore[attr-defined]
        with patience(20):
            finish()
        assert [tensor._use_count() for tensor in given] == [1, 1]


def test_a_thread_that_still_holds_a_tensor_is_waited_for() -> None:
    tensor = torch.rand(4)
    held = [tensor.view(2, 2)]
    released = []

    def release() -> None:
        time.sleep(0.03)
        released.append(True)
        held.clear()

    thread = threading.Thread(target=release)
    thread.start()
    with patience(20):
        PendingWork(None, [tensor]).finish()
    assert released
    thread.join()


def test_a_tensor_that_is_held_for_good_is_not_waited_for() -> None:
    tensor = torch.rand(4)
    view = tensor.view(2, 2)
    start = time.monotonic()
    PendingWork(None, [tensor]).finish()
    assert time.monotonic() - start < 5
    assert view._base is tensor


@pytest.mark.parametrize("world_size", [2, 3])
def test_no_operation_waits_in_vain_for_gloo_to_let_go(world_size: int) -> None:
    run_on_ranks(world_size, time_every_operation)


def time_every_operation() -> None:
    group = group_for(dist.group.WORLD)
    whole, part = torch.rand(4 * group.size), torch.rand(4)
    parts = [torch.empty(4) for _ in range(group.size)] if group.rank == 0 else []
    odd = torch.empty(group.size)
    # As parameters are of a unit's buffers: they hold what they are views of.
    views = [tensor.view(-1) for tensor in (whole, part, odd, *parts)]
    operations = [
        lambda: group.wait(*group.gather([whole, odd], [part, torch.rand(1)], "u")),
        lambda: group.wait(*group.gather([whole], [part], "u")),
        lambda: group.gather_to_first(parts, part, "u"),
        lambda: group.scatter_from_first(part, parts, "u"),
        lambda: group.reduce_scatter(part, whole, "u"),
        lambda: group.all_reduce(whole, "u"),
        lambda: group.all_reduce_max(whole, "u"),
        lambda: group.broadcast([whole, part], "u"),
    ]
    for operation in operations:
        operation()  # The ranks meet here once, in the store.
    with patience(2):
        for operation in operations:
            fastest = min(_seconds(operation) for _ in range(5))
            assert fastest < pending_work._PATIENCE / 2
    assert views[0]._base is whole


def _seconds(operation: Callable[[], None]) -> float:
    start = time.monotonic()
    operation()
    return time.monotonic() - start
