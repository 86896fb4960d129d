"""apply, and what a wrapper tells about the units and names below it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.original.training import (
    STRATEGIES,
    Block,
    Net,
    assert_at_rest,
    assert_same_parameters,
    blocks_policy,
    build,
    compare_models,
    train_step,
)
from torch import nn

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy
from fullshard.testing import device, ranks

with_both_modes = pytest.mark.parametrize("use_orig_params", [False, True])


def fill(module: nn.Module) -> None:
    """Values that depend on the whole shape, so that pieces of a parameter would show."""
    if isinstance(module, nn.Linear):
        with torch.no_grad():
            module.weight.copy_(torch.arange(float(module.weight.numel())).view_as(module.weight))
            module.bias.fill_(0.5) if module.bias is not None else None


@pytest.mark.parametrize("strategy", STRATEGIES)
@with_both_modes
@ranks(2)
def test_apply_reaches_full_parameters_and_its_changes_are_kept(
    use_orig_params: bool, strategy: ShardingStrategy
) -> None:
    bare = build(Net)
    model = FSDP(
        copy.deepcopy(bare),
        auto_wrap_policy=blocks_policy(),
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
    )
    train_step(model, 0)

    assert model.apply(fill) is model
    bare.apply(fill)

    assert_at_rest(model)
    assert_same_parameters(bare, model)
    compare_models(bare, model, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1e-9))


@ranks(2)
def test_apply_visits_every_module_once_children_first_wrappers_included() -> None:
    model = FSDP(build(Net), auto_wrap_policy=blocks_policy())
    seen: list[nn.Module] = []

    model.apply(seen.append)

    assert set(seen) == set(model.modules())
    assert len(seen) == len(set(seen))
    assert seen[-1] is model


@ranks(2)
def test_apply_on_a_nested_unit_changes_that_unit_alone() -> None:
    bare = build(Net)
    model = FSDP(copy.deepcopy(bare), auto_wrap_policy=blocks_policy(), use_orig_params=True)

    model.blocks[1].apply(fill)
    bare.blocks[1].apply(fill)

    assert_same_parameters(bare, model)


@ranks(2)
def test_an_exception_in_apply_leaves_sharded_parameters() -> None:
    def fail(module: nn.Module) -> None:
        raise ArithmeticError(type(module).__name__)

    model = FSDP(build(Net), auto_wrap_policy=blocks_policy(), use_orig_params=True)

    with pytest.raises(ArithmeticError):
        model.apply(fail)

    assert_at_rest(model)


@ranks(2)
def test_apply_inside_summon_is_refused_since_it_could_not_keep_changes() -> None:
    model = FSDP(build(Net), auto_wrap_policy=blocks_policy())
    summoned = FSDP.summon_full_params(model.blocks[1], writeback=False)

    with pytest.raises(ValueError, match=r"expected to be in states .*IDLE"), summoned:
        model.apply(fill)

    assert_at_rest(model)
    model.apply(fill)
    with FSDP.summon_full_params(model):
        assert model.head.bias.eq(0.5).all()


@ranks(2)
def test_apply_in_the_middle_of_a_forward_is_refused() -> None:
    class Applying(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            model.apply(fill)
            return super().forward(x)

    model = FSDP(build(Applying), auto_wrap_policy=blocks_policy())

    with pytest.raises((RuntimeError, AssertionError), match="forward"):
        train_step(model, 0)


@ranks(2)
def test_fsdp_modules_are_all_wrappers_or_the_outermost_ones() -> None:
    model = FSDP(build(Net), auto_wrap_policy=blocks_policy())
    beside = nn.ModuleDict({"model": model, "other": FSDP(nn.Linear(3, 3).to(device()))})

    assert FSDP.fsdp_modules(model) == [model, *model.blocks]
    assert FSDP.fsdp_modules(model, root_only=True) == [model]
    assert FSDP.fsdp_modules(beside) == [model, *model.blocks, beside["other"]]
    assert FSDP.fsdp_modules(beside, root_only=True) == [model, beside["other"]]
    assert FSDP.fsdp_modules(nn.Linear(3, 3)) == []


@pytest.mark.parametrize("first", ["root", "nested", "step"])
@ranks(2)
def test_the_root_is_known_whoever_is_asked_first(first: str) -> None:
    model = FSDP(build(Net), auto_wrap_policy=blocks_policy())
    asked: dict[str, Any] = {
        "root": model.check_is_root,
        "nested": model.blocks[0].check_is_root,
        "step": lambda: train_step(model, 0),
    }

    asked[first]()

    assert model.check_is_root()
    assert not any(block.check_is_root() for block in model.blocks)


@ranks(2)
def test_a_unit_is_a_root_where_no_other_is_around_it() -> None:
    model = FSDP(build(Net), auto_wrap_policy=blocks_policy())
    block = model.blocks[0]

    alone = nn.Sequential(FSDP(build(Block)))
    model.blocks[0] = nn.Identity()

    assert alone[0].check_is_root()
    assert block.check_is_root()


@ranks(2)
def test_named_buffers_have_the_bare_models_names_inside_and_outside_of_summon() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm1d(3)))

    bare = build(make)
    model = FSDP(build(make), auto_wrap_policy=lambda module, recurse, nonwrapped_numel: True)

    expected = dict(bare.named_buffers())
    for prefix in ("", "some"):
        names = [name for name, _ in model.named_buffers(prefix=prefix)]
        assert names == [name for name, _ in bare.named_buffers(prefix=prefix)]
    with FSDP.summon_full_params(model):
        found = dict(model.named_buffers())
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], buffer) for name, buffer in expected.items())
