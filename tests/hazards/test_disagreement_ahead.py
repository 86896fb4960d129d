"""Ranks that disagree where collectives do not block the host: a thread watches for the rank.

The backend of these tests is gloo; its collectives are started, and not waited for by the host.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.hazards.test_disagreement import patience

from fullshard import RanksDisagreeError
from fullshard.engine.comm.announcement import announcements_of
from fullshard.engine.comm.order_check import Agreement, Operation
from fullshard.engine.comm.watcher import watch
from fullshard.testing import ranks

GATHERS = [Operation("gather", f"layers.{index}", 10 + index) for index in range(3)]
PATIENCE = 0.4


def watched_agreement() -> tuple[Agreement, Any, threading.Thread]:
    group = dist.new_group()
    _, store = dist.distributed_c10d._world.pg_map[group]
    agreement = Agreement(
        store, dist.get_rank(), dist.get_world_size(), announcements=announcements_of(group)
    )
    watcher = watch(agreement, group, PATIENCE)
    for _ in range(3):
        begin(agreement)
        for operation in GATHERS:
            agreement.settle(operation)
    return agreement, group, watcher


def begin(agreement: Agreement) -> None:
    agreement.settle(Operation("forward", "(root)"), begins_pass=True)


def issue(agreement: Agreement, group: Any) -> torch.Tensor:
    """Start a collective, and go on at once, as a host does whose device waits for it."""
    tensor = torch.ones(3)
    agreement.issued = group.allreduce([tensor])
    return tensor


@ranks(2)
def test_a_rank_that_runs_ahead_raises_at_its_next_operation() -> None:
    agreement, group, watcher = watched_agreement()
    begin(agreement)
    named = r"rank 0: .*'layers\.0'.*rank 1: .*'layers\.2'"
    if dist.get_rank() == 0:
        # As known: starts without asking, then computes until the watcher has found out.
        agreement.settle(GATHERS[0])
        issue(agreement, group)
        watcher.join(timeout=20)
        assert not watcher.is_alive()
    with patience(PATIENCE), pytest.raises(RanksDisagreeError, match=named):
        agreement.settle(GATHERS[1 if dist.get_rank() == 0 else 2])


@ranks(3)
def test_a_rank_that_computes_for_long_is_waited_for() -> None:
    agreement, _group, watcher = watched_agreement()
    begin(agreement)
    if dist.get_rank() == 0:
        time.sleep(3)
    # Not the known order, so that all must meet; but all do the same.
    for operation in reversed(GATHERS):
        agreement.settle(operation)
    assert watcher.is_alive()


@ranks(3)
def test_a_collective_for_which_nobody_comes_for_long_completes_when_it_comes() -> None:
    agreement, group, watcher = watched_agreement()
    begin(agreement)
    if dist.get_rank() == 2:
        time.sleep(5 * PATIENCE)
    agreement.settle(GATHERS[0])
    tensor = issue(agreement, group)
    agreement.issued.wait()
    agreement.settle(GATHERS[1])
    assert tensor.tolist() == [3.0] * 3
    assert watcher.is_alive()
