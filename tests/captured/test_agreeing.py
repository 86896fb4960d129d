"""Ranks that capture together or not at all, whatever happens to one of them.

Where there is no GPU, a stand-in carries out what is captured: it is tested what ranks decide.
"""

from __future__ import annotations

import itertools
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fullshard
from fullshard.captured.kinds import Step, obstacle_in
from fullshard.engine.comm.collectives import Group, group_for
from fullshard.engine.comm.disagreement import Operation
from fullshard.engine.comm.order_table import OrderTable
from fullshard.testing import ranks


class StandIn:
    """In place of what records CUDA graphs: runs what it is given, where tensors are doubles."""

    def __init__(self) -> None:
        self.captures = False

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        return [leaf.double() if torch.is_tensor(leaf) else leaf for leaf in leaves]

    def run(self, call: Callable[[], Any]) -> Any:
        return call()

    def capture(self, call: Callable[[Any], Any], leaves: Any, parameters: Any) -> Any:
        self.captures = True
        try:
            call(leaves)
        finally:
            self.captures = False
        return types.SimpleNamespace(
            replay=lambda leaves: call(self.place(leaves)),
            settle=lambda: None,
            undo=lambda: None,
            drop=lambda: None,
        )

    def close(self) -> None:
        pass


class OverGroup(Step):
    """A step that communicates over one group, without a model."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group

    @property
    def groups(self) -> list[Group]:
        return [self.group]

    def obstacle(self) -> str | None:
        return None


def captured(function: Callable[[torch.Tensor], Any], group: Group) -> tuple[Any, StandIn]:
    made = fullshard.capture(function, torch.zeros(1))
    recorder: Any = StandIn()
    made._recorder, made._step = recorder, OverGroup(group)
    return made, recorder


@ranks(2)
def test_a_capture_that_breaks_in_the_middle_of_a_rank_s_step_leaves_all_ranks_training() -> None:
    group = group_for(dist.group.WORLD)

    def step(batch: torch.Tensor) -> torch.Tensor:
        group.begin_pass("forward", "model")
        for unit in range(6):
            if unit == 3 and recorder.captures and dist.get_rank() == 1:
                raise RuntimeError("operation not permitted when stream is capturing")
            group.agree("gather", str(unit), batch)
        return batch.sum()

    call, recorder = captured(step, group)
    told: list[str] = []
    for index in range(9):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert call(torch.full((3,), float(index))) == 3.0 * index
        told += [str(each.message) for each in caught if each.filename == __file__]
    assert call.captured == 0
    assert "operation not permitted" in call.why_eager
    assert call.why_eager.endswith("(rank 1)")
    # The warning points to the user's own line, and comes once.
    assert [call.why_eager in each for each in told] == ([True] if dist.get_rank() == 0 else [])


@ranks(2)
def test_ranks_whose_batches_change_at_other_calls_do_not_capture() -> None:
    group = group_for(dist.group.WORLD)

    def step(batch: torch.Tensor) -> int:
        group.begin_pass("forward", "model")
        return len(batch)

    for of_ranks in (
        ([3, 3, 3, 3, 3, 3], [3, 4, 3, 4, 3, 4]),
        ([3, 3, 3, 3, 3, 3], [3, 3, 3, 4, 4, 4]),
        # All come as often, and would be captured at the same calls.
        ([3, 4, 3, 4, 3, 4], [3, 4, 3, 3, 4, 4]),
    ):
        call, _ = captured(step, group)
        sizes = of_ranks[dist.get_rank()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert [call(torch.zeros(size)) for size in sizes] == sizes
        assert "do not change at the same calls on all ranks" in call.why_eager
        assert call.captured == 0


@ranks(2)
def test_ranks_with_batches_of_their_own_sizes_capture_together() -> None:
    group = group_for(dist.group.WORLD)

    def step(batch: torch.Tensor) -> int:
        group.begin_pass("forward", "model")
        return len(batch)

    call, _ = captured(step, group)
    size = 3 + dist.get_rank()
    assert [call(torch.zeros(size)) for _ in range(6)] == [size] * 6
    assert call.why_eager is None
    assert call.captured == 1


@ranks(1)
def test_batches_are_on_the_device_in_every_call_of_a_step_that_is_not_captured() -> None:
    def step(batch: torch.Tensor) -> torch.dtype:
        if recorder.captures:
            raise RuntimeError("broke")
        return batch.dtype

    call, recorder = captured(step, group_for(dist.group.WORLD))
    with pytest.warns(UserWarning, match="runs eagerly: RuntimeError: broke"):
        found = [call(torch.zeros(3)) for _ in range(8)]
    assert found == [torch.float64] * 8


@ranks(1)
def test_a_step_that_decides_by_a_counter_is_not_captured_unless_its_batches_tell() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizers = [torch.optim.SGD([parameter], lr=0.1), torch.optim.AdamW([parameter], lr=0.1)]
    counter = itertools.count()

    def counts(batch: torch.Tensor) -> int:
        which = next(counter) % 2
        optimizers[which].step()
        return which

    def is_told(batch: tuple[torch.Tensor, int]) -> int:
        optimizers[batch[1]].step()
        return batch[1]

    group = group_for(dist.group.WORLD)
    call, _ = captured(counts, group)
    with pytest.warns(
        UserWarning, match="one ran a step of .*, and another a step of .*: if a counter"
    ):
        assert [call(torch.zeros(2)) for _ in range(6)] == [0, 1] * 3
    assert call.captured == 0
    call, _ = captured(is_told, group)
    assert [call((torch.zeros(2), index % 2)) for index in range(10)] == [0, 1] * 5
    assert call.captured == 2


@ranks(1)
def test_a_step_that_steps_a_learning_rate_scheduler_is_not_captured() -> None:
    for on_device in (False, True):
        rate = torch.tensor(0.5) if on_device else 0.5
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=rate)
        # For so long that calls look alike.
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=6, gamma=0.5)

        def step(batch: torch.Tensor, optimizer: Any = optimizer, after: Any = scheduler) -> float:
            rate = float(optimizer.param_groups[0]["lr"])
            optimizer.step()
            after.step()
            return rate

        call = fullshard.capture(step, torch.zeros(2))
        recorder: Any = StandIn()
        call._recorder = recorder
        with pytest.warns(UserWarning, match=r"scheduler \(StepLR\).*after the captured step"):
            rates = [call(torch.zeros(2)) for _ in range(18)]
        assert rates == [0.5] * 6 + [0.25] * 6 + [0.125] * 6
        assert call.captured == 0
    assert torch.optim.lr_scheduler.StepLR(optimizer, 1).step.__module__.startswith("torch.")


def test_batches_that_cannot_be_copied_to_a_graph_are_told() -> None:
    holder = types.new_class("Holder")()
    assert obstacle_in([torch.zeros(2), 1, "text", None, holder]) is None
    holder.tokens = torch.zeros(2)
    assert "a Holder with tensors" in str(obstacle_in([holder]))
    assert "torch.sparse_coo" in str(obstacle_in([torch.zeros(2).to_sparse()]))


def test_ranks_that_return_to_one_place_expect_the_same() -> None:
    tables = [OrderTable(), OrderTable()]

    def advance(table: OrderTable, *units: str) -> None:
        table.advance(("forward", "model", 0), begins_pass=True)
        for unit in units:
            table.advance(("gather", unit, 8), begins_pass=False)

    following = Operation("gather", "b", 8)
    for table, ahead in zip(tables, ("a", "abc"), strict=True):
        advance(table, "a")
        before = table.history()
        bookmark = table.bookmark()
        advance(table, *ahead)
        assert table.history() != before
        table.return_to(bookmark)
        assert table.history() == before
        assert table.expectation(following, begins_pass=False).name == "IS_NEW"
    assert tables[0].digest(following, False) == tables[1].digest(following, False)
    for table in tables:
        table.advance(following, begins_pass=False)
        advance(table, "b", "a")
    assert tables[0].history() == tables[1].history()
    assert tables[0].digest(following, True) == tables[1].digest(following, True)
