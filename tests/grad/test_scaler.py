"""ShardedGradScaler: the steps, skips and scales of torch's own scaler on the bare model.

The expected numbers come from ``torch.amp.GradScaler`` on the unwrapped model with averaged
gradients, which every rank has in full.
"""

from __future__ import annotations

import copy
import inspect
import math
import pickle
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
    full_parameters,
    inputs,
    loss_of,
)
from tests.state.models import wrapped
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchsScaler

from fullshard import CPUOffload, MixedPrecision, ShardedGradScaler, ShardingStrategy
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.testing import device, ranks

with_both_modes = pytest.mark.parametrize("use_orig_params", [False, True])
with_each_strategy = pytest.mark.parametrize("strategy", ShardingStrategy)
#: What happens to the loss, step by step: rank 1 alone brings in an inf and a NaN.
FACTORS = (1.0, math.inf, 1.0, 1.0, math.nan, 1.0, 1.0, 1.0)


def make_scaler(kind: Any = ShardedGradScaler, **options: Any) -> Any:
    settings = {"init_scale": 64.0, "growth_interval": 2, "growth_factor": 4.0, **options}
    return kind(device=device().type, **settings)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def backward(model: nn.Module, scaler: Any, step: int, factor: float = 1.0) -> None:
    loss = loss_of(model, step)
    scaler.scale(loss * factor if dist.get_rank() == 1 else loss).backward()


@with_both_modes
@with_each_strategy
@ranks(2)
def test_steps_skips_and_scales_are_those_of_the_bare_model(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    bare = build(Net)
    model = wrapped(bare, strategy, "blocks", use_orig_params=use_orig_params)
    optimizers = sgd(bare), sgd(model)
    scalers = make_scaler(torch.amp.GradScaler), make_scaler()

    for step, factor in enumerate(FACTORS):
        for each, optimizer, scaler in zip((bare, model), optimizers, scalers, strict=True):
            optimizer.zero_grad()
            backward(each, scaler, step, factor)
            if each is bare:
                average_gradients(bare)
            scaler.step(optimizer)
            scaler.update()
        assert scalers[1].state_dict() == scalers[0].state_dict()
        assert_same_parameters(bare, model)

    assert scalers[1].get_scale() == 64.0 * 0.5 * 4 * 0.5 * 4


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@with_both_modes
@ranks(3)
def test_one_bad_element_on_one_rank_skips_the_step_on_all(
    use_orig_params: bool, bad: float
) -> None:
    model = FSDP(build(Net), auto_wrap_policy=blocks_policy(), use_orig_params=use_orig_params)
    before = full_parameters(model)
    optimizer, scaler = sgd(model), make_scaler()

    backward(model, scaler, 0)
    if dist.get_rank() == 1:
        next(p.grad for p in model.parameters() if p.grad is not None).view(-1)[-1] = bad
    scaler.step(optimizer)
    scaler.update()

    after = full_parameters(model)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert scaler.get_scale() == 32.0


@with_both_modes
@ranks(2)
def test_clipping_after_unscaling_is_that_of_the_bare_model(use_orig_params: bool) -> None:
    bare = build(Net)
    model = wrapped(bare, ShardingStrategy.FULL_SHARD, "blocks", use_orig_params=use_orig_params)
    optimizers = sgd(bare), sgd(model)
    scalers = make_scaler(torch.amp.GradScaler), make_scaler()

    for step in range(2):
        for each, optimizer, scaler in zip((bare, model), optimizers, scalers, strict=True):
            optimizer.zero_grad()
            backward(each, scaler, step)
            if each is bare:
                average_gradients(bare)
            scaler.unscale_(optimizer)
        expected = nn.utils.clip_grad_norm_(bare.parameters(), 0.05)
        torch.testing.assert_close(model.clip_grad_norm_(0.05), expected)
        for optimizer, scaler in zip(optimizers, scalers, strict=True):
            scaler.step(optimizer)
            scaler.update()

    assert_same_parameters(bare, model)


@with_both_modes
@ranks(2)
def test_several_optimizers_are_skipped_each_for_itself(use_orig_params: bool) -> None:
    model = FSDP(build(Net), auto_wrap_policy=blocks_policy(), use_orig_params=use_orig_params)
    first = [p for n, p in model.named_parameters() if n.startswith("blocks.0")]
    rest = [p for n, p in model.named_parameters() if not n.startswith("blocks.0")]
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in (first, rest)]
    before, scaler = full_parameters(model), make_scaler()

    backward(model, scaler, 0)
    if dist.get_rank() == 0:
        next(p.grad for p in first if p.grad is not None).fill_(math.inf)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()

    after = full_parameters(model)
    for name, value in before.items():
        assert torch.equal(after[name], value) == name.startswith("blocks.0"), name
    assert scaler.get_scale() == 32.0


@with_both_modes
@ranks(2)
def test_an_inf_in_an_ignored_parameter_counts(use_orig_params: bool) -> None:
    bare = build(Net)
    model = FSDP(bare, ignored_modules=[bare.head], use_orig_params=use_orig_params)
    before, scaler = full_parameters(model), make_scaler()

    backward(model, scaler, 0)
    if dist.get_rank() == 1:
        bare.head.weight.grad[0, 0] = math.inf
    scaler.step(sgd(model))
    scaler.update()

    after = full_parameters(model)
    assert all(torch.equal(after[name], before[name]) for name in before)


@ranks(4)
def test_ranks_without_a_piece_of_any_parameter_take_part() -> None:
    torch.manual_seed(0)
    model = FSDP(nn.Linear(1, 1, bias=False).to(device()), use_orig_params=True)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), make_scaler()
    before = full_parameters(model)["weight"]

    for factor in (math.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 1, device=device())).sum() * factor).backward()
        assert (model.module.weight.grad is None) == (dist.get_rank() > 0)
        scaler.step(optimizer)
        scaler.update()

    assert scaler.get_scale() == 32.0
    torch.testing.assert_close(full_parameters(model)["weight"], before - 1.0)


@with_both_modes
@ranks(2)
def test_offloaded_gradients_are_unscaled_where_they_are(use_orig_params: bool) -> None:
    bare = build(Net)
    options = {"use_orig_params": use_orig_params, "auto_wrap_policy": blocks_policy()}
    model = FSDP(copy.deepcopy(bare), cpu_offload=CPUOffload(offload_params=True), **options)
    optimizers = sgd(bare), sgd(model)
    scalers = make_scaler(torch.amp.GradScaler), make_scaler()

    for step, factor in enumerate((1.0, math.inf, 1.0)):
        for each, optimizer, scaler in zip((bare, model), optimizers, scalers, strict=True):
            optimizer.zero_grad()
            backward(each, scaler, step, factor)
            if each is bare:
                average_gradients(bare)
            scaler.step(optimizer)
            scaler.update()

    found = {name: p.to(device()) for name, p in full_parameters(model).items()}
    for name, parameter in bare.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach())
    assert all(p.grad is None or p.grad.device.type == "cpu" for p in model.parameters())


class Half(nn.Module):
    """Computes in float16 by autocast, whatever the precision of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device().type, torch.float16):
            return self.net(x)


@pytest.mark.parametrize(
    "precision",
    [
        MixedPrecision(torch.float16),
        MixedPrecision(torch.float16, keep_low_precision_grads=True),
        MixedPrecision(),
    ],
    ids=["units in float16", "gradients kept in float16", "autocast alone"],
)
@with_both_modes
@ranks(2)
def test_training_in_float16_with_scaling_follows_full_precision(
    use_orig_params: bool, precision: MixedPrecision
) -> None:
    def losses(model: nn.Module, scaler: Any) -> list[float]:
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.05), []
        for _ in range(6):
            optimizer.zero_grad()
            # A loss so small that its gradients need the scale to survive in float16.
            loss = model(inputs(0)).float().square().mean() * 1e-3
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad = (parameter.grad * 1e3).to(parameter.dtype)
            scaler.step(optimizer)
            scaler.update()
            found.append(loss.item() * 1e3)
        return found

    bare = build(Half)
    policy = blocks_policy()
    model = FSDP(
        copy.deepcopy(bare),
        auto_wrap_policy=policy,
        mixed_precision=precision,
        use_orig_params=use_orig_params,
    )
    found = losses(model, make_scaler(init_scale=2.0**10, growth_interval=100))
    reference = nn.parallel.DistributedDataParallel(bare.net)
    expected = losses(reference, make_scaler(enabled=False))

    assert found == pytest.approx(expected, rel=0.02)
    assert found[-1] < found[0]


@ranks(2)
def test_a_scale_too_large_for_float16_backs_off_until_steps_are_taken() -> None:
    model = FSDP(build(Net), mixed_precision=MixedPrecision(torch.float16), use_orig_params=True)
    before = full_parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = make_scaler(init_scale=2.0**24, backoff_factor=2.0**-6, growth_interval=100)
    scales = []

    for step in range(6):
        optimizer.zero_grad()
        loss = model(inputs(step)).square().mean()
        assert loss.dtype == scaler.scale(loss).dtype == torch.float16
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())

    assert scales[0] == 2.0**18
    assert scales[-1] == scales[-2] < 2.0**16
    after = full_parameters(model)
    assert all(value.isfinite().all() for value in after.values())
    assert not any(torch.equal(after[name], before[name]) for name in before)


@ranks(2)
def test_an_optimizer_that_unscales_by_itself_is_skipped_on_all_ranks() -> None:
    model = FSDP(build(Net), use_orig_params=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    before, scaler = full_parameters(model), make_scaler()

    backward(model, scaler, 0, math.inf)
    scaler.step(optimizer)
    scaler.update()

    after = full_parameters(model)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert scaler.get_scale() == 32.0


@ranks(2)
def test_ranks_of_the_group_given_decide_alone() -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    model = build(Net)
    scaler = make_scaler(process_group=alone)

    backward(model, scaler, 0, math.inf)
    scaler.step(sgd(model))
    scaler.update()

    assert scaler.get_scale() == (32.0 if dist.get_rank() == 1 else 64.0)


@ranks(2)
def test_state_is_saved_loaded_and_pickled() -> None:
    model = FSDP(build(Net), use_orig_params=True)
    scaler, optimizer = make_scaler(growth_interval=5), sgd(model)
    for step, factor in enumerate((math.inf, 1.0, 1.0)):
        optimizer.zero_grad()
        backward(model, scaler, step, factor)
        scaler.step(optimizer)
        scaler.update()

    other = make_scaler(init_scale=2.0)
    other.load_state_dict(scaler.state_dict())

    assert scaler.state_dict()["scale"] == 32.0
    assert scaler.state_dict()["_growth_tracker"] == 2
    for same in (other, pickle.loads(pickle.dumps(scaler))):
        assert same.state_dict() == scaler.state_dict()
    with pytest.raises(TypeError, match="Save state_dict"):
        pickle.dumps(make_scaler(process_group=dist.group.WORLD))


@ranks(1)
def test_every_tensor_of_a_nested_structure_is_scaled_in_its_own_dtype() -> None:
    scaler = make_scaler()
    low = torch.ones(2, dtype=torch.bfloat16, device=device())
    full = torch.ones((), device=device())

    found, nested = scaler.scale((low, [full]))

    assert (found.dtype, nested[0].dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(found, low * 64)
    assert nested[0].item() == 64.0
    assert [t.item() for t in scaler.scale(t for t in (full, full))] == [64.0, 64.0]
    assert scaler.scale(low).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="Tensor"):
        scaler.scale(3)


@ranks(1)
def test_a_disabled_scaler_does_nothing() -> None:
    model = build(Net)
    scaler, optimizer = make_scaler(enabled=False), sgd(model)
    loss = loss_of(model, 0)
    before = copy.deepcopy(model.state_dict())

    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()

    assert scaler.state_dict() == {}
    assert not torch.equal(model.head.weight, before["head.weight"])


def test_the_arguments_are_those_of_torch_in_the_same_order() -> None:
    ours, theirs = (
        inspect.signature(kind).parameters for kind in (ShardedGradScaler, TorchsScaler)
    )

    assert list(ours) == list(theirs)
    assert [p.default for p in ours.values()] == [p.default for p in theirs.values()]


def test_sparse_gradients_of_unsharded_embeddings_are_unscaled_without_any_ranks() -> None:
    table = nn.Embedding(4, 2, sparse=True, device=device())
    optimizer, scaler = torch.optim.SGD(table.parameters(), lr=1.0), make_scaler()
    before = table.weight.detach().clone()

    scaler.scale(table(torch.tensor([1, 1, 2], device=device())).sum()).backward()
    scaler.step(optimizer)
    scaler.update()

    uses = torch.tensor([[0.0], [2.0], [1.0], [0.0]], device=device())
    torch.testing.assert_close(table.weight.detach(), before - uses)
