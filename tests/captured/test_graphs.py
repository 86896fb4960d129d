"""``torch.cuda.graph`` around steps of sharded models, over NCCL: replays equal eager steps."""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
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
    train_by_graph,
    train_eagerly,
    whole_step,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from fullshard.testing import device, ranks
from fullshard.wrap import ModuleWrapPolicy

pytestmark = over_nccl

UNITS = ModuleWrapPolicy({Block})
LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def wrapped(model: nn.Module, strategy: str = "FULL_SHARD", **options: Any) -> Any:
    options.setdefault("use_orig_params", True)
    return FullyShardedDataParallel(
        model, sharding_strategy=ShardingStrategy[strategy], auto_wrap_policy=UNITS, **options
    )


def sharded(model: Any, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def train_both_ways(pair: list[Any], case: object, steps: int = STEPS) -> None:
    """Train one of two equal models eagerly and the other by a graph, and compare them."""
    (model, step), (twin, twin_step) = pair
    data = batches(steps)
    torch.cuda.manual_seed(5)
    expected = train_eagerly(step, data)
    torch.cuda.manual_seed(5)
    found = train_by_graph(twin_step, data)
    assert len(found) == steps
    assert_equal((found, twin), (expected, model), case)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@ranks(2, timeout=PATIENCE)
def test_replays_of_a_whole_step_equal_eager_steps(strategy: str) -> None:
    for original, mixed in itertools.product([True, False], repeat=2):
        precision = LOW if mixed else None
        pair: list[Any] = []
        for _ in range(2):
            model = wrapped(
                make_model(), strategy, use_orig_params=original, mixed_precision=precision
            )
            pair.append(
                (
                    model,
                    whole_step(model, adam(model), functools.partial(model.clip_grad_norm_, 0.5)),
                )
            )
        train_both_ways(pair, f"use_orig_params={original} mixed={mixed}", LONG)


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@ranks(4, timeout=PATIENCE)
def test_replays_of_a_hybrid_step_equal_eager_steps(strategy: str) -> None:
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("copies", "shards"))
    pair: list[Any] = []
    for _ in range(2):
        model = wrapped(make_model(), strategy, device_mesh=mesh)
        pair.append(
            (model, whole_step(model, adam(model), functools.partial(model.clip_grad_norm_, 0.5)))
        )
    train_both_ways(pair, strategy, LONG)


@pytest.mark.parametrize("reshards", [True, False])
@ranks(4, timeout=PATIENCE)
def test_replays_of_fully_shard_equal_eager_steps(reshards: bool) -> None:
    for mixed in (False, True):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else None
        options: Any = {"mp_policy": policy} if policy else {}
        pair: list[Any] = []
        for _ in range(2):
            model = sharded(make_model(), reshard_after_forward=reshards, **options)

            def clip(model: Any = model) -> object:
                return nn.utils.clip_grad_norm_(model.parameters(), 0.5)

            pair.append((model, whole_step(model, adam(model), clip)))
        train_both_ways(pair, f"mixed={mixed}", LONG)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@ranks(2, timeout=PATIENCE)
def test_gradients_are_accumulated_inside_a_graph(strategy: str) -> None:
    for without_sync, original in itertools.product([True, False], repeat=2):
        pair: list[Any] = []
        for _ in range(2):
            model = wrapped(make_model(), strategy, use_orig_params=original)
            optimizer = adam(model)

            def step(
                batch: Any,
                model: Any = model,
                optimizer: Any = optimizer,
                without_sync: bool = without_sync,
            ) -> Any:
                first, second = batch.chunk(2)
                with model.no_sync() if without_sync else contextlib.nullcontext():
                    model(first).backward()
                loss = model(second)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss.detach()

            pair.append((model, step))
        train_both_ways(pair, f"without_sync={without_sync} use_orig_params={original}")


@ranks(2, timeout=PATIENCE)
def test_fully_shard_accumulates_gradients_inside_a_graph() -> None:
    for without_sync in (True, False):
        pair: list[Any] = []
        for _ in range(2):
            model = sharded(make_model())
            optimizer = adam(model)

            def step(
                batch: Any,
                model: Any = model,
                optimizer: Any = optimizer,
                without_sync: bool = without_sync,
            ) -> Any:
                first, second = batch.chunk(2)
                model.set_requires_gradient_sync(not without_sync)
                model(first).backward()
                model.set_requires_gradient_sync(True)
                loss = model(second)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss.detach()

            pair.append((model, step))
        train_both_ways(pair, f"without_sync={without_sync}")


@ranks(2, timeout=PATIENCE)
def test_forward_and_backward_alone_are_captured() -> None:
    for original in (True, False):
        data, runs = batches(STEPS), []
        for captures in (False, True):
            model = wrapped(make_model(), use_orig_params=original)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

            def step(batch: Any, model: Any = model, optimizer: Any = optimizer) -> Any:
                optimizer.zero_grad()
                loss = model(batch)
                loss.backward()
                return loss.detach()

            torch.cuda.manual_seed(5)
            if captures:
                losses = train_by_graph(step, data, after_replay=optimizer.step)
            else:
                losses = []
                for batch in data:
                    losses.append(step(batch).item())
                    optimizer.step()
            runs.append((losses, model))
        assert_equal(runs[1], runs[0], f"use_orig_params={original}")


@ranks(2, timeout=PATIENCE)
def test_frozen_groups_and_recomputed_activations_are_captured() -> None:
    def freeze(model: Any) -> Any:
        model.blocks[0].requires_grad_(False)
        model.blocks[1].up.requires_grad_(False)
        return model

    for shard in (wrapped, sharded):
        for recomputes, frozen in ((True, False), (False, True), (True, True)):
            pair: list[Any] = []
            for _ in range(2):
                model = make_model(recomputes=recomputes)
                model = shard(freeze(model) if frozen else model)
                pair.append((model, whole_step(model, adam(model))))
            train_both_ways(pair, f"{shard.__name__} recomputes={recomputes} frozen={frozen}")


@ranks(2, timeout=PATIENCE)
def test_eager_steps_state_dicts_and_summoning_between_replays() -> None:
    for shard in (wrapped, sharded):
        data, runs = batches(STEPS), []
        for captures in (False, True):
            model = shard(make_model())
            model.eval()  # No random numbers: a step more in between uses up some.
            optimizer = adam(model)
            step = whole_step(model, optimizer)

            def between(index: int, model: Any = model, step: Any = step, data: Any = data) -> None:
                if index == 6:
                    step(data[3])
                if index == 9:
                    model.load_state_dict(model.state_dict())
                if index == 12 and isinstance(model, FullyShardedDataParallel):
                    with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
                        for parameter in model.parameters():
                            parameter.mul_(0.5)
                if index == 15:
                    with torch.no_grad():
                        model(data[0])

            if captures:
                losses = train_by_graph(step, data, between=between)
            else:
                losses = []
                for index, batch in enumerate(data):
                    losses.append(step(batch).item())
                    between(index)
            runs.append((losses, model))
        assert_equal(runs[1], runs[0], shard.__name__)


@ranks(2, timeout=PATIENCE)
def test_what_cannot_be_captured_says_so_and_trains_on() -> None:
    from torch.distributed.algorithms._comm_hooks import default_hooks

    gloo = dist.new_group(backend="gloo")
    offloaded = wrapped(make_model(), cpu_offload=CPUOffload(offload_params=True))
    hooked = wrapped(make_model())
    hooked.register_comm_hook(
        default_hooks.DefaultState(dist.group.WORLD), default_hooks.reduce_scatter_hook
    )
    over_gloo = wrapped(make_model(), process_group=gloo)
    named = ((offloaded, "CPUOffload"), (hooked, "register_comm_hook"), (over_gloo, "gloo"))
    for model, option in named:
        data = batches(4)
        step = whole_step(model, torch.optim.SGD(model.parameters(), lr=0.05))
        with pytest.raises(RuntimeError, match=option) as raised:
            train_by_graph(step, data)
        assert "\n" not in str(raised.value)
        train_eagerly(step, data)


@ranks(2, timeout=PATIENCE)
def test_training_goes_on_after_a_capture_that_broke() -> None:
    for shard in (wrapped, sharded):
        models = [shard(make_model()) for _ in range(2)]
        steps = [whole_step(model.eval(), adam(model)) for model in models]
        data = batches(10)

        def waits(batch: Any, model: Any = models[0]) -> Any:
            loss = model(batch)
            loss.item()
            loss.backward()
            return loss

        class Break(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Any) -> Any:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, gradient: Any) -> Any:
                gradient.sum().item()
                return gradient

        def waits_in_backward(batch: Any, model: Any = models[0]) -> Any:
            loss = model(batch)
            Break.apply(loss).backward()
            return loss

        def raises_in_forward(batch: Any, model: Any = models[0]) -> Any:
            hook = model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
            try:
                return model(batch)
            finally:
                hook.remove()

        losses: list[float] = []
        for index, broken in enumerate((waits, raises_in_forward, waits_in_backward)):
            losses += train_eagerly(steps[0], data[2 * index : 2 * index + 2])
            graph = torch.cuda.CUDAGraph()
            with (
                pytest.raises((RuntimeError, ZeroDivisionError)),
                torch.cuda.graph(graph, capture_error_mode="thread_local"),
            ):
                broken(data[0])
            # What a capture leaves as gradients was never computed.
            models[0].zero_grad()
        losses += train_eagerly(steps[0], data[6:])
        assert_equal(
            (losses, models[0]), (train_eagerly(steps[1], data), models[1]), shard.__name__
        )
        assert device().type == "cuda"
