"""Parameters, data and gradients that the user replaces take effect at the next use."""

from __future__ import annotations

import contextlib
import copy
import os
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.original.training import (
    STRATEGIES,
    Net,
    assert_same_parameters,
    blocks_policy,
    build,
    inputs,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import MixedPrecision, ShardingStrategy
from fullshard.engine.params.handle import (
    _FSDP_SKIP_WRITEBACK_CHECK,
    _FSDP_USE_FULL_PREC_IN_EVAL,
)
from fullshard.testing import device, ranks
from fullshard.wrap import ModuleWrapPolicy

CHANGED = "FSDP does not support changing the parameters between forward and backward"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin1 = nn.Linear(5, 5)
        self.lin2 = nn.Linear(5, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin2(torch.relu(self.lin1(x)))


def pair(**options: object) -> tuple[DDP, FSDP]:
    return DDP(build(Model)), FSDP(build(Model), use_orig_params=True, **options)


def twos(parameter: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(torch.full_like(parameter, 2.0))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("through_data", [True, False])
@pytest.mark.parametrize("layer", ["lin1", "lin2"])
@ranks(2)
def test_a_replaced_parameter_is_used_by_the_next_step(
    layer: str, through_data: bool, strategy: ShardingStrategy
) -> None:
    reference, model = pair(sharding_strategy=strategy)
    for each in (reference, model):
        linear = getattr(each.module, layer)
        if through_data:
            linear.weight.data = twos(linear.weight).data
        else:
            linear.weight = twos(linear.weight)
    # DDP keeps averaging what it registered; only the value is compared here.
    torch.testing.assert_close(model(inputs(0)), reference.module(inputs(0)))
    assert_same_parameters(reference.module, model)


@pytest.mark.parametrize("strategy", STRATEGIES[:2])
@ranks(2)
def test_a_replaced_parameter_object_is_the_one_that_gets_gradients(
    strategy: ShardingStrategy,
) -> None:
    _, model = pair(sharding_strategy=strategy)
    new = model.module.lin2.weight = twos(model.module.lin2.weight)
    model(inputs(0)).sum().backward()
    assert model.module.lin2.weight is new
    assert new.grad is not None
    assert new.grad.shape == new.shape
    assert new.grad.abs().sum() > 0
    assert model._flat_param._params[2] is new


@pytest.mark.parametrize("when", ["before", "after a step"])
@ranks(2)
def test_data_replaced_under_summon_is_kept(when: str) -> None:
    reference, model = pair()
    if when == "after a step":
        model(inputs(0)).sum().backward()
    with FSDP.summon_full_params(model):
        model.module.lin1.weight.data = torch.full((5, 5), 3.0, device=device())
    with torch.no_grad():
        reference.module.lin1.weight.fill_(3.0)
    assert_same_parameters(reference.module, model)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("change", ["data", "tensor", "none"])
@pytest.mark.parametrize("layer", ["lin1", "lin2"])
@ranks(2)
def test_a_replaced_gradient_is_stepped_and_added_to(
    layer: str, change: str, strategy: ShardingStrategy
) -> None:
    reference, model = pair(sharding_strategy=strategy)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (reference, model)]
    for each in (reference, model):
        each(inputs(0)).sum().backward()
    for each in (reference, model):
        weight = getattr(each.module, layer).weight
        if change == "none":
            weight.grad = None
        elif change == "tensor":
            weight.grad = torch.full_like(weight, 2.0)
        elif weight.grad is not None:
            weight.grad.data = torch.full_like(weight, 2.0)
    for optimizer in optimizers:
        optimizer.step()
    assert_same_parameters(reference.module, model)
    for each in (reference, model):
        each(inputs(1)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert_same_parameters(reference.module, model)


def replace_all(model: nn.Module, through_data: bool) -> None:
    """Make every parameter half as large again, by new data or by new parameters."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if through_data:
                parameter.data = parameter.data * 1.5
            else:
                setattr(module, name, nn.Parameter(parameter.data * 1.5))


@pytest.mark.parametrize("through_data", [True, False])
@pytest.mark.parametrize("gathered", ["by prefetching", "inside no_sync", "by unshard"])
@ranks(2)
def test_what_is_gathered_ahead_or_kept_has_what_was_replaced(
    gathered: str, through_data: bool
) -> None:
    for strategy in STRATEGIES:
        reference = build(Net)
        model = FSDP(
            build(Net),
            sharding_strategy=strategy,
            auto_wrap_policy=blocks_policy(),
            use_orig_params=True,
        )
        for step in range(3):
            with model.no_sync() if gathered == "inside no_sync" else contextlib.nullcontext():
                model(inputs(step)).sum().backward()
            if gathered == "by unshard":
                for block in model.blocks:
                    block.unshard(async_op=True)
            replace_all(model, through_data)
            with torch.no_grad():
                for parameter in reference.parameters():
                    parameter.mul_(1.5)
                expected = reference(inputs(step))
            torch.testing.assert_close(model(inputs(step)), expected)


def use_again(model: FSDP, use: str) -> None:
    if use == "forward":
        model(inputs(0))
    else:
        with FSDP.summon_full_params(model):
            pass


@pytest.mark.parametrize("use", ["forward", "summon"])
@ranks(2)
def test_a_parameter_of_another_shape_is_refused(use: str) -> None:
    _, model = pair()
    linear = model.module.lin1 if dist.get_rank() == 0 else model.module.lin2
    shape = [size + 1 for size in linear.weight.shape]
    linear.weight = nn.Parameter(torch.randn(shape, device=device()))

    message = "Cannot writeback when the parameter shape changes"
    with pytest.raises(RuntimeError, match=message) as error:
        use_again(model, use)
    assert f"lin{dist.get_rank() + 1}.weight" in str(error.value)


@pytest.mark.parametrize("how", ["None", "del"])
@ranks(2)
def test_a_parameter_that_was_removed_is_told(how: str) -> None:
    _, model = pair()
    if how == "None":
        model.module.lin2.bias = None
    else:
        del model.module.lin2.bias
    with pytest.raises(RuntimeError, match=r"'lin2\.bias' was removed from its Linear"):
        model(inputs(0))


@pytest.mark.parametrize("use", ["forward", "summon", "backward"])
@ranks(2)
def test_a_gradient_of_another_shape_is_refused(use: str) -> None:
    _, model = pair()
    model(inputs(0)).sum().backward()
    loss = model(inputs(0)).sum()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data = torch.ones(parameter.numel() + 1, device=device())

    message = "Cannot writeback when the gradient shape changes"
    with pytest.raises(RuntimeError, match=message) as error:
        loss.backward() if use == "backward" else use_again(model, use)
    assert re.search(r"for lin[12]\.(weight|bias)", str(error.value))


@pytest.mark.parametrize("through_data", [True, False])
@ranks(2)
def test_a_change_between_forward_and_backward_is_refused_where_nothing_was_freed(
    through_data: bool,
) -> None:
    model = FSDP(
        build(Model),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=True,
    )
    loss = model(inputs(0)).sum()
    if through_data:
        model.lin1.weight.data = model.lin1.weight.clone()
    else:
        model.lin1.module.weight = nn.Parameter(model.lin1.weight.clone())
    with pytest.raises(AssertionError, match=CHANGED) as error:
        loss.backward()
    assert "lin1" in str(error.value)


@pytest.mark.parametrize("through_data", [True, False])
@ranks(2)
def test_training_goes_on_after_a_refused_change(through_data: bool) -> None:
    reference = build(Model)
    model = FSDP(
        build(Model),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=True,
    )
    loss = model(inputs(0)).sum()
    if through_data:
        model.lin1.weight.data = model.lin1.weight.clone() + 1
    else:
        model.lin1.module.weight = nn.Parameter(model.lin1.weight.clone() + 1)
    with pytest.raises(AssertionError, match=CHANGED):
        loss.backward()
    assert_same_parameters(reference, model)
    for each in (reference, model):
        each.zero_grad()
    torch.testing.assert_close(model(inputs(1)), reference(inputs(1)))


@ranks(2)
def test_the_check_can_be_switched_off() -> None:
    os.environ[_FSDP_SKIP_WRITEBACK_CHECK] = "1"
    reference, model = pair(
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
    )
    loss = model(inputs(0)).sum()
    model.lin1.module.weight = nn.Parameter(model.lin1.weight.clone())
    loss.backward()
    # Not looked at, not taken over: a replaced parameter has no effect.
    model.lin2.weight.data = torch.zeros_like(model.lin2.weight)
    torch.testing.assert_close(model(inputs(1)), reference(inputs(1)))


@ranks(2)
def test_without_the_check_training_is_the_same() -> None:
    os.environ[_FSDP_SKIP_WRITEBACK_CHECK] = "1"
    reference, model = pair()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (reference, model)]
    for step in range(3):
        for each, optimizer in zip((reference, model), optimizers, strict=True):
            optimizer.zero_grad()
            each(inputs(step)).square().sum().backward()
            optimizer.step()
    assert_same_parameters(reference.module, model)


@pytest.mark.parametrize("full_precision", [False, True])
@ranks(2)
def test_evaluation_computes_in_full_precision_when_asked(full_precision: bool) -> None:
    if full_precision:
        os.environ[_FSDP_USE_FULL_PREC_IN_EVAL] = "1"
    model = FSDP(
        build(Model),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
        use_orig_params=True,
    )
    assert model(inputs(0)).dtype is torch.bfloat16
    model.eval()
    output = model(inputs(0))
    if full_precision:
        assert output.dtype is torch.float32
        torch.testing.assert_close(output, build(Model)(inputs(0)))
    else:
        assert output.dtype is torch.bfloat16


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("full_precision_in_eval", [False, True])
@ranks(2)
def test_the_check_never_fires_when_nothing_was_replaced(
    full_precision_in_eval: bool, strategy: ShardingStrategy
) -> None:
    if full_precision_in_eval:
        os.environ[_FSDP_USE_FULL_PREC_IN_EVAL] = "1"
    model = FSDP(
        build(Model),
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        mixed_precision=MixedPrecision(param_dtype=torch.float16),
        use_orig_params=True,
    )
    before = [p.detach().clone() for p in model.parameters()]
    model(inputs(0))
    with FSDP.summon_full_params(model):
        pass
    model.train()
    first = model(inputs(0))
    model.eval()
    model(inputs(0))
    model.train()
    model(inputs(0)).sum().backward()
    model.eval()
    model(inputs(0))
    model.train()
    last = model(inputs(0))
    last.sum().backward()
    assert torch.equal(first, last)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@ranks(2)
def test_gradients_are_right_when_a_summon_and_an_eval_lie_between_forward_and_backward() -> None:
    reference, model = pair(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    reference(inputs(0)).square().sum().backward()
    loss = model(inputs(0)).square().sum()
    model.eval()
    model(inputs(1))
    with FSDP.summon_full_params(model):
        pass
    model.train()
    loss.backward()
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (reference, model)]
    for optimizer in optimizers:
        optimizer.step()
    assert_same_parameters(reference.module, model)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@ranks(2)
def test_a_change_in_place_after_a_forward_without_backward_is_kept(strategy: str) -> None:
    torch.manual_seed(0)
    model = FSDP(
        nn.Linear(6, 5, device=device()),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=True,
    )
    data = torch.ones(2, 6, device=device())

    model(data)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.1, 0.1)

    with FSDP.summon_full_params(model):
        assert max(p.abs().max().item() for p in model.parameters()) <= 0.1 + 1e-6
    model(data)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(2.0)
    assert model(data).unique().tolist() == [14.0]


@ranks(2)
def test_a_change_in_low_precision_after_a_forward_without_backward_is_refused() -> None:
    model = FSDP(
        nn.Linear(6, 5, device=device()),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
        use_orig_params=True,
    )
    data = torch.ones(2, 6, device=device())

    model(data)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(2.0)

    with pytest.raises(
        AssertionError, match="changing the parameters between forward and backward"
    ):
        model(data)
    model(data).sum().backward()


@pytest.mark.parametrize("forward_prefetch", [False, True])
@ranks(2)
def test_a_hook_may_change_a_units_parameters_right_before_its_forward(
    forward_prefetch: bool,
) -> None:
    bare = build(Net)
    model = FSDP(
        copy.deepcopy(bare),
        auto_wrap_policy=blocks_policy(),
        use_orig_params=True,
        forward_prefetch=forward_prefetch,
    )

    def double(module: nn.Module, _: Any) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(2)

    for each in (bare, model):
        each.blocks[1].register_forward_pre_hook(double)
    for step in range(3):
        with torch.no_grad():
            torch.testing.assert_close(model(inputs(step)), bare(inputs(step)))
