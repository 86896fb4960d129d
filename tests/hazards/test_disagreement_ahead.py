"""Ranks that disagree where collectives do not block the host: a thread answers for the rank.

The backend of these tests is gloo, whose collectives do block; the agreement is used by itself.
"""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from fullshard import RanksDisagreeError
from fullshard.engine.comm.order_check import Agreement, Operation, answer_in_background
from fullshard.testing import ranks

GATHERS = [Operation("gather", f"layers.{index}", 10 + index) for index in range(3)]


def agreement_with_answers() -> tuple[Agreement, threading.Thread]:
    group = dist.new_group()
    _, store = dist.distributed_c10d._world.pg_map[group]
    agreement = Agreement(store, dist.get_rank(), dist.get_world_size())
    answers = answer_in_background(agreement, group)
    for _ in range(2):
        begin(agreement)
        for operation in GATHERS:
            agreement.settle(operation)
    return agreement, answers


def begin(agreement: Agreement) -> None:
    agreement.settle(Operation("forward", "(root)"), begins_pass=True)


@ranks(2)
def test_a_rank_that_runs_ahead_raises_at_its_next_operation() -> None:
    agreement, answers = agreement_with_answers()
    begin(agreement)
    named = r"rank 0: .*'layers\.0'.*rank 1: .*'layers\.2'"
    if dist.get_rank() == 0:
        # As known: starts without asking, then computes until it has answered the other.
        agreement.settle(GATHERS[0])
        answers.join(timeout=20)
        assert not answers.is_alive()
    with pytest.raises(RanksDisagreeError, match=named):
        agreement.settle(GATHERS[1 if dist.get_rank() == 0 else 2])


@ranks(3)
def test_a_rank_that_computes_for_long_is_waited_for() -> None:
    agreement, _ = agreement_with_answers()
    begin(agreement)
    if dist.get_rank() == 0:
        time.sleep(3)
    # Not the known order, so that all must meet; but all do the same.
    for operation in reversed(GATHERS):
        agreement.settle(operation)
