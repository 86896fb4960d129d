"""Gradients inside no_sync stay local and whole; the next backward outside reduces their sum."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.engine.traffic import counted_traffic
from tests.original.training import (
    STRATEGIES,
    Net,
    assert_at_rest,
    assert_same_parameters,
    average_gradients,
    blocks_policy,
    build,
    inputs,
    train_step,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import MixedPrecision, ShardingStrategy
from fullshard.testing import ranks


def pair(strategy: ShardingStrategy, **options: Any) -> tuple[FSDP, FSDP]:
    """The same model, flattened and with original parameters."""
    flat, original = (
        FSDP(
            build(Net),
            sharding_strategy=strategy,
            auto_wrap_policy=blocks_policy(),
            use_orig_params=use_orig_params,
            **options,
        )
        for use_orig_params in (False, True)
    )
    return flat, original


def local_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_inside_no_sync_gradients_are_those_of_one_rank_in_original_shapes(
    strategy: ShardingStrategy,
) -> None:
    alone = build(Net)
    _, model = pair(strategy)
    train_step(alone, 0)
    with model.no_sync():
        train_step(model, 0)
    for expected, found in zip(alone.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)
    assert_at_rest_or_kept(model)


def assert_at_rest_or_kept(model: FSDP) -> None:
    """Strategies that keep full parameters may keep them inside no_sync; others may not."""
    if model.sharding_strategy is not ShardingStrategy.SHARD_GRAD_OP:
        assert_at_rest(model)


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_flat_mode_shows_the_whole_gradient_flattened_and_exactly_the_same(
    strategy: ShardingStrategy,
) -> None:
    flat, original = pair(strategy)
    for model in (flat, original):
        with model.no_sync():
            train_step(model, 0)
            train_step(model, 1)
    for one, other in zip(FSDP.fsdp_modules(flat), FSDP.fsdp_modules(original), strict=True):
        parts = [p.grad.flatten() for p in other._flat_param._params]
        assert torch.equal(one._flat_param.grad, torch.cat(parts))


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_both_modes_agree_exactly_over_adamw_steps(strategy: ShardingStrategy) -> None:
    models = pair(strategy)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.02, foreach=True) for m in models]
    for step in range(3):
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            with model.no_sync():
                first = train_step(model, 3 * step)
                second = train_step(model, 3 * step + 1)
            losses.append([first, second, train_step(model, 3 * step + 2)])
            optimizer.step()
        assert losses[0] == losses[1]
    flat, original = models
    with FSDP.summon_full_params(flat), FSDP.summon_full_params(original):
        for one, other in zip(flat.named_parameters(), original.named_parameters(), strict=True):
            assert one[0] == other[0]
            assert torch.equal(one[1], other[1]), one[0]


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("pattern", ["nns", "sns", "nsns", "snns"])
@ranks(2)
def test_any_sequence_of_no_sync_and_sync_sums_as_ddp_does(
    pattern: str, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    reference = DDP(build(Net))
    model = pair(strategy)[use_orig_params]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.02) for m in (reference, model)]
    for repeat in range(2):
        for each, optimizer in zip((reference, model), optimizers, strict=True):
            optimizer.zero_grad()
            for position, kind in enumerate(pattern):
                with each.no_sync() if kind == "n" else contextlib.nullcontext():
                    train_step(each, 10 * repeat + position)
            optimizer.step()
        assert_same_parameters(reference.module, model)
    assert_at_rest(model)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_zero_grad_forgets_what_no_sync_kept(
    strategy: ShardingStrategy, use_orig_params: bool, set_to_none: bool
) -> None:
    reference = DDP(build(Net))
    model = pair(strategy)[use_orig_params]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, model)]
    for each, optimizer in zip((reference, model), optimizers, strict=True):
        with each.no_sync():
            train_step(each, 0)
        optimizer.zero_grad(set_to_none=set_to_none)
        train_step(each, 1)
        optimizer.step()
    assert_same_parameters(reference.module, model)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES[:2])
@ranks(2)
def test_what_no_sync_kept_and_zero_grad_forgot_is_no_gradient_after_a_backward_to_inputs_alone(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    model = pair(strategy)[use_orig_params]
    with model.no_sync():
        train_step(model, 0)
    model.zero_grad()
    if use_orig_params:
        with FSDP.summon_full_params(model, with_grads=True):
            assert all(parameter.grad is None for parameter in model.parameters())
    assert model.clip_grad_norm_(1.0) == 0
    given = inputs(1).requires_grad_()
    torch.autograd.grad(model(given).sum(), given)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_gradients_are_in_compute_precision_inside_and_in_full_precision_after(
    strategy: ShardingStrategy, dtype: torch.dtype
) -> None:
    precision = MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32)
    for model in pair(strategy, mixed_precision=precision):
        with model.no_sync():
            for step in range(2):
                train_step(model, step)
                assert {p.grad.dtype for p in model.parameters()} == {dtype}
        train_step(model, 2)
        present = [p for p in model.parameters() if p.grad is not None]
        assert {p.grad.dtype for p in present} == {torch.float32}
        assert all(p.grad.shape == p.shape for p in present)


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_low_precision_gradients_of_one_rank_equal_those_of_the_cast_module(
    strategy: ShardingStrategy,
) -> None:
    alone = build(Net).to(torch.bfloat16)
    _, model = pair(strategy, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    alone(inputs(0).bfloat16()).square().mean().backward()
    with model.no_sync():
        model(inputs(0)).square().mean().backward()
    for expected, found in zip(alone.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


class TwoBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(5, 3) for _ in range(2))

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.branches[branch](x)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_a_unit_used_inside_no_sync_only_is_reduced_by_the_next_backward(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    reference = build(TwoBranches)
    model = FSDP(
        build(TwoBranches),
        sharding_strategy=strategy,
        auto_wrap_policy=lambda module, recurse, **_: recurse or isinstance(module, nn.Linear),
        use_orig_params=use_orig_params,
    )
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.02) for m in (reference, model)]
    for step in range(2):
        for each, optimizer in zip((reference, model), optimizers, strict=True):
            optimizer.zero_grad()
            with each.no_sync() if each is model else contextlib.nullcontext():
                each(inputs(step), branch=0).square().mean().backward()
            each(inputs(step), branch=1).square().mean().backward()
            if each is reference:
                average_gradients(reference)
            optimizer.step()
        assert_same_parameters(reference, model)
    assert_at_rest(model)


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_no_sync_of_a_part_leaves_the_rest_synchronising(strategy: ShardingStrategy) -> None:
    alone, reference = build(Net), build(Net)
    _, model = pair(strategy)
    train_step(alone, 0)
    train_step(reference, 0)
    average_gradients(reference)
    with model.blocks[1].no_sync():
        train_step(model, 0)
    for name, parameter in model.blocks[1].named_parameters():
        expected = dict(alone.blocks[1].named_parameters())[name]
        torch.testing.assert_close(parameter.grad, expected.grad)
    train_step(model, 1)
    train_step(reference, 1)
    # The first backward's gradients are means already; the mean of means is the mean.
    average_gradients(reference)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, model)]
    for optimizer in optimizers:
        optimizer.step()
    assert_same_parameters(reference, model)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_a_state_dict_does_not_hide_that_parameters_kept_by_no_sync_were_replaced(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    halved = build(Net)
    model = FSDP(copy.deepcopy(halved), sharding_strategy=strategy, use_orig_params=use_orig_params)
    with model.no_sync():
        train_step(model, 0)
    for each in (model, halved):
        for parameter in each.parameters():
            parameter.data = parameter.data * 0.5

    saved = model.state_dict()
    output = model(inputs(1))

    for name, value in halved.state_dict().items():
        torch.testing.assert_close(saved[name], value)
    torch.testing.assert_close(output, halved(inputs(1)))


@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_an_evaluation_inside_no_sync_keeps_the_gradients(use_orig_params: bool) -> None:
    for strategy in STRATEGIES:
        reference = DDP(build(Net))
        model = pair(strategy)[use_orig_params]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, model)]
        for each, optimizer in zip((reference, model), optimizers, strict=True):
            with each.no_sync():
                train_step(each, 0)
                with torch.no_grad():
                    each(inputs(5))
            train_step(each, 1)
            optimizer.step()
        assert_same_parameters(reference.module, model)


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_an_optimizer_step_after_no_sync_kept_parameters_uses_the_new_values(
    strategy: ShardingStrategy,
) -> None:
    """SHARD_GRAD_OP keeps full parameters through no_sync: an update must not be lost."""
    _, model = pair(strategy)
    with model.no_sync():
        train_step(model, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    halved = build(Net)
    with torch.no_grad():
        for parameter in halved.parameters():
            parameter.mul_(0.5)
    torch.testing.assert_close(model(inputs(1)), halved(inputs(1)))


@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_strategies_that_keep_full_parameters_gather_once_inside_no_sync(
    use_orig_params: bool,
) -> None:
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        model = pair(strategy)[use_orig_params]
        train_step(model, 0)
        with model.no_sync():
            train_step(model, 1)
            with counted_traffic() as traffic:
                train_step(model, 2)
        assert bool(traffic.gathered) == (strategy is ShardingStrategy.FULL_SHARD)
        assert traffic.reduced == 0
        train_step(model, 3)
        assert_at_rest(model)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_reduced_gradients_keep_their_precision_through_no_sync(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    precision = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32)
    model = pair(strategy, mixed_precision=precision)[use_orig_params]

    def backward(factor: float) -> list[torch.Tensor | None]:
        model(inputs(0)).float().mul(factor).sum().backward()
        return [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    # Twice as large, as they are made whole on two ranks, float16 could not contain them.
    reduced = backward(12000.0)
    largest = torch.stack([g.abs().max() for g in reduced if g is not None and g.numel()]).max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    assert 2**15 < largest < 2**16
    with model.no_sync():
        backward(0.0)
    after = backward(0.0)
    for before, now in zip(reduced, after, strict=True):
        assert (before is None) == (now is None)
        assert before is None or torch.equal(now, before)
