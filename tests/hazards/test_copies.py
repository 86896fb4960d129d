"""Deepcopy, pickling, and moving or converting a model after it was wrapped."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.original.training import (
    EITHER_API,
    EITHER_MODES,
    MODES,
    STRATEGIES,
    Net,
    assert_at_rest,
    assert_same_parameters,
    average_gradients,
    blocks_policy,
    build,
    compare_models,
    full_parameters,
    inputs,
    sharded,
    train_step,
)
from torch import nn

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import MixedPrecision, ShardingStrategy
from fullshard.testing import device, ranks

EACH_MODE = pytest.mark.parametrize(("strategy", "use_orig_params"), EITHER_MODES)
EACH_STRATEGY = pytest.mark.parametrize("strategy", EITHER_API)
WRAPPED_MODE = pytest.mark.parametrize(("strategy", "use_orig_params"), MODES)
WRAPPED = pytest.mark.parametrize("strategy", STRATEGIES)


def wrapped(strategy: ShardingStrategy, use_orig_params: bool = True, **options: Any) -> Any:
    return sharded(
        build(Net),
        sharding_strategy=strategy,
        auto_wrap_policy=blocks_policy(),
        use_orig_params=use_orig_params,
        **options,
    )


def by_pickle(model: Any) -> Any:
    copied: FSDP = pickle.loads(pickle.dumps(model))
    return copied


def by_saving(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copied: FSDP = torch.load(file, weights_only=False)
    return copied


COPIES: dict[str, Callable[[FSDP], FSDP]] = {
    "deepcopy": copy.deepcopy,
    "pickle": by_pickle,
    "torch.save": by_saving,
}


@WRAPPED_MODE
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("after_step", [False, True])
@ranks(2)
def test_a_copy_trains_like_the_original_and_apart_from_it(
    after_step: bool, how: str, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    reference, model = build(Net), wrapped(strategy, use_orig_params)
    if after_step:
        compare_models(reference, model, steps=2)
        for each in (reference, model):
            each.zero_grad()
    before = full_parameters(model)
    copied = COPIES[how](model)
    compare_models(copy.deepcopy(reference), copied, steps=2, first_step=2)
    after = full_parameters(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    compare_models(reference, model, steps=2, first_step=4)


@WRAPPED
@pytest.mark.parametrize("how", COPIES)
@ranks(2)
def test_a_copy_shares_no_memory_and_no_module_with_the_original(
    how: str, strategy: ShardingStrategy
) -> None:
    model = wrapped(strategy)
    train_step(model, 0)
    copied = COPIES[how](model)
    assert not {id(m) for m in model.modules()} & {id(m) for m in copied.modules()}
    mine, theirs = (
        {p.untyped_storage().data_ptr() for p in m.parameters() if p.numel()}
        for m in (model, copied)
    )
    assert not mine & theirs
    assert_at_rest(model)
    assert_at_rest(copied)


@WRAPPED
@ranks(2)
def test_gradients_are_left_behind_by_a_deepcopy_as_torch_does(strategy: ShardingStrategy) -> None:
    bare, model = build(Net), wrapped(strategy)
    for each in (bare, model):
        train_step(each, 0)
    expected = [p.grad is None for p in copy.deepcopy(bare).parameters()]
    copied = copy.deepcopy(model)
    assert [p.grad is None for p in copied.parameters()] == expected
    assert any(p.grad is not None for p in model.parameters())


@ranks(2)
def test_a_nested_unit_is_copied_on_its_own() -> None:
    model = wrapped(ShardingStrategy.FULL_SHARD)
    train_step(model, 0)
    block = copy.deepcopy(model.blocks[1])
    reference = build(Net).blocks[1]
    hidden = inputs(0, 2, 7)
    torch.testing.assert_close(block(hidden), reference(hidden))


@EACH_MODE
@pytest.mark.parametrize("after_step", [False, True])
@ranks(2)
def test_a_model_converted_to_double_trains_in_double(
    after_step: bool, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    reference, model = build(Net), wrapped(strategy, use_orig_params)
    if after_step:
        compare_models(reference, model, steps=1)
    for each in (reference, model):
        each.zero_grad()
    model, reference = model.to(torch.float64), reference.to(torch.float64)

    def step_of(model: nn.Module, step: int) -> torch.Tensor:
        output = model(inputs(step).double())
        assert output.dtype is torch.float64
        loss = output.square().mean()
        loss.backward()
        return loss.detach()

    compare_models(reference, model, step_of, steps=2, first_step=1)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float64}


@EACH_MODE
@ranks(2)
def test_half_and_back_to_float_carry_the_parameters_along(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    reference, model = build(Net).half(), wrapped(strategy, use_orig_params).half()
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert_same_parameters(reference, model)
    reference, model = reference.float(), model.float()
    assert_same_parameters(reference, model)
    compare_models(reference, model, steps=1)


@WRAPPED_MODE
@ranks(2)
def test_moving_to_the_device_after_wrapping_on_the_cpu(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    torch.manual_seed(7)
    model = sharded(
        Net(),
        sharding_strategy=strategy,
        auto_wrap_policy=blocks_policy(),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )
    model = model.to(device())
    assert {p.device for p in model.parameters()} == {device()}
    compare_models(build(Net), model, steps=2)


@EACH_STRATEGY
@ranks(2)
def test_an_optimizer_stays_valid_when_the_model_is_moved_in_place(
    strategy: ShardingStrategy,
) -> None:
    reference, model = build(Net), wrapped(strategy)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, model)]
    model.to(device())
    model.cpu().to(device())
    train_step(model, 0)
    optimizers[1].step()
    train_step(reference, 0)
    average_gradients(reference)
    optimizers[0].step()
    assert_same_parameters(reference, model)


class Normed(nn.Module):
    """Buffers of several kinds: running statistics, integers, one that is not saved, None."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("shift", torch.full((6,), 0.3), persistent=False)
        self.register_buffer("index", torch.arange(6))
        self.register_buffer("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        assert self.shift.device == y.device
        return self.norm(y.float()) + self.shift.to(y.dtype)[self.index]


@EACH_MODE
@ranks(2)
def test_buffers_stay_whole_keep_their_dtype_and_are_updated(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    reference = build(Normed)
    model = sharded(build(Normed), sharding_strategy=strategy, use_orig_params=use_orig_params)
    compare_models(reference, model, steps=2)
    expected, found = dict(reference.named_buffers()), dict(model.named_buffers())
    assert list(expected) == list(found)
    for name, buffer in expected.items():
        assert found[name].dtype == buffer.dtype
        torch.testing.assert_close(found[name], buffer)


@WRAPPED
@ranks(2)
def test_buffers_compute_in_their_own_low_precision(strategy: ShardingStrategy) -> None:
    seen: list[torch.dtype] = []

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 6)
            self.register_buffer("shift", torch.full((6,), 0.3))
            self.register_buffer("index", torch.arange(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.extend([self.shift.dtype, self.index.dtype])
            return self.linear(x) + self.shift[self.index]

    precision = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    model = sharded(
        build(Shift), sharding_strategy=strategy, mixed_precision=precision, use_orig_params=True
    )
    assert model(inputs(0)).dtype is torch.bfloat16
    assert seen == [torch.bfloat16, torch.int64]


class Encoder(nn.Linear):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self(x))


@pytest.mark.parametrize("how", COPIES)
@ranks(2)
def test_a_registered_method_of_a_copy_runs_the_copy(how: str) -> None:
    model = sharded(build(lambda: Encoder(5, 3)), use_orig_params=True)
    model.register_forward_method("encode")
    twin = COPIES[how](model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
        for each in (model, twin):
            torch.testing.assert_close(each.encode(inputs(0)), torch.tanh(each(inputs(0))))
