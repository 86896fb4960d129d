"""summon_full_params with gradients that only some ranks have, and of some of the units only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from tests.original.training import (
    Net,
    assert_at_rest,
    average_gradients,
    blocks_policy,
    build,
    inputs,
    train_step,
)
from torch import nn

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy
from fullshard.testing import device, ranks

STRATEGIES = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
)
with_both_modes = pytest.mark.parametrize("use_orig_params", [False, True])


class Skipping(Net):
    """A net whose second block is left out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[2](self.blocks[0](self.embed(x))))


def gradients(model: nn.Module, **options: Any) -> dict[str, torch.Tensor | None]:
    with FSDP.summon_full_params(model, with_grads=True, **options):
        return {
            name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
        }


def own_gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@pytest.mark.parametrize("wrapping", ["blocks", "one unit"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_gradients_that_no_rank_has_are_none_and_the_others_whole(
    strategy: ShardingStrategy, wrapping: str
) -> None:
    bare = build(Skipping)
    policy = blocks_policy() if wrapping == "blocks" else None
    model = FSDP(
        build(Skipping), auto_wrap_policy=policy, sharding_strategy=strategy, use_orig_params=True
    )

    assert set(gradients(model).values()) == {None}
    for each in (bare, model):
        train_step(each, 0)
    average_gradients(bare)

    before = own_gradients(model)
    for writeback in (False, True):
        found = gradients(model, writeback=writeback)
        for name, parameter in bare.named_parameters():
            assert (found[name] is None) == name.startswith("blocks.1"), name
            if parameter.grad is not None:
                torch.testing.assert_close(found[name], parameter.grad)
        assert_same(own_gradients(model), before)


@pytest.mark.parametrize("writeback", [False, True])
@pytest.mark.parametrize("without", [0, 1])
@pytest.mark.parametrize("part", ["", "blocks.1", "head"])
@ranks(2)
def test_a_rank_without_gradients_adds_zeros_and_still_has_none_afterwards(
    part: str, without: int, writeback: bool
) -> None:
    bare = build(Net)
    model = FSDP(build(Net), auto_wrap_policy=blocks_policy(), use_orig_params=True)
    for each in (bare, model):
        train_step(each, 0)
    average_gradients(bare)
    if dist.get_rank() == without:
        for name, parameter in model.named_parameters():
            if name.startswith(part):
                parameter.grad = None
    before = own_gradients(model)

    found = gradients(model, writeback=writeback)

    sizes: list[Any] = [None, None]
    dist.all_gather_object(sizes, {n: p.numel() for n, p in model.named_parameters()})
    for name, parameter in bare.named_parameters():
        held = [sizes[0][name], sizes[1][name]]
        if name.startswith(part):
            first, second = parameter.grad.view(-1).split(held)
            (first if without == 0 else second).zero_()
            held[without] = 0
        if not any(held):
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], parameter.grad)
    assert_same(own_gradients(model), before)


@ranks(2)
def test_what_is_put_in_place_of_the_zeros_is_kept() -> None:
    model = FSDP(build(Net), use_orig_params=True)
    train_step(model, 0)
    if dist.get_rank() == 1:
        model.zero_grad()

    with FSDP.summon_full_params(model, with_grads=True):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.fill_(3)
        changed = [p.grad is not None for p in model.parameters()]

    for parameter, was_changed in zip(model.parameters(), changed, strict=True):
        if was_changed and parameter.numel():
            assert parameter.grad is not None
            assert bool((parameter.grad == 3).all())
        elif not was_changed:
            assert parameter.grad is None


@ranks(2)
def test_the_first_rank_alone_sees_gradients_that_only_the_other_has() -> None:
    model = FSDP(build(Net), auto_wrap_policy=blocks_policy(), use_orig_params=True)
    train_step(model, 0)
    if dist.get_rank() == 0:
        model.zero_grad()
    found = gradients(model, rank0_only=True, writeback=False)
    if dist.get_rank() == 0:
        assert any(gradient is not None and gradient.any() for gradient in found.values())
        assert all(parameter.grad is None for parameter in model.parameters())


# -- sizes of flat parameters ----------------------------------------------------------------------


def nested(wrapper: Any, use_orig_params: bool) -> dict[str, Any]:
    """Units in units, and one in a module that is none, by names."""
    options = {"use_orig_params": use_orig_params, "device_id": device()}
    inner = wrapper(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3)), **options)
    middle = wrapper(nn.Sequential(nn.Linear(2, 2), inner), **options)
    other = wrapper(nn.Linear(5, 3), **options)
    outer = wrapper(nn.Sequential(nn.Linear(4, 3), middle, nn.ModuleList([other])), **options)
    return {"outer": outer, "middle": middle, "inner": inner, "other": other}


def sizes(units: dict[str, Any]) -> dict[str, int]:
    return {name: unit._flat_param.numel() for name, unit in units.items()}


def sizes_while_summoned(wrapper: Any, use_orig_params: bool) -> list[dict[str, int]]:
    units = nested(wrapper, use_orig_params)
    found = [sizes(units)]
    for name, options in (
        ("outer", {"recurse": False}),
        ("middle", {"recurse": False}),
        ("middle", {}),
        ("outer", {}),
        ("outer", {"recurse": False, "rank0_only": True, "writeback": False}),
    ):
        with wrapper.summon_full_params(units[name], **options):
            found.append(sizes(units))
    found.append(sizes(units))
    return found


@with_both_modes
@ranks(2)
def test_flat_parameters_of_units_that_are_not_summoned_keep_their_shard_s_size(
    use_orig_params: bool,
) -> None:
    units = nested(FSDP, use_orig_params)
    shards = sizes(units)
    whole = {"outer": 15, "middle": 6, "inner": 21, "other": 18}
    if use_orig_params:
        # Each but the last parameter is aligned to 16 bytes, and the end padded for two ranks.
        whole = {"outer": 16, "middle": 6, "inner": 28, "other": 20}

    with FSDP.summon_full_params(units["outer"], recurse=False):
        assert sizes(units) == {**shards, "outer": whole["outer"]}
    with FSDP.summon_full_params(units["middle"]):
        assert sizes(units) == {**shards, "middle": whole["middle"], "inner": whole["inner"]}
    with FSDP.summon_full_params(units["outer"]):
        assert sizes(units) == whole
    assert sizes(units) == shards
    assert_at_rest(units["outer"])


@with_both_modes
@ranks(2)
def test_sizes_of_flat_parameters_are_those_that_torch_shows(use_orig_params: bool) -> None:
    theirs = torch.distributed.fsdp.FullyShardedDataParallel
    assert sizes_while_summoned(FSDP, use_orig_params) == sizes_while_summoned(
        theirs, use_orig_params
    )


@ranks(2)
def test_the_flat_parameter_of_original_ones_is_their_memory_while_summoned() -> None:
    model = FSDP(nn.Linear(5, 3).to(device()), use_orig_params=True)
    flat = model._flat_param
    with torch.no_grad(), FSDP.summon_full_params(model):
        assert torch.equal(flat[:15].view(3, 5), model.weight)
        flat.fill_(4)
        assert model.bias.tolist() == [4, 4, 4]
    assert all(bool((p == 4).all()) for p in model.parameters())
    assert_at_rest(model)
    torch.testing.assert_close(
        model(inputs(0)), inputs(0).sum(1, keepdim=True).expand(4, 3) * 4 + 4
    )
