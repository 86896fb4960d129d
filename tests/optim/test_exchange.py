"""What travels between owners and other ranks, when, and what happens if a rank does nothing."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tests.optim.training import muon, whole, wrapped
from tests.original.training import train_step

from fullshard import RanksDisagreeError
from fullshard.engine.comm.collectives import Group, group_for
from fullshard.optim import optimizer as optimizer_module
from fullshard.testing import device, ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@ranks(3)
def test_each_rank_sends_each_other_rank_as_much_as_it_says(dtype: torch.dtype) -> None:
    rank = dist.get_rank()
    group = group_for(dist.group.WORLD, device())
    # Rank r sends r * d elements to rank d, all of them its own number.
    sent_sizes = [rank * destination for destination in range(3)]
    received_sizes = [source * rank for source in range(3)]
    sent = torch.full((sum(sent_sizes),), rank, device=device()).to(dtype)
    received = torch.empty(sum(received_sizes), dtype=dtype, device=device())

    group.start_exchange(received, sent, received_sizes, sent_sizes, "test")()

    expected = [source for source in range(3) for _ in range(source * rank)]
    assert received.tolist() == torch.tensor(expected).to(dtype).tolist()


@ranks(3)
def test_any_rank_broadcasts() -> None:
    group = group_for(dist.group.WORLD, device())
    for owner in range(3):
        value = torch.full((4, 2), float(dist.get_rank()), device=device())
        group.broadcast_by(owner, value, "test")
        assert value.eq(owner).all()


@ranks(2)
def test_a_round_travels_while_the_one_before_is_stepped() -> None:
    seen: list[str] = []
    start = Group.start_exchange

    def recorded(self: Group, *arguments: Any) -> Any:
        seen.append(f"send {arguments[-1]}")
        return start(self, *arguments)

    class Recorded(torch.optim.Muon):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            seen.append("step")
            super().step()

    class Rest(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            seen.append("rest")
            super().step()

    model = wrapped()
    with patch.object(optimizer_module, "_ROUND_NUMEL", 1):
        optimizer = whole(Recorded, model, Rest)
    train_step(model, 0)
    with patch.object(Group, "start_exchange", recorded):
        optimizer.step()

    first, second, third = ("send round 0", "send round 1", "send round 2")
    assert seen == [
        *(first, "rest", second, "step", first, third, "step", second, "step", third),
    ]


@ranks(2)
def test_a_rank_that_does_not_step_is_told_of_on_all_ranks() -> None:
    model = wrapped()
    optimizer = whole(muon, model)
    train_step(model, 0)
    act = optimizer.step if dist.get_rank() == 0 else lambda: train_step(model, 1)
    with pytest.raises(RanksDisagreeError, match="optimizer step"):
        act()
