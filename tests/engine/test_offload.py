"""Parameters and gradients that rest on the host: where they are, and how they accumulate."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.original.training import (
    MODES,
    Net,
    average_gradients,
    blocks_policy,
    build,
    full_parameters,
    train_step,
)
from torch import nn

from fullshard import CPUOffload, ShardingStrategy
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.testing import device, ranks

HOST = torch.device("cpu")
EACH_MODE = pytest.mark.parametrize(("strategy", "use_orig_params"), MODES)


def offloaded(bare: nn.Module, strategy: ShardingStrategy, use_orig_params: bool) -> FSDP:
    return FSDP(
        bare,
        auto_wrap_policy=blocks_policy(),
        sharding_strategy=strategy,
        cpu_offload=CPUOffload(offload_params=True),
        use_orig_params=use_orig_params,
    )


def step_both(bare: nn.Module, model: FSDP) -> None:
    average_gradients(bare)
    for each in (bare, model):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    found = full_parameters(model)
    for name, parameter in bare.named_parameters():
        torch.testing.assert_close(found[name].to(device()), parameter.detach())


@EACH_MODE
@pytest.mark.parametrize("moved", [False, True])
@ranks(2)
def test_parameters_and_gradients_rest_on_the_host_also_when_the_model_is_moved(
    moved: bool, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    bare = build(Net)
    model = offloaded(copy.deepcopy(bare), strategy, use_orig_params)
    if moved:
        model.to(device())

    train_step(model, 0)
    train_step(bare, 0)

    assert all(p.device == HOST for p in model.parameters())
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients
    assert all(gradient.device == HOST for gradient in gradients)
    assert model.compute_device.type == device().type
    step_both(bare, model)


@EACH_MODE
@pytest.mark.parametrize("synchronizes", [False, True], ids=["no_sync", "sync"])
@ranks(2)
def test_gradients_accumulate_inside_and_outside_of_no_sync(
    synchronizes: bool, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    bare = build(Net)
    model = offloaded(copy.deepcopy(bare), strategy, use_orig_params)

    if synchronizes:
        train_step(model, 0)
    else:
        with model.no_sync():
            train_step(model, 0)
    train_step(model, 1)
    for step in range(2):
        train_step(bare, step)

    assert all(p.grad is None or p.grad.device == HOST for p in model.parameters())
    step_both(bare, model)


@EACH_MODE
@ranks(2)
def test_what_rests_on_the_host_beside_an_accelerator_is_pinned(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    if device().type == "cpu":
        pytest.skip("a host that computes itself has nothing to pin for")
    model = offloaded(build(Net), strategy, use_orig_params)
    train_step(model, 0)

    for parameter in model.parameters():
        if parameter.numel():
            assert parameter.is_pinned()
            assert parameter.grad is not None
            assert parameter.grad.is_pinned()
    model.to(torch.float64)
    assert all(parameter.is_pinned() for parameter in model.parameters() if parameter.numel())


@EACH_MODE
@ranks(2)
def test_parameters_may_change_on_the_host_right_after_an_evaluation(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    bare = build(Net)
    model = offloaded(copy.deepcopy(bare), strategy, use_orig_params)
    data = torch.ones(4, 5, device=device())
    expected = bare(data)

    for _ in range(5):
        with torch.no_grad():
            found = model(data)
            values = [parameter.clone() for parameter in model.parameters()]
            for parameter in model.parameters():
                parameter.fill_(torch.nan)
            torch.testing.assert_close(found, expected.detach())
            for parameter, value in zip(model.parameters(), values, strict=True):
                parameter.copy_(value)
