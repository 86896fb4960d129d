"""summon_full_params: what each argument does, where it may be used, and what is refused."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from tests.original.training import (
    MODES,
    Net,
    assert_at_rest,
    assert_same_parameters,
    average_gradients,
    blocks_policy,
    build,
    full_parameters,
    loss_of,
    train_step,
)
from torch import nn

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import MixedPrecision, ShardingStrategy
from fullshard.testing import ranks

with_both_modes = pytest.mark.parametrize("use_orig_params", [False, True])


def wrap(use_orig_params: bool = True, bare: nn.Module | None = None) -> FSDP:
    return FSDP(
        bare or build(Net), auto_wrap_policy=blocks_policy(), use_orig_params=use_orig_params
    )


def shapes(module: nn.Module) -> list[torch.Size]:
    return [parameter.shape for parameter in module.parameters()]


@with_both_modes
@ranks(2)
def test_without_recursion_nested_units_stay_sharded(use_orig_params: bool) -> None:
    model, bare = wrap(use_orig_params), build(Net)
    sharded = [shapes(block) for block in model.blocks]

    with FSDP.summon_full_params(model, recurse=False):
        assert shapes(model.head) == shapes(bare.head)
        assert [shapes(block) for block in model.blocks] == sharded

    assert_at_rest(model)


@with_both_modes
@ranks(2)
def test_a_module_around_units_and_a_unit_inside_can_be_summoned(use_orig_params: bool) -> None:
    bare = build(Net)
    around = nn.Sequential(wrap(use_orig_params), wrap(use_orig_params))

    with FSDP.summon_full_params(around):
        assert shapes(around) == shapes(bare) * 2
    with FSDP.summon_full_params(around, recurse=False):
        assert shapes(around[0].head) != shapes(bare.head)
    with FSDP.summon_full_params(around[1].blocks[2]):
        assert shapes(around[1].blocks[2]) == shapes(bare.blocks[2])
        assert shapes(around[1].blocks[1]) != shapes(bare.blocks[1])


@ranks(2)
def test_what_is_summoned_is_not_summoned_again_with_other_options() -> None:
    model = wrap()
    outer = FSDP.summon_full_params(model.blocks[0], writeback=False, rank0_only=True)
    inner = FSDP.summon_full_params(model)

    with pytest.raises(AssertionError, match=r"already unsharding .*'blocks.0'"), outer, inner:
        pass

    assert_at_rest(model)
    with FSDP.summon_full_params(model.blocks[0]), FSDP.summon_full_params(model.blocks[1]):
        assert shapes(model.blocks[1]) == shapes(build(Net).blocks[1])


@pytest.mark.parametrize("writeback", [False, True])
@ranks(2)
def test_who_holds_the_flat_parameter_sees_and_changes_full_values_through_it(
    writeback: bool,
) -> None:
    model = FSDP(nn.Linear(5, 3))
    flat = model.get_parameter("_fsdp_wrapped_module._flat_param")
    shard = flat.detach().clone()

    with torch.no_grad(), FSDP.summon_full_params(model, writeback=writeback):
        assert flat.shape == (18,)
        assert torch.equal(flat[:15].view(3, 5), model.weight)
        flat.fill_(4)
        assert model.bias.tolist() == [4, 4, 4]

    assert torch.equal(flat, torch.full_like(shard, 4) if writeback else shard)
    assert_at_rest(model)


@pytest.mark.parametrize("writeback", [False, True])
@pytest.mark.parametrize(("strategy", "use_orig_params"), MODES)
@ranks(2)
def test_changes_are_kept_or_discarded_as_asked(
    strategy: ShardingStrategy, use_orig_params: bool, writeback: bool
) -> None:
    bare = build(Net)
    model = FSDP(
        copy.deepcopy(bare),
        auto_wrap_policy=blocks_policy(),
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
    )
    is_sharded = strategy is not ShardingStrategy.NO_SHARD

    with FSDP.summon_full_params(model, writeback=writeback), torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)

    if writeback or not is_sharded:
        with torch.no_grad():
            for parameter in bare.parameters():
                parameter.add_(1)
    assert_same_parameters(bare, model)


@with_both_modes
@ranks(2)
def test_other_ranks_keep_seeing_their_shards_when_rank_0_alone_is_asked_for(
    use_orig_params: bool,
) -> None:
    model, bare = wrap(use_orig_params), build(Net)
    sharded = shapes(model)

    with FSDP.summon_full_params(model, rank0_only=True, writeback=False):
        assert shapes(model) == (shapes(bare) if dist.get_rank() == 0 else sharded)

    train_step(model, 0)


@ranks(2)
def test_gradients_are_shown_whole_and_their_changes_are_kept() -> None:
    bare, model = build(Net), wrap()
    for each in (bare, model):
        train_step(each, 0)
    average_gradients(bare)

    with FSDP.summon_full_params(model, with_grads=True):
        for parameter, expected in zip(model.parameters(), bare.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, expected.grad)
            parameter.grad.mul_(2)

    for parameter in bare.parameters():
        parameter.grad.mul_(2)
    for each in (bare, model):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    assert_same_parameters(bare, model)


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
@ranks(2)
def test_gradients_given_to_parameters_that_had_none_are_kept(strategy: ShardingStrategy) -> None:
    bare = build(Net)
    model = FSDP(build(Net), sharding_strategy=strategy, use_orig_params=True)

    with FSDP.summon_full_params(model, with_grads=True):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)

    for parameter in bare.parameters():
        parameter.grad = torch.ones_like(parameter)
    for each in (bare, model):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    assert_same_parameters(bare, model)


@with_both_modes
@ranks(2)
def test_a_parameter_of_another_shape_is_refused_on_every_rank_and_nothing_is_left_behind(
    use_orig_params: bool,
) -> None:
    model = wrap(use_orig_params)
    before = full_parameters(model)

    with (
        pytest.raises(RuntimeError, match="Cannot writeback when the parameter shape changes"),
        FSDP.summon_full_params(model),
    ):
        model.head.bias.data = torch.zeros(9, device=model.compute_device)

    assert_at_rest(model)
    for name, parameter in full_parameters(model).items():
        assert torch.equal(parameter, before[name]), name
    train_step(model, 0)


@with_both_modes
@ranks(2)
def test_a_shared_parameter_is_replaced_by_any_of_its_names(use_orig_params: bool) -> None:
    bare = build(Net)
    bare.blocks[2].up.weight = bare.blocks[0].up.weight
    model = FSDP(bare, use_orig_params=use_orig_params)
    expected = torch.full_like(full_parameters(model)["blocks.0.up.weight"], 2)

    with FSDP.summon_full_params(model):
        model.blocks[2].up.weight = nn.Parameter(expected.clone())

    assert torch.equal(full_parameters(model)["blocks.0.up.weight"], expected)
    with FSDP.summon_full_params(model):
        assert model.blocks[0].up.weight is model.blocks[2].up.weight


@pytest.mark.parametrize("with_grads", [False, True])
@ranks(2)
def test_a_replacement_that_is_discarded_leaves_the_parameter_that_an_optimizer_holds(
    with_grads: bool,
) -> None:
    bare, model = build(Net), wrap()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (bare, model)]
    for each in (bare, model):
        train_step(each, 0)
    average_gradients(bare)

    with FSDP.summon_full_params(model, writeback=False, with_grads=with_grads):
        model.head.weight = nn.Parameter(torch.zeros_like(model.head.weight))

    for optimizer in optimizers:
        optimizer.step()
    assert_same_parameters(bare, model)


@pytest.mark.parametrize("writeback", [False, True])
@with_both_modes
@ranks(2)
def test_a_parameter_removed_inside_is_told_or_comes_back(
    use_orig_params: bool, writeback: bool
) -> None:
    model, bare = wrap(use_orig_params), build(Net)
    told = pytest.raises(RuntimeError, match=r"'head\.bias' was removed from its Linear")

    with (
        told if writeback else contextlib.nullcontext(),
        FSDP.summon_full_params(model, writeback=writeback),
    ):
        del model.head.bias

    assert_at_rest(model)
    assert_same_parameters(bare, model)
    train_step(model, 0)


@ranks(2)
def test_full_parameters_are_in_full_precision_and_buffers_are_not() -> None:
    class Buffered(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("offset", torch.zeros(5))

    low = torch.bfloat16
    model = FSDP(build(Buffered), mixed_precision=MixedPrecision(low, buffer_dtype=low))
    model(torch.ones(2, 5, device=model.compute_device))

    with FSDP.summon_full_params(model):
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert model.offset.dtype == low


@ranks(2)
def test_combinations_that_cannot_work_are_refused() -> None:
    model, flat = wrap(), wrap(use_orig_params=False)

    with (
        pytest.raises(NotImplementedError, match="writeback=True and rank0_only=True"),
        FSDP.summon_full_params(model, rank0_only=True),
    ):
        pass
    with (
        pytest.raises(NotImplementedError, match="with_grads=True, use_orig_params=False"),
        FSDP.summon_full_params(flat, with_grads=True),
    ):
        pass
    with (
        pytest.raises(NotImplementedError, match="with_grads=True with offload_to_cpu=True"),
        FSDP.summon_full_params(model, with_grads=True, offload_to_cpu=True),
    ):
        pass


@pytest.mark.parametrize("where", ["forward", "backward"])
@ranks(2)
def test_in_the_middle_of_a_step_it_is_refused(where: str) -> None:
    class Summoning(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if where == "forward":
                full_parameters(model)
            hidden = self.embed(x)
            hidden.register_hook(lambda gradient: gradient if full_parameters(model) else None)
            return self.head(self.blocks[0](hidden))

    model = FSDP(build(Summoning), auto_wrap_policy=blocks_policy())

    with pytest.raises(AssertionError, match="Cannot manually unshard parameters during"):
        train_step(model, 0)


@ranks(2)
def test_a_training_step_cannot_start_inside_and_works_after_it() -> None:
    model, bare = wrap(), build(Net)

    with (
        FSDP.summon_full_params(model),
        pytest.raises(RuntimeError, match="inside summon_full_params"),
    ):
        train_step(model, 0)

    train_step(model, 0)
    train_step(bare, 0)
    average_gradients(bare)
    for each in (bare, model):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    assert_same_parameters(bare, model)


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
@ranks(2)
def test_a_backward_inside_is_refused_and_the_next_step_works(strategy: ShardingStrategy) -> None:
    model, bare = FSDP(build(Net), sharding_strategy=strategy), build(Net)
    loss = loss_of(model, 0)

    with (
        FSDP.summon_full_params(model),
        pytest.raises(ValueError, match=r"current state is TrainingState\.SUMMON_FULL_PARAMS"),
    ):
        loss.backward()

    torch.testing.assert_close(train_step(model, 0), train_step(bare, 0))
