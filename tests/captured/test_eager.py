"""``fullshard.capture`` where nothing can be captured: steps run eagerly, and say why."""

from __future__ import annotations

import dataclasses
import types
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard import FullyShardedDataParallel, fully_shard
from fullshard.captured.batches import flatten, rebuilt
from fullshard.captured.graphs import StepGraph
from fullshard.captured.kinds import Step, check_batch, obstacle_in_result
from fullshard.testing import device, ranks

on_a_cpu = pytest.mark.skipif(device().type != "cpu", reason="there, steps are captured")


def training(model: Any) -> tuple[Any, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        loss = (model(batch["x"]) - batch["y"]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss}

    return step, optimizer


def made(shard: Any) -> Any:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).to(device())
    return shard(model)


def data(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [
        {"x": torch.randn(3, 5, generator=generator), "y": torch.randn(3, 2, generator=generator)}
        for _ in range(count)
    ]


@on_a_cpu
@ranks(2)
def test_a_step_on_a_cpu_runs_eagerly_and_says_so_once() -> None:
    for shard in (FullyShardedDataParallel, fully_shard):
        (step, _), (twin_step, _) = training(made(shard)), training(made(shard))
        captured = fullshard.capture(twin_step, data(1)[0])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for batch in data(8):
                assert torch.equal(step(batch)["loss"], captured(batch)["loss"])
        told = [str(each.message) for each in caught if "not captured" in str(each.message)]
        assert captured.captured == 0
        assert "CPU" in captured.why_eager
        # The others need not say what is true of all ranks.
        assert len(told) == (1 if dist.get_rank() == 0 else 0)


@on_a_cpu
@ranks(2)
def test_a_rank_that_cannot_capture_keeps_the_others_from_it() -> None:
    captured = fullshard.capture(lambda batch: batch, torch.zeros(1))
    reason = "its step is odd" if dist.get_rank() == 1 else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not captured._all_can(reason)
    assert captured.why_eager == "its step is odd (rank 1)"
    assert fullshard.capture(lambda batch: batch, torch.zeros(1))._all_can(None)


@on_a_cpu
def test_without_a_process_group_a_step_runs_eagerly_and_says_why() -> None:
    captured = fullshard.capture(lambda batch: batch + 1, torch.zeros(1))
    with pytest.warns(UserWarning, match="runs eagerly: it runs on the CPU"):
        results = [captured(torch.full((1,), float(value))).item() for value in range(6)]
    assert results == [1, 2, 3, 4, 5, 6]


def test_a_batch_that_cannot_be_compared_is_refused() -> None:
    class Odd:
        __hash__ = None  # type: ignore[assignment]

    with pytest.raises(TypeError, match=r"holds a Odd.*dict\(batch\)"):
        fullshard.capture(lambda batch: batch, {"x": torch.zeros(1), "y": Odd()})


@ranks(2)
def test_what_the_host_looks_at_makes_calls_differ() -> None:
    for shard in (FullyShardedDataParallel, fully_shard):
        model = made(shard)
        step = Step()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        step.note_optimizer(optimizer)
        parameter = optimizer.param_groups[0]["params"][0]
        with torch.no_grad():
            model(torch.zeros(3, 5, device=device()))
        schedule = (
            model._schedule
            if isinstance(model, FullyShardedDataParallel)
            else model._fullshard_module_unit.schedule
        )
        step.note_pass(schedule)

        def kind(batch: Any, step: Step = step) -> Any:
            leaves, structure, _ = flatten(batch)
            check_batch(leaves)
            return step.kind_of(leaves, structure)

        batch = torch.zeros(3, 5)
        first = kind(batch)
        assert first == kind(torch.ones(3, 5))
        assert first.differences(kind(torch.zeros(4, 5))) == ["batch"]
        assert first.differences(kind(batch.double())) == ["batch"]
        assert first.differences(kind((batch,))) == ["batch"]
        assert first.differences(kind([batch, 1])) == ["batch"]
        assert kind([batch, 1]) != kind([batch, True])
        assert kind([batch, 0.0]) != kind([batch, -0.0])
        model.eval()
        assert first.differences(kind(batch)) == ["modes"]
        model.train()
        optimizer.param_groups[0]["lr"] = 0.2
        assert first.differences(kind(batch)) == ["hyperparameters"]
        # A graph reads what is on the device; what is on the host was read at its capture.
        elsewhere = "meta" if device().type == "cpu" else device()
        optimizer.param_groups[0]["lr"] = torch.tensor(0.2, device=elsewhere)
        by_tensor = kind(batch)
        optimizer.param_groups[0]["lr"].fill_(0.3)
        assert by_tensor == kind(batch)
        optimizer.param_groups[0]["lr"] = torch.tensor(0.2)
        on_host = kind(batch)
        assert on_host == kind(batch)
        optimizer.param_groups[0]["lr"].fill_(0.3)
        assert on_host.differences(kind(batch)) == ["hyperparameters"]
        optimizer.param_groups[0]["lr"] = 0.1
        parameter.requires_grad_(False)
        assert first.differences(kind(batch)) == ["trained parameters"]
        parameter.requires_grad_(True)
        with torch.no_grad():
            assert first.differences(kind(batch)) == ["surroundings"]
        model(torch.zeros(3, 5, device=device())).sum().backward()
        assert first.differences(kind(batch)) == ["gradients"]
        optimizer.zero_grad()
        assert first == kind(batch)
        added = torch.nn.Parameter(torch.zeros(2, device=device()))
        optimizer.add_param_group({"params": [added]})
        step.note_optimizer(optimizer)
        assert any(each is added for each in step.parameters)


@ranks(2)
def test_full_parameters_that_a_replay_has_outdated_are_gathered_again() -> None:
    for shard in (FullyShardedDataParallel, fully_shard):
        model = made(shard)
        parameters = list(model.parameters())

        class Graph:
            """Changes parameters as a device does: without a count of changes."""

            def replay(self, parameters: Any = parameters) -> None:
                for parameter in parameters:
                    getattr(parameter, "_local_tensor", parameter).data.zero_()

        graph = StepGraph(Graph(), [], None, parameters, [None] * len(parameters))
        batch = torch.ones(3, 5, device=device())
        model.unshard()
        graph.replay([])
        with torch.no_grad():
            assert not model(batch).any()


@dataclasses.dataclass
class Output:
    loss: torch.Tensor


def test_results_of_a_replay_are_not_overwritten_by_the_next_one() -> None:
    loss = torch.zeros(())
    replays = types.SimpleNamespace(replay=lambda: loss.add_(1))
    for result in (loss, {"loss": [loss]}, Output(loss), (Output(loss),)):
        loss.zero_()
        graph = StepGraph(replays, [], result, [], [])
        found = [graph.replay([]) for _ in range(3)]
        if isinstance(result, tuple):
            found = [each[0] for each in found]
        values = [getattr(each, "loss", each) for each in found]
        values = [each["loss"][0] if isinstance(each, dict) else each for each in values]
        assert values == [1, 2, 3]


def test_results_that_cannot_be_copied_are_told() -> None:
    holder = types.new_class("Holder")()
    assert obstacle_in_result((torch.zeros(1), {"a": 1}, Output(torch.zeros(1)), holder)) is None
    holder.loss = torch.zeros(1)
    assert "object that cannot be copied" in str(obstacle_in_result([holder]))


def test_batches_of_dataclasses_are_taken_apart_and_put_together() -> None:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Inner:
        values: list[Any]

    @dataclasses.dataclass
    class Outer:
        inner: dict[str, Inner]
        number: int

        def __post_init__(self) -> None:
            self.beside = self.number + 1

    def made(value: float, number: int = 1) -> Any:
        return (Outer({"a": Inner([torch.full((2,), value), None])}, number), "text")

    leaves, structure, spec = flatten(made(3.0))
    check_batch(leaves)
    (place,) = [index for index, leaf in enumerate(leaves) if torch.is_tensor(leaf)]
    assert structure == flatten(made(4.0))[1]
    leaves[place] = torch.full((2,), 7.0)
    outer, text = rebuilt(leaves, spec)
    assert (type(outer), outer.number, outer.beside, text) == (Outer, 1, 2, "text")
    assert torch.equal(outer.inner["a"].values[0], torch.full((2,), 7.0))
    assert outer.inner["a"].values[1] is None
    step = Step()
    kinds = [step.kind_of(*flatten(made(1.0, number))[:2]) for number in (1, 1, 2)]
    assert kinds[0] == kinds[1] != kinds[2]
    call = fullshard.capture(lambda batch: batch[0].inner["a"].values[0].sum(), made(0.0))
    assert call(made(2.0)) == 4
