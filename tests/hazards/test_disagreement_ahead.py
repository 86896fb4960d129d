"""Ranks that disagree where collectives do not block the host: a thread watches for the rank.

The backend of these tests is gloo; its collectives are started, and not waited for by the host.
"""

from __future__ import annotations

import contextlib
import io
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.hazards.test_disagreement import patience
from torch._C._distributed_c10d import Work

from fullshard import RankLostError, RanksDisagreeError
from fullshard.engine.comm import order_check
from fullshard.engine.comm.announcement import announcements_of
from fullshard.engine.comm.collectives import Group
from fullshard.engine.comm.order_check import Agreement, Operation
from fullshard.engine.comm.watcher import watch
from fullshard.testing import ranks

GATHERS = [Operation("gather", f"layers.{index}", 10 + index) for index in range(3)]
PATIENCE = 0.4


def watched_agreement(
    patience: float = PATIENCE,
) -> tuple[Agreement, Any, threading.Thread]:
    group = dist.new_group()
    _, store = dist.distributed_c10d._world.pg_map[group]
    agreement = Agreement(
        store, dist.get_rank(), dist.get_world_size(), announcements=announcements_of(group)
    )
    watcher = watch(agreement, group, patience)
    for _ in range(3):
        begin(agreement)
        for operation in GATHERS:
            agreement.check(operation)
    return agreement, group, watcher


def begin(agreement: Agreement) -> None:
    agreement.check(Operation("forward", "(root)"), begins_pass=True)


def issue(agreement: Agreement, group: Any) -> torch.Tensor:
    """Start a collective, and go on at once, as a host does whose device waits for it."""
    tensor = torch.ones(3)
    agreement.issued.last = group.allreduce([tensor])
    return tensor


@ranks(2)
def test_a_rank_that_runs_ahead_raises_at_its_next_operation() -> None:
    agreement, group, watcher = watched_agreement()
    begin(agreement)
    named = r"rank 0: .*'layers\.0'.*rank 1: .*'layers\.2'"
    if dist.get_rank() == 0:
        # As known: starts without asking, then computes until the watcher has found out.
        agreement.check(GATHERS[0])
        issue(agreement, group)
        watcher.join(timeout=20)
        assert not watcher.is_alive()
    with patience(PATIENCE), pytest.raises(RanksDisagreeError, match=named):
        agreement.check(GATHERS[1 if dist.get_rank() == 0 else 2])


@ranks(3)
def test_a_rank_that_computes_for_long_is_waited_for() -> None:
    agreement, _group, watcher = watched_agreement()
    begin(agreement)
    if dist.get_rank() == 0:
        time.sleep(3)
    # Not the known order, so that all must meet; but all do the same.
    for operation in reversed(GATHERS):
        agreement.check(operation)
    assert watcher.is_alive()


@ranks(3)
def test_a_collective_for_which_nobody_comes_for_long_completes_when_it_comes() -> None:
    agreement, group, watcher = watched_agreement()
    begin(agreement)
    if dist.get_rank() == 2:
        time.sleep(5 * PATIENCE)
    agreement.check(GATHERS[0])
    tensor = issue(agreement, group)
    agreement.issued.last.wait()
    agreement.check(GATHERS[1])
    assert tensor.tolist() == [3.0] * 3
    assert watcher.is_alive()


class _Failed(Work):
    """A collective of which the backend says that it is complete, though it failed."""

    def is_completed(self) -> bool:
        return True

    def get_future_result(self) -> torch.futures.Future[int]:
        result = torch.futures.Future[int]()
        result.set_result(2)
        return result


@ranks(2)
def test_a_collective_that_failed_is_one_for_which_others_are_looked_for() -> None:
    """NCCL's are complete at once when a rank is gone, while the device waits on."""
    agreement, _group, watcher = watched_agreement()
    if dist.get_rank() == 1:
        agreement.inquiry.depart("ValueError: this rank's own data")
        watcher.join(timeout=20)
    else:
        agreement.issued.last = _Failed()
        watcher.join(timeout=20)
        assert not watcher.is_alive()
        with pytest.raises(RankLostError, match="Rank 1 ended with ValueError: this rank's own"):
            begin(agreement)


@ranks(2)
def test_a_backend_that_failed_in_a_collective_of_the_programs_own_is_looked_into() -> None:
    """NCCL's says so; the last collective of fullshard's is long complete then."""
    agreement, _group, watcher = watched_agreement(patience=20)
    if dist.get_rank() == 1:
        agreement.inquiry.depart("ValueError: this rank's own data")
        watcher.join(timeout=5)
    else:
        agreement.issued.backend_failed = lambda: True
        watcher.join(timeout=20)
        assert not watcher.is_alive()
        with pytest.raises(RankLostError, match="Rank 1 ended with ValueError: this rank's own"):
            begin(agreement)


@ranks(2)
def test_what_was_started_last_is_looked_after_before_anybody_waits_for_it() -> None:
    """A unit is prefetched, and the program itself then waits for the device."""
    group = Group(dist.new_group())
    pieces, outputs = torch.ones(2, 3), torch.empty(2, 6)
    first = group.gather([outputs[0]], [pieces[0]], "layers.0")
    (prefetched,) = group.gather([outputs[1]], [pieces[1]], "layers.1")
    group.wait(*first)
    assert group._agreement.issued.last is prefetched
    group.wait(prefetched)


@ranks(2)
def test_an_object_of_the_users_own_that_can_only_wait_stops_no_watcher() -> None:
    agreement, _group, watcher = watched_agreement()
    agreement.issue(object())
    time.sleep(3 * PATIENCE)
    assert watcher.is_alive()


@ranks(2)
def test_ranks_meet_before_a_collective_that_connects_them() -> None:
    """Who is not there then is waited for where one can look around, not inside of NCCL."""
    group = dist.new_group()
    _, store = dist.distributed_c10d._world.pg_map[group]
    announcements = announcements_of(group)
    assert announcements is not None
    announcements.connects_ranks = True
    agreement = Agreement(store, dist.get_rank(), dist.get_world_size(), 0.6, announcements)
    few, order_check.FEW = order_check.FEW, 0
    try:
        if dist.get_rank() == 0:
            with patience(0.2), pytest.raises(RanksDisagreeError, match="1 of 2 have"):
                begin(agreement)
    finally:
        order_check.FEW = few


def test_a_question_of_another_rank_makes_nobody_impatient() -> None:
    agreement = Agreement(dist.HashStore(), rank=0, world_size=2)
    agreement.receive({"asked": "answer"})
    assert not agreement.stirred.is_set()


def test_who_has_gone_on_from_a_wait_that_was_interrupted_is_not_said_to_wait_there() -> None:
    store = dist.HashStore()
    agreements = [Agreement(store, rank, 2) for rank in range(2)]

    class _Interrupted(Exception):
        pass

    def interrupt() -> None:
        raise _Interrupted

    agreements[0].check_also(interrupt)
    with patience(0.2), pytest.raises(_Interrupted):
        agreements[0].check(("gather", "layers.9", 3))
    agreements[0].check_also(None)
    for agreement in agreements:
        agreement.order.advance(GATHERS[0], False)
    assert agreements[0].history() == agreements[1].history()


@ranks(2)
def test_a_rank_that_ends_with_an_error_is_missed_before_patience_ends() -> None:
    agreement, group, watcher = watched_agreement(patience=20)
    begin(agreement)
    agreement.check(GATHERS[0])
    if dist.get_rank() == 0:
        started, said = time.monotonic(), io.StringIO()
        with contextlib.redirect_stderr(said):
            issue(agreement, group)
            watcher.join(timeout=10)
        assert not watcher.is_alive()
        assert time.monotonic() - started < 5
        assert said.getvalue().startswith("[rank0]: RankLostError: Rank 1 is gone")
    else:
        agreement.inquiry.depart("ValueError: this rank's own data")
        watcher.join(timeout=10)


@ranks(2)
def test_nothing_is_asked_of_a_device_while_a_step_is_captured() -> None:
    agreement, group, watcher = watched_agreement()
    tensor = torch.ones(3)
    agreement.note_capturing(True)
    work = group.allreduce([tensor])
    agreement.issue(work)
    assert agreement.incomplete_work() is None
    work.wait()
    agreement.note_capturing(False)
    # What was captured is never going to complete by itself.
    assert agreement.issued.last is None
    assert watcher.is_alive()
