"""Optimizers over original parameters: groups, several of them, None against zero, freezing."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from tests.original.training import (
    STRATEGIES,
    Block,
    Net,
    assert_same_parameters,
    average_gradients,
    blocks_policy,
    build,
    inputs,
    loss_of,
    train_step,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from fullshard import BackwardPrefetch, CPUOffload, ShardingStrategy
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.engine.params.handle import _FSDP_SKIP_WRITEBACK_CHECK
from fullshard.testing import device, ranks


def grouped(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Weights, biases and the rest, each with hyperparameters of its own."""
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": 0.1, "lr": 1e-2},
        {"params": [], "weight_decay": 0.01, "lr": 1e-3},
        {"params": []},
    ]
    for name, parameter in model.named_parameters():
        index = 0 if "weight" in name else 1 if "bias" in name else 2
        groups[index]["params"].append(parameter)
    return torch.optim.AdamW(groups, lr=5e-3, **options)


def check_parity(
    reference: DDP, model: FSDP, optimizers: tuple[Any, Any], set_to_none: bool, steps: int = 4
) -> None:
    for step in range(steps):
        losses = []
        for each, optimizer in zip((reference, model), optimizers, strict=True):
            if step % 2 == 0:
                optimizer.zero_grad(set_to_none=set_to_none)
            loss = loss_of(each, step)
            losses.append(loss.detach())
            if step % 2 == 1:
                optimizer.zero_grad(set_to_none=set_to_none)
            loss.backward()
            optimizer.step()
        torch.testing.assert_close(*losses)
    assert_same_parameters(reference.module, model)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("prefetch", [None, *BackwardPrefetch])
@ranks(2)
def test_parameter_groups_train_as_under_ddp(
    prefetch: BackwardPrefetch | None, strategy: ShardingStrategy
) -> None:
    for before, foreach, set_to_none, skip in (
        (False, False, False, False),
        (False, True, True, True),
        (True, True, False, False),
        (True, False, True, False),
    ):
        os.environ[_FSDP_SKIP_WRITEBACK_CHECK] = str(int(skip))
        reference, bare = DDP(build(Net)), build(Net)
        options = {"foreach": foreach}
        optimizer = grouped(bare, **options) if before else None
        model = FSDP(
            bare,
            sharding_strategy=strategy,
            auto_wrap_policy=blocks_policy(),
            backward_prefetch=prefetch,
            use_orig_params=True,
        )
        pair = grouped(reference, **options), optimizer or grouped(model, **options)
        check_parity(reference, model, pair, set_to_none)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_the_models_own_zero_grad_works_between_forward_and_backward(
    strategy: ShardingStrategy, set_to_none: bool
) -> None:
    reference, bare = DDP(build(Net)), build(Net)
    model = FSDP(
        bare, sharding_strategy=strategy, auto_wrap_policy=blocks_policy(), use_orig_params=True
    )
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (reference, model)]
    for step in range(3):
        for each, optimizer in zip((reference, model), optimizers, strict=True):
            loss = loss_of(each, step)
            each.zero_grad(set_to_none)
            loss.backward()
            optimizer.step()
    assert_same_parameters(reference.module, model)


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_parameter_groups_train_with_offloaded_parameters(strategy: ShardingStrategy) -> None:
    reference = build(Net)
    model = FSDP(
        build(Net),
        sharding_strategy=strategy,
        auto_wrap_policy=blocks_policy(),
        cpu_offload=CPUOffload(offload_params=True),
        use_orig_params=True,
    )
    optimizers = grouped(reference), grouped(model)
    for step in range(3):
        for each, optimizer in zip((reference, model), optimizers, strict=True):
            optimizer.zero_grad()
            train_step(each, step)
            if each is reference:
                average_gradients(reference)
            optimizer.step()
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    with FSDP.summon_full_params(model):
        for expected, found in zip(reference.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(found.to(device()), expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("foreach", [False, True])
@ranks(2)
def test_a_frozen_parameter_group_stays_as_it_was(
    foreach: bool, strategy: ShardingStrategy
) -> None:
    reference, model = (
        DDP(build(Net), find_unused_parameters=True),
        FSDP(
            build(Net),
            sharding_strategy=strategy,
            auto_wrap_policy=blocks_policy(),
            use_orig_params=True,
        ),
    )
    optimizers = grouped(reference, foreach=foreach), grouped(model, foreach=foreach)
    for each in (reference, model):
        for name, parameter in each.named_parameters():
            if "bias" in name:
                parameter.requires_grad_(False)
    check_parity(reference, model, optimizers, set_to_none=False)
    with FSDP.summon_full_params(model):
        assert torch.equal(model.module.head.bias, build(Net).head.bias)


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_an_optimizer_built_before_wrapping_keeps_its_state_through_it(
    strategy: ShardingStrategy,
) -> None:
    reference = build(Net)
    sgd = torch.optim.SGD(reference.parameters(), lr=0.1)
    bare = copy.deepcopy(reference)
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
    model = FSDP(
        bare,
        sharding_strategy=strategy,
        auto_wrap_policy=blocks_policy(),
        use_orig_params=True,
    )
    for step in range(2):
        for each in (sgd, optimizer):
            each.zero_grad()
        train_step(model, step)
        optimizer.step()
        train_step(reference, step)
        average_gradients(reference)
        sgd.step()
    assert_same_parameters(reference, model)


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_a_none_gradient_is_not_stepped_and_a_zero_gradient_is(strategy: ShardingStrategy) -> None:
    """Two Adams, of which one sets gradients to None and the other to zero."""

    def two(model: nn.Module) -> list[torch.optim.Optimizer]:
        named = dict(model.named_parameters())
        blocks = [p for n, p in named.items() if "blocks" in n]
        rest = [p for n, p in named.items() if "blocks" not in n]
        return [torch.optim.Adam(blocks, lr=0.02), torch.optim.Adam(rest, lr=0.02)]

    reference = build(Net)
    model = FSDP(
        build(Net),
        sharding_strategy=strategy,
        auto_wrap_policy=blocks_policy(),
        use_orig_params=True,
    )
    optimizers = two(reference), two(model)
    for step in range(4):
        for each, (first, second) in zip((reference, model), optimizers, strict=True):
            first.zero_grad(set_to_none=True)
            second.zero_grad(set_to_none=False)
            if step != 1:
                train_step(each, step)
                if each is reference:
                    average_gradients(each)
            # In step 1 the first has only None to step and the second zeros (with momentum).
            first.step()
            second.step()
        assert_same_parameters(reference, model)
    for name, parameter in model.named_parameters():
        if parameter.numel():
            state = optimizers[1]["blocks" not in name].state[parameter]
            assert state["step"] == (3 if "blocks" in name else 4), name


class Choice(nn.Module):
    """Uses one of two blocks, by rank or by step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.extra = nn.Parameter(torch.ones(7))
        self.never = nn.Parameter(torch.ones(9))

    def forward(self, x: torch.Tensor, step: int, everywhere: bool) -> torch.Tensor:
        x = self.first(x)
        odd = torch.distributed.get_rank() == 1
        if step % 2 == 0 and (everywhere or odd):
            x = x * self.extra
        return self.blocks[step % 2](x)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("everywhere", [True, False])
@ranks(2)
def test_a_parameter_that_no_rank_used_has_no_gradient_and_one_that_some_rank_used_has_one(
    everywhere: bool, strategy: ShardingStrategy
) -> None:
    reference = build(Choice)
    model = FSDP(
        build(Choice),
        sharding_strategy=strategy,
        auto_wrap_policy=blocks_policy(),
        use_orig_params=True,
    )
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.02) for m in (reference, model)]
    for step in range(4):
        for each, optimizer in zip((reference, model), optimizers, strict=True):
            optimizer.zero_grad()
            each(inputs(step), step, everywhere).square().mean().backward()
            if each is reference:
                average_gradients(each)
            optimizer.step()
        assert_same_parameters(reference, model)
    assert model.module.never.grad is None
    for expected, found in zip(reference.parameters(), model.parameters(), strict=True):
        if found.numel():
            assert (expected.grad is None) == (found.grad is None)
            state = optimizers[1].state[found], optimizers[0].state[expected]
            assert state[0].get("step") == state[1].get("step")


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_parameters_are_frozen_and_unfrozen_between_steps(strategy: ShardingStrategy) -> None:
    reference = build(Net)
    model = FSDP(
        build(Net),
        sharding_strategy=strategy,
        auto_wrap_policy=blocks_policy(),
        use_orig_params=True,
    )
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.02) for m in (reference, model)]
    frozen_by_step = ["none", "blocks.1", "bias", "blocks", "weight", "none"]
    for step, pattern in enumerate(frozen_by_step):
        for each, optimizer in zip((reference, model), optimizers, strict=True):
            for name, parameter in each.named_parameters():
                parameter.requires_grad_(pattern not in name)
            optimizer.zero_grad()
            train_step(each, step)
            if each is reference:
                average_gradients(each)
            optimizer.step()
        assert_same_parameters(reference, model)
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad == (pattern not in name)
            if pattern in name:
                assert parameter.grad is None


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_freezing_between_steps_matches_ddp(strategy: ShardingStrategy) -> None:
    """DDP has to be told anew after every change; the sharded model does not."""
    bare = build(Net)
    model = FSDP(
        build(Net),
        sharding_strategy=strategy,
        auto_wrap_policy=blocks_policy(),
        use_orig_params=True,
    )
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (bare, model)]
    for step, pattern in enumerate(["embed", "up.weight", "none"]):
        for each in (bare, model):
            for name, parameter in each.named_parameters():
                parameter.requires_grad_(pattern not in name)
        reference = DDP(bare)
        for each, optimizer in zip((reference, model), optimizers, strict=True):
            optimizer.zero_grad()
            train_step(each, step)
            optimizer.step()
        assert_same_parameters(bare, model)


@ranks(2)
def test_foreach_optimizers_meet_a_thousand_empty_pieces() -> None:
    """A thousand biases of one element lie on the last rank, behind one large weight."""

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5000, 1))
            self.scalars = nn.ParameterList(torch.randn(1) for _ in range(1000))

        def forward(self) -> torch.Tensor:
            return self.weight.square().sum() + torch.cat(list(self.scalars)).square().sum()

    reference = build(Many)
    model = FSDP(build(Many), use_orig_params=True)
    empty = sum(p.numel() == 0 for p in model.parameters())
    assert empty >= (1000 if torch.distributed.get_rank() == 0 else 0)
    torch._foreach_mul_([torch.empty(0, device=device()) for _ in range(1000)], 0.1)
    for kind in (torch.optim.Adam, torch.optim.SGD):
        for each in (reference, model):
            optimizer = kind(each.parameters(), lr=0.01, foreach=True)
            optimizer.zero_grad()
            each().backward()
            optimizer.step()
    assert_same_parameters(reference, model)
