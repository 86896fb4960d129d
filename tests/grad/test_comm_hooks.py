"""register_comm_hook: what hooks are given, what comes of it, and what is refused.

The expected numbers come from the bare model on every rank's data, its gradients cast, summed and
divided by hand.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.original.training import (
    Net,
    assert_at_rest,
    assert_same_gradients,
    assert_same_parameters,
    average_gradients,
    blocks_policy,
    build,
    compare_models,
    full_parameters,
    train_step,
)
from tests.state.models import wrapped
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks as torchs

from fullshard import CPUOffload, MixedPrecision, ShardingStrategy
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.grad import hooks
from fullshard.testing import device, ranks

NO_SHARD, FULL_SHARD = ShardingStrategy.NO_SHARD, ShardingStrategy.FULL_SHARD
HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
SHARDED = (FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)
LOW = {"fp16_compress_hook": torch.float16, "bf16_compress_hook": torch.bfloat16}

with_both_modes = pytest.mark.parametrize("use_orig_params", [False, True])
with_each_low_precision_hook = pytest.mark.parametrize("name", LOW)


def averaging_hook(model: FSDP) -> Any:
    """The built-in hook that does what the engine does without one."""
    is_sharded = model.sharding_strategy is not NO_SHARD
    return hooks.reduce_scatter_hook if is_sharded else hooks.allreduce_hook


def average_in(dtype: torch.dtype, bare: nn.Module) -> None:
    """Replace gradients by their mean, summed in ``dtype``, in two divisions around the sum."""
    size = dist.get_world_size()
    for parameter in bare.parameters():
        parts = [torch.empty_like(parameter) for _ in range(size)]
        dist.all_gather(parts, parameter.grad)
        total = sum(part.to(dtype) / 2 for part in parts)
        parameter.grad = (total / (size / 2)).float()


@with_both_modes
@pytest.mark.parametrize("strategy", ShardingStrategy)
@ranks(4)
def test_averaging_hooks_train_as_without_a_hook(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    bare = build(Net)
    model = wrapped(bare, strategy, "blocks", use_orig_params=use_orig_params)

    state = hooks.DefaultState(model.process_group)
    model.register_comm_hook(state, averaging_hook(model))

    compare_models(bare, model)


@with_each_low_precision_hook
@with_both_modes
@pytest.mark.parametrize("strategy", [*SHARDED, NO_SHARD])
@ranks(2)
def test_compressed_gradients_are_those_computed_by_hand(
    strategy: ShardingStrategy, use_orig_params: bool, name: str
) -> None:
    bare = build(Net)
    model = wrapped(bare, strategy, "blocks", use_orig_params=use_orig_params)
    model.register_comm_hook(hooks.LowPrecisionState(model.process_group), getattr(hooks, name))

    train_step(model, 0)
    train_step(bare, 0)
    average_in(LOW[name], bare)
    for each in (bare, model):
        torch.optim.SGD(each.parameters(), lr=1.0).step()

    assert_same_parameters(bare, model, rtol=0, atol=0)
    exact = build(Net)
    train_step(exact, 0)
    average_gradients(exact)
    assert not torch.equal(exact.head.weight.grad, bare.head.weight.grad)


@with_each_low_precision_hook
@pytest.mark.parametrize("strategy", HYBRID)
@ranks(4)
def test_hybrid_shards_are_averaged_over_the_copies_as_well(
    strategy: ShardingStrategy, name: str
) -> None:
    bare = build(Net)
    model = wrapped(bare, strategy, "blocks", use_orig_params=True)
    model.register_comm_hook(hooks.LowPrecisionState(model.process_group), getattr(hooks, name))

    train_step(model, 0)
    train_step(bare, 0)
    average_gradients(bare)

    assert_same_gradients(bare, model, rtol=2e-2, atol=2e-2)
    for value in full_parameters(model).values():
        others = [torch.empty_like(value) for _ in range(4)]
        dist.all_gather(others, value)
        assert all(torch.equal(value, other) for other in others)


@pytest.mark.parametrize("name", [*LOW, "reduce_scatter_hook"])
@ranks(2)
def test_hooks_of_torch_do_what_ours_do(name: str) -> None:
    gradients = []
    for module in (hooks, torchs):
        model = FSDP(build(Net), auto_wrap_policy=blocks_policy(), use_orig_params=True)
        state = module.LowPrecisionState(dist.group.WORLD)
        model.register_comm_hook(state, getattr(module, name))
        train_step(model, 0)
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])

    assert gradients[0]
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.equal(ours, theirs)


@ranks(2)
def test_torchs_hook_for_unsharded_units_works() -> None:
    bare = build(Net)
    model = wrapped(bare, NO_SHARD, "blocks", use_orig_params=True)

    model.register_comm_hook(torchs.DefaultState(dist.group.WORLD), torchs.allreduce_hook)

    compare_models(bare, model)


def test_factors_are_torchs_and_make_up_the_number_of_ranks() -> None:
    class Ranks:
        def __init__(self, size: int) -> None:
            self.size = lambda: size

    for size in range(1, 200):
        state = hooks.DefaultState(Ranks(size))
        expected = torchs.DefaultState._get_gradient_predivide_factor(size)
        assert state.gradient_predivide_factor == expected
        assert state.gradient_predivide_factor * state.gradient_postdivide_factor == size
    with pytest.raises(ValueError, match="explicit ProcessGroup"):
        hooks.DefaultState(None)


@with_both_modes
@ranks(2)
def test_a_hook_is_given_each_units_whole_gradient_and_room_for_its_shard(
    use_orig_params: bool,
) -> None:
    seen: list[Any] = []

    def hook(state: Any, gradient: torch.Tensor, shard: torch.Tensor) -> None:
        seen.append((state, gradient.shape, gradient.dtype, shard.shape, shard.dtype))

    precision = MixedPrecision(reduce_dtype=torch.bfloat16)
    options = {"use_orig_params": use_orig_params, "mixed_precision": precision}
    model = FSDP(build(Net), auto_wrap_policy=blocks_policy(), **options)
    state = object()

    model.register_comm_hook(state, hook)
    train_step(model, 0)

    sizes = [m._handle.layout.padded_numel for m in FSDP.fsdp_modules(model)]
    low = torch.bfloat16
    expected = [(state, (size,), low, (size // 2,), low) for size in sizes]
    assert sorted(seen, key=lambda s: s[1]) == sorted(expected, key=lambda s: s[1])


@ranks(2)
def test_what_a_hook_leaves_is_what_the_optimizer_sees() -> None:
    def fill(state: float, gradient: torch.Tensor, shard: torch.Tensor) -> None:
        shard.fill_(state)

    for use_orig_params in (False, True):
        model = FSDP(build(Net), auto_wrap_policy=blocks_policy(), use_orig_params=use_orig_params)
        model.register_comm_hook(3.0, fill)
        train_step(model, 0)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert gradients
        assert all((gradient == 3.0).all() for gradient in gradients)


@ranks(1)
def test_a_single_ranks_gradients_pass_through_the_hook() -> None:
    def double(state: object, gradient: torch.Tensor) -> None:
        gradient.mul_(2)

    bare = build(Net)
    with pytest.warns(UserWarning, match="world size is 1"):
        model = FSDP(copy.deepcopy(bare), use_orig_params=True)
    model.register_comm_hook(None, double)
    train_step(model, 0)
    train_step(bare, 0)

    for parameter in bare.parameters():
        parameter.grad *= 2
    assert_same_gradients(bare, model)


@ranks(2)
def test_gradients_of_no_sync_reach_the_hook_with_those_of_the_next_backward() -> None:
    calls: list[int] = []

    def hook(state: Any, gradient: torch.Tensor, shard: torch.Tensor) -> None:
        calls.append(1)
        hooks.reduce_scatter_hook(state, gradient, shard)

    bare = build(Net)
    model = FSDP(copy.deepcopy(bare), auto_wrap_policy=blocks_policy(), use_orig_params=True)
    model.register_comm_hook(hooks.DefaultState(dist.group.WORLD), hook)

    with model.no_sync():
        train_step(model, 0)
    assert not calls
    train_step(model, 1)
    train_step(bare, 0)
    train_step(bare, 1)
    average_gradients(bare)

    assert len(calls) == 4
    assert_same_gradients(bare, model)


class Branches(nn.Module):
    """Two linears, of which a rank uses those it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.used_by_one = nn.Linear(3, 3)
        self.used_by_none = nn.Linear(3, 3)
        self.used_by_all = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, tiny: bool) -> torch.Tensor:
        output = self.used_by_all(x).sum()
        # A gradient that is negative everywhere, and too small for float16.
        return output - self.used_by_one(x).sum() * 1e-12 if tiny else output


def lose_signs_of_zeros(state: Any, gradient: torch.Tensor, shard: torch.Tensor) -> None:
    gradient[gradient == 0] = 0.0
    hooks.reduce_scatter_hook(state, gradient, shard)


@pytest.mark.parametrize(
    "hook", [hooks.fp16_compress_hook, lose_signs_of_zeros], ids=lambda hook: hook.__name__
)
@ranks(2)
def test_a_gradient_that_some_rank_has_is_told_from_one_that_none_has(hook: Any) -> None:
    model = FSDP(build(Branches), use_orig_params=True)
    model.register_comm_hook(hooks.LowPrecisionState(dist.group.WORLD), hook)

    for _ in range(2):
        model.zero_grad()
        model(torch.ones(2, 3, device=device()), dist.get_rank() == 1).backward()
        for name, parameter in model.named_parameters():
            has_gradient = parameter.numel() > 0 and "used_by_none" not in name
            assert (parameter.grad is not None) == has_gradient, name


@ranks(2)
def test_offloaded_gradients_come_from_the_hook() -> None:
    bare = build(Net)
    model = FSDP(
        copy.deepcopy(bare),
        auto_wrap_policy=blocks_policy(),
        cpu_offload=CPUOffload(offload_params=True),
    )
    model.register_comm_hook(hooks.DefaultState(dist.group.WORLD), hooks.reduce_scatter_hook)

    train_step(model, 0)
    train_step(bare, 0)
    average_gradients(bare)
    for each in (bare, model):
        torch.optim.SGD(each.parameters(), lr=0.1).step()

    assert all(p.grad.device.type == "cpu" for p in model.parameters())
    found = full_parameters(model)
    for name, parameter in bare.named_parameters():
        torch.testing.assert_close(found[name].to(device()), parameter.detach())


@ranks(2)
def test_a_copy_of_the_model_uses_the_hook_too() -> None:
    calls: list[int] = []
    model = FSDP(build(Net), auto_wrap_policy=blocks_policy())
    model.register_comm_hook(None, lambda state, gradient, shard: calls.append(1))

    train_step(copy.deepcopy(model), 0)

    assert len(calls) == 4


@ranks(2)
def test_a_hook_that_raises_leaves_nothing_behind_and_the_next_step_is_right() -> None:
    broken = [True]

    def hook(state: Any, gradient: torch.Tensor, shard: torch.Tensor) -> None:
        if broken[0]:
            raise ArithmeticError("a hook's own")
        hooks.reduce_scatter_hook(state, gradient, shard)

    bare = build(Net)
    model = FSDP(copy.deepcopy(bare), auto_wrap_policy=blocks_policy(), use_orig_params=True)
    model.register_comm_hook(hooks.DefaultState(dist.group.WORLD), hook)

    with pytest.raises(ArithmeticError, match="a hook's own"):
        train_step(model, 0)
    assert_at_rest(model)
    broken[0] = False

    compare_models(bare, model)


@ranks(2)
def test_units_that_are_no_root_are_refused_before_and_after_a_step() -> None:
    model = FSDP(build(Net), auto_wrap_policy=blocks_policy())

    for _ in range(2):
        with pytest.raises(AssertionError, match="can only be called on a root instance"):
            model.blocks[0].register_comm_hook(None, lambda *arguments: None)
        train_step(model, 0)


@ranks(2)
def test_a_second_hook_is_refused() -> None:
    model = FSDP(build(Net), auto_wrap_policy=blocks_policy())
    model.register_comm_hook(None, lambda *arguments: None)

    with pytest.raises(AssertionError, match="communication hook is already registered"):
        model.register_comm_hook(None, lambda *arguments: None)


@ranks(2)
def test_what_cannot_be_called_is_refused_and_a_hook_can_be_registered_after_it() -> None:
    model = FSDP(build(Net), auto_wrap_policy=blocks_policy())

    with pytest.raises(ValueError, match="must be callable but got 3"):
        model.register_comm_hook(None, 3)
    with pytest.raises(TypeError, match=r"hook\(state, gradient, shard\), as unit .*FULL_SHARD"):
        model.register_comm_hook(None, hooks.allreduce_hook)

    model.register_comm_hook(hooks.DefaultState(dist.group.WORLD), hooks.reduce_scatter_hook)
    train_step(model, 0)


@ranks(2)
def test_a_hook_for_sharded_units_is_refused_where_nothing_is_sharded() -> None:
    model = FSDP(build(Net), sharding_strategy=NO_SHARD)

    with pytest.raises(TypeError, match=r"hook\(state, gradient\), as unit .*NO_SHARD"):
        model.register_comm_hook(None, hooks.reduce_scatter_hook)


@ranks(2)
def test_a_hook_in_the_middle_of_a_step_is_refused() -> None:
    class Registering(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with pytest.raises(RuntimeError, match="between steps"):
                model.register_comm_hook(None, lambda *arguments: None)
            return super().forward(x)

    model = FSDP(build(Registering), auto_wrap_policy=blocks_policy())

    train_step(model, 0)


@ranks(2)
def test_a_hook_that_changes_a_gradients_shape_is_named() -> None:
    def shrink(state: object, gradient: torch.Tensor, shard: torch.Tensor) -> None:
        shard.data = shard.data[:1]

    model = FSDP(build(Net))
    model.register_comm_hook(None, shrink)

    with pytest.raises(RuntimeError, match=r"hook shrink changed the shape .* unit '\(root\) Net'"):
        train_step(model, 0)


@ranks(2)
def test_a_hook_may_be_registered_between_steps() -> None:
    bare = build(Net)
    model = FSDP(copy.deepcopy(bare), auto_wrap_policy=blocks_policy(), use_orig_params=True)
    compare_models(bare, model)

    model.register_comm_hook(hooks.DefaultState(dist.group.WORLD), hooks.reduce_scatter_hook)

    compare_models(bare, model, first_step=2)
    assert_same_parameters(bare, model)
