"""Hooks that run when a parameter's gradient is complete: optimizers that step in backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy
from fullshard.testing import device, ranks
from fullshard.wrap import ModuleWrapPolicy


def bare() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).double().to(device())


def data(step: int) -> torch.Tensor:
    torch.manual_seed(10 * step + dist.get_rank())
    return torch.randn(4, 5, dtype=torch.float64, device=device())


def step_in_backward(parameter: nn.Parameter) -> Any:
    optimizer = torch.optim.Adam([parameter], lr=0.05)

    def hook(_: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return hook


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@ranks(2)
def test_an_optimizer_that_steps_in_backward_trains(strategy: str, use_orig_params: bool) -> None:
    reference = DDP(bare())
    model = FSDP(
        copy.deepcopy(reference.module),
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=use_orig_params,
    )
    optimizer = torch.optim.Adam(reference.parameters(), lr=0.05)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_in_backward(parameter))

    for step in range(3):
        reference(data(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model(data(step)).square().mean().backward()
        assert all(parameter.grad is None for parameter in model.parameters())

    with FSDP.summon_full_params(model):
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)


@ranks(2)
def test_a_hook_does_not_run_before_gradients_are_reduced() -> None:
    model = FSDP(bare(), use_orig_params=True)
    calls: list[int] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: calls.append(1))

    with model.no_sync():
        model(data(0)).sum().backward()
    assert not calls

    model(data(1)).sum().backward()
    owned = [parameter for parameter in model.parameters() if parameter.numel()]
    assert len(calls) == len(owned)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@ranks(2)
def test_complex_parameters_train(strategy: str) -> None:
    class Rotation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.factor = nn.Parameter(torch.randn(5, dtype=torch.complex128, device=device()))
            self.offset = nn.Parameter(torch.zeros(5, dtype=torch.float64, device=device()))
            self.unused = nn.Parameter(torch.ones(3, dtype=torch.complex128, device=device()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.factor * x + self.offset).abs()

    reference = Rotation()
    model = FSDP(
        copy.deepcopy(reference),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=True,
    )
    for module in (reference, model):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            module(data(step)).square().mean().backward()
            if module is reference:
                for parameter in (module.factor, module.offset):
                    assert parameter.grad is not None
                    whole = (
                        torch.view_as_real(parameter.grad)
                        if parameter.is_complex()
                        else parameter.grad
                    )
                    dist.all_reduce(whole)
                    parameter.grad /= dist.get_world_size()
            optimizer.step()

    with FSDP.summon_full_params(model):
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@ranks(2)
def test_a_hook_does_not_run_for_a_gradient_that_is_left_from_an_earlier_backward(
    strategy: str,
) -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Parameter(torch.ones(8)) for _ in range(2))

        def forward(self, name: str) -> torch.Tensor:
            return getattr(self, name).sum()

    calls: list[tuple[bool, str]] = []
    reference = Either().to(device())
    model = FSDP(
        copy.deepcopy(reference), sharding_strategy=ShardingStrategy[strategy], use_orig_params=True
    )
    for each in (reference, model):
        for name, parameter in each.named_parameters():
            call = (each is reference, name)
            parameter.register_post_accumulate_grad_hook(lambda _, call=call: calls.append(call))
        for name in ("first", "second", "first"):
            each(name).backward()
    held = [name for name, parameter in model.named_parameters() if parameter.numel()]
    expected = [name for is_reference, name in calls if is_reference and name in held]
    assert [name for is_reference, name in calls if not is_reference] == expected
