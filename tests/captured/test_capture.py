"""``fullshard.capture`` over NCCL: steps that are replayed equal eager ones, bit for bit."""

from __future__ import annotations

import gc
import re
import warnings
from typing import Any

import torch
import torch.distributed as dist
from tests.captured.test_graphs import sharded, wrapped
from tests.captured.training import (
    LONG,
    PATIENCE,
    STEPS,
    Block,
    adam,
    assert_equal,
    batches,
    make_model,
    over_nccl,
    train_eagerly,
    whole_step,
)
from torch import nn

import fullshard
from fullshard.testing import ranks

pytestmark = over_nccl


def twins(shard: Any = wrapped, **options: Any) -> list[tuple[Any, Any, Any]]:
    made = []
    for _ in range(2):
        model = shard(make_model(), **options)
        optimizer = adam(model)
        made.append((model, optimizer, whole_step(model, optimizer)))
    return made


@ranks(2, timeout=PATIENCE)
def test_a_captured_step_with_batches_of_two_shapes_equals_eager_steps() -> None:
    for shard in (wrapped, sharded):
        (model, _, step), (twin, _, twin_step) = twins(shard)
        pairs = zip(batches(LONG // 2), batches(LONG // 2, rows=6), strict=True)
        data = [batch for pair in pairs for batch in pair]
        torch.cuda.manual_seed(5)
        expected = train_eagerly(step, data)
        torch.cuda.manual_seed(5)
        captured = fullshard.capture(twin_step, data[0])
        found = train_eagerly(captured, data)
        assert captured.captured == 2, captured.why_eager
        assert_equal((found, twin), (expected, model), shard.__name__)


@ranks(2, timeout=PATIENCE)
def test_a_step_is_captured_anew_when_what_the_host_looked_at_changes() -> None:
    (model, optimizer, step), (twin, twin_optimizer, twin_step) = twins()
    captured = fullshard.capture(twin_step, batches(1)[0], graphs=3)

    def modes(model: Any, optimizer: Any) -> Any:
        yield lambda: model.eval()
        yield lambda: model.blocks[0].requires_grad_(False)
        yield lambda: optimizer.param_groups[0].update(lr=0.003)
        yield lambda: optimizer.param_groups[0].update(lr=torch.tensor(0.001, device="cuda"))
        yield lambda: optimizer.param_groups[0]["lr"].fill_(0.02)
        yield lambda: model.blocks[0].requires_grad_(True)

    graphs = []
    for change, twin_change in zip(
        modes(model, optimizer), modes(twin, twin_optimizer), strict=True
    ):
        change(), twin_change()
        data = batches(8)
        assert train_eagerly(step, data) == train_eagerly(captured, data)
        graphs.append(captured.captured)
    assert graphs == [1, 2, 3, 3, 3, 3]
    assert_equal(([], twin), ([], model), "parameters")


@ranks(2, timeout=PATIENCE)
def test_micro_batches_in_calls_of_their_own_accumulate() -> None:
    runs = []
    for captures in (False, True):
        model = wrapped(make_model()).eval()
        optimizer = adam(model)

        def backward(batch: Any, model: Any = model) -> Any:
            loss = model(batch)
            loss.backward()
            return loss.detach()

        call = fullshard.capture(backward, batches(1)[0]) if captures else backward
        losses = []
        for index, batch in enumerate(batches(STEPS)):
            losses.append(call(batch).item())
            if index % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        runs.append((losses, model))
    assert call.captured == 2, call.why_eager
    assert_equal(runs[1], runs[0], "accumulated")


@ranks(2, timeout=PATIENCE)
def test_calls_that_are_all_different_run_eagerly_and_are_told_what_changes() -> None:
    (_, optimizer, step), _ = twins()
    captured = fullshard.capture(step, batches(1)[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index, batch in enumerate(batches(30)):
            optimizer.param_groups[0]["lr"] = 0.01 / (index + 1)
            captured(batch)
    told = [str(each.message) for each in caught if "Changed in the last call" in str(each.message)]
    assert len(told) == 1
    assert "hyperparameters" in told[0]
    assert captured.captured == 0
    assert captured.why_eager is None


@ranks(2, timeout=PATIENCE)
def test_what_cannot_be_captured_runs_eagerly_on_all_ranks_with_one_warning() -> None:
    def waits(model: Any, optimizer: Any, step: Any) -> Any:
        def waiting(batch: Any) -> Any:
            loss = step(batch)
            return loss if loss.item() < 1e9 else None

        return waiting

    def waits_on_one(model: Any, optimizer: Any, step: Any) -> Any:
        waiting = waits(model, optimizer, step)
        return waiting if dist.get_rank() == 1 else step

    def waits_in_the_middle_on_one(model: Any, optimizer: Any, step: Any) -> Any:
        def waiting(batch: Any) -> Any:
            loss = model(batch)
            if dist.get_rank() == 1:
                loss.item()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return waiting

    def counts_on_the_host(model: Any, optimizer: Any, step: Any) -> Any:
        for group in optimizer.param_groups:
            group["capturable"] = False
        return step

    cases = (
        (waits, "AcceleratorError|item"),
        (waits_on_one, "rank 1"),
        (waits_in_the_middle_on_one, "rank 1"),
        (counts_on_the_host, "capturable=True"),
    )
    for change, told in cases:
        (model, _, step), (twin, twin_optimizer, twin_step) = twins()
        data = batches(8)
        torch.cuda.manual_seed(5)
        expected = train_eagerly(step, data)
        torch.cuda.manual_seed(5)
        captured = fullshard.capture(change(twin, twin_optimizer, twin_step), data[0])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = train_eagerly(captured, data)
        ours = [str(each.message) for each in caught if "not captured" in str(each.message)]
        assert len(ours) == (1 if dist.get_rank() == 0 else 0), ours
        assert captured.why_eager is not None
        assert not ours or re.search(told, ours[0]), ours
        if change is not counts_on_the_host:
            assert_equal((found, twin), (expected, model), told)


@ranks(2, timeout=PATIENCE)
def test_a_capture_that_broke_leaves_neither_its_stream_nor_memory_that_nobody_gets() -> None:
    for shard in (wrapped, sharded):
        (_, _, step), _ = twins(shard)

        def waits(batch: Any, step: Any = step) -> Any:
            return step(batch) if torch.ones(1, device="cuda").item() else None

        captured = fullshard.capture(waits, batches(1)[0])
        stream, active = torch.cuda.current_stream(), []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for batch in batches(12):
                captured(batch)
                torch.cuda.synchronize()
                # Blocks that other streams have used are counted until the allocator looks again.
                torch.cuda.empty_cache()
                active.append(torch.cuda.memory_stats()["active_bytes.all.current"])
        assert captured.why_eager is not None
        assert torch.cuda.current_stream() == stream
        # Not one block, of 512 bytes at least, is left behind by each step.
        assert active[-1] - active[-6] < 5 * 512


@ranks(2, timeout=PATIENCE)
def test_blocks_compiled_into_graphs_of_their_own_train_as_eager_ones() -> None:
    data, losses = batches(8), []
    for compiles in (False, True):
        model = make_model().eval()
        if compiles:
            for block in model.blocks:
                block.compile(mode="reduce-overhead")
        model = wrapped(model)
        losses.append(train_eagerly(whole_step(model, adam(model)), data))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=1e-3)


@ranks(2, timeout=PATIENCE)
def test_a_captured_step_reserves_little_more_than_an_eager_one() -> None:
    def peak(captures: bool) -> int:
        wide = wrapped(nn.Sequential(*[Block(1024) for _ in range(8)]).cuda())
        optimizer = adam(wide)

        def step(batch: Any) -> Any:
            loss = wide(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        call: Any = step
        if captures:
            call = fullshard.capture(step, torch.empty(0, device="cuda"))
        for _ in range(6):
            call(torch.randn(4096, 1024, device="cuda"))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            call(torch.randn(4096, 1024, device="cuda"))
        if captures:
            assert call.captured == 1
        return torch.cuda.max_memory_reserved()

    eager = peak(captures=False)
    gc.collect()
    torch.cuda.empty_cache()
    assert peak(captures=True) <= 1.10 * eager
