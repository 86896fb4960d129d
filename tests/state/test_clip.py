"""clip_grad_norm_: the norm of the whole model's gradients, equal to the bare model's."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.original.training import (
    Net,
    assert_same_parameters,
    average_gradients,
    blocks_policy,
    build,
    inputs,
    loss_of,
    train_step,
)
from tests.state.models import WRAPPINGS, settings, wrapped
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from fullshard import CPUOffload, MixedPrecision, ShardingStrategy
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.testing import device, ranks, run_on_ranks

FULL_SHARD = ShardingStrategy.FULL_SHARD
NORMS = (2.0, 1.0, 3, 0.5, 2.5, math.inf)


@pytest.mark.parametrize(("world_size", "strategy"), settings(1, 3, 4))
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_norm_and_clipped_step_are_those_of_ddp(
    world_size: int, use_orig_params: bool, strategy: ShardingStrategy
) -> None:
    def compare() -> None:
        for wrapping in WRAPPINGS if strategy is FULL_SHARD else ("blocks",):
            bare = build(Net)
            model = wrapped(bare, strategy, wrapping, use_orig_params=use_orig_params)
            reference = DDP(bare)
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (reference, model)]
            for step, norm_type in enumerate(NORMS):
                for each, optimizer in zip((reference, model), optimizers, strict=True):
                    optimizer.zero_grad()
                    train_step(each, step)
                limit = 0.05 if step % 2 else 1e9
                expected = nn.utils.clip_grad_norm_(reference.parameters(), limit, norm_type)
                found = model.clip_grad_norm_(limit, norm_type)
                torch.testing.assert_close(found, expected)
                for optimizer in optimizers:
                    optimizer.step()
            assert_same_parameters(bare, model)

    run_on_ranks(world_size, compare)


class Mixed(nn.Module):
    """Parts that are sharded, replicated, ignored and not managed at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 7)
        self.third = nn.Linear(7, 3)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x)))


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_replicated_and_ignored_gradients_count_once(
    use_orig_params: bool, norm_type: float
) -> None:
    bare = build(Mixed)
    inner = copy.deepcopy(bare)
    options: dict[str, Any] = {"use_orig_params": use_orig_params}
    inner.second = FSDP(inner.second, sharding_strategy=ShardingStrategy.NO_SHARD, **options)
    model = FSDP(inner, ignored_modules=[inner.third], **options)
    for each in (bare, model):
        torch.manual_seed(0)
        each(torch.randn(4, 5, device=device())).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(bare.parameters(), 0.01, norm_type)
    found = model.clip_grad_norm_(0.01, norm_type)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(inner.third.weight.grad, bare.third.weight.grad)
    after = model.clip_grad_norm_(math.inf, norm_type)
    torch.testing.assert_close(after, torch.full_like(after, 0.01), rtol=1e-3, atol=0)


@ranks(2)
def test_low_precision_gradients_are_summed_in_full_precision() -> None:
    precision = MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)
    model = wrapped(
        build(Net), FULL_SHARD, "blocks", use_orig_params=True, mixed_precision=precision
    )
    train_step(model, 0)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    before = [gradient.double() for gradient in gradients]
    total = sum(gradient.square().sum() for gradient in before)
    dist.all_reduce(total)
    found = model.clip_grad_norm_(1e-2)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, total.sqrt().bfloat16())
    for gradient, old in zip(gradients, before, strict=True):
        assert gradient.dtype is torch.bfloat16
        torch.testing.assert_close(gradient.double(), old * 1e-2 / total.sqrt(), rtol=4e-3, atol=0)


@ranks(2)
def test_the_norm_of_gradients_of_several_dtypes_is_in_the_widest() -> None:
    low = MixedPrecision(torch.bfloat16, keep_low_precision_grads=True, cast_forward_inputs=True)
    inner = build(Mixed)
    inner.third = FSDP(inner.third, mixed_precision=low)
    model = FSDP(inner)
    model(inputs(0)).float().square().mean().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert {gradient.dtype for gradient in gradients} == {torch.bfloat16, torch.float32}
    total = sum(gradient.double().square().sum() for gradient in gradients)
    dist.all_reduce(total)

    found = model.clip_grad_norm_(1e-2)

    assert found.dtype is torch.float32
    torch.testing.assert_close(found, total.sqrt().float())


@ranks(2)
def test_a_rank_without_gradients_takes_part_and_is_warned() -> None:
    model = FSDP(nn.Linear(1, 1, bias=False, device=device()), use_orig_params=True)
    model(torch.ones(1, 1, device=device())).sum().backward()
    if dist.get_rank() == 0:
        assert model.clip_grad_norm_(0.5) == 1
        assert next(model.parameters()).grad.item() == pytest.approx(0.5, abs=1e-5)
    else:
        with pytest.warns(UserWarning, match="on rank 1 with no gradients"):
            assert model.clip_grad_norm_(0.5) == 1


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@ranks(2)
def test_without_any_gradient_the_norm_is_zero(norm_type: float) -> None:
    model = wrapped(build(Net), FULL_SHARD, "blocks")
    with pytest.warns(UserWarning, match="with no gradients"):
        found = model.clip_grad_norm_(1.0, norm_type)
    assert found == 0
    assert found.dtype is torch.float32


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@ranks(3)
def test_one_bad_element_on_one_rank_is_seen_by_all(bad: float, norm_type: float) -> None:
    model = wrapped(build(Net), FULL_SHARD, "one unit")
    train_step(model, 0)
    if dist.get_rank() == 1:
        model._flat_param.grad[3] = bad
    found = model.clip_grad_norm_(1.0, norm_type).item()
    assert math.isnan(found) if math.isnan(bad) else math.isinf(found)


@ranks(2)
def test_offloaded_gradients_are_clipped_where_they_are() -> None:
    bare = build(Net)
    model = wrapped(
        bare, FULL_SHARD, "blocks", cpu_offload=CPUOffload(True), device_id=device().index
    )
    for each in (bare, model):
        train_step(each, 0)
    average_gradients(bare)
    expected = nn.utils.clip_grad_norm_(bare.parameters(), 0.01)
    torch.testing.assert_close(model.clip_grad_norm_(0.01).to(expected.device), expected)


@pytest.mark.parametrize("given", ["0.01", torch.tensor(0.01)])
@ranks(2)
def test_a_maximum_from_a_command_line_or_in_a_tensor_clips_as_a_number(given: Any) -> None:
    model = FSDP(build(Net), auto_wrap_policy=blocks_policy())
    train_step(model, 0)
    before = model.clip_grad_norm_(given)
    after = model.clip_grad_norm_(0.01)

    assert before > 0.1
    torch.testing.assert_close(after, torch.full_like(after, 0.01))


@ranks(2)
def test_a_part_of_the_model_and_the_middle_of_a_step_are_refused() -> None:
    model = FSDP(build(Net), auto_wrap_policy=blocks_policy())
    with pytest.raises(RuntimeError, match="only be called on the root"):
        model.module.blocks[0].clip_grad_norm_(1.0)
    loss = loss_of(model, 0)
    with pytest.raises(RuntimeError, match="only be called on the root"):
        model.module.blocks[0].clip_grad_norm_(1.0)

    def clip(*_: Any) -> None:
        with pytest.raises(RuntimeError, match="in the middle of a forward or backward"):
            model.clip_grad_norm_(1.0)

    loss.register_hook(lambda _: None)
    model.module.head.register_forward_hook(clip)
    model(inputs(1))
    with pytest.raises(ValueError, match="norm_type above 0"):
        model.clip_grad_norm_(1.0, 0)


@ranks(2)
def test_gradients_of_no_sync_are_refused_until_they_are_reduced() -> None:
    model = FSDP(build(Net), auto_wrap_policy=blocks_policy(), use_orig_params=True)
    with model.no_sync():
        train_step(model, 0)
    with pytest.raises(RuntimeError, match="no_sync"):
        model.clip_grad_norm_(1.0)
    train_step(model, 1)
    assert model.clip_grad_norm_(1.0) > 0


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_complex_gradients_are_clipped(use_orig_params: bool, norm_type: float) -> None:
    reference = build(lambda: nn.Linear(5, 3, dtype=torch.complex64))
    model = FSDP(copy.deepcopy(reference), use_orig_params=use_orig_params)
    for each in (reference, model):
        each(inputs(0) + 1j).abs().square().sum().backward()
    average_gradients(reference)
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1, norm_type)
    torch.testing.assert_close(model.clip_grad_norm_(0.1, norm_type), expected)
    for each in (reference, model):
        torch.optim.SGD(each.parameters(), lr=0.3).step()
    assert_same_parameters(reference, model)
