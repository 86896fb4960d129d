"""The invariants of the architecture, each with its test."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from tests.original.training import (
    IN_PLACE,
    STRATEGIES,
    Block,
    InPlace,
    Net,
    assert_at_rest,
    assert_same_parameters,
    blocks_policy,
    build,
    compare,
    inputs,
    living_bytes,
    module_of,
    sharded,
    train_step,
)
from torch import nn

from fullshard import BackwardPrefetch, CPUOffload, ShardingStrategy
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.state.model.units import units_of
from fullshard.testing import device, ranks

SHARDING = pytest.mark.parametrize("strategy", [*STRATEGIES[:2], *IN_PLACE])
SHARDING_MODES = pytest.mark.parametrize(
    ("strategy", "use_orig_params"),
    [*itertools.product(STRATEGIES[:2], [True, False]), *((each, True) for each in IN_PLACE)],
)
BOTH = pytest.mark.parametrize("use_orig_params", [True, False])


class Watched(Block):
    """Notes the form of every parameter it finds, while it computes."""

    found: ClassVar[list[list[tuple[int, ...]]]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = (self.up.weight, self.up.bias, self.down.weight, self.scale)
        Watched.found.append([tuple(p.shape) for p in places])
        return super().forward(x)


class WatchedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Watched() for _ in range(3))


def policy(module: nn.Module, recurse: bool, **_: Any) -> bool:
    return recurse or isinstance(module, Block)


FULL = [(9, 7), (9,), (7, 9), (7,)]


@SHARDING_MODES
@ranks(2)
def test_a_unit_is_full_inside_its_compute_and_sharded_outside_never_a_mixture(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    Watched.found.clear()
    model = sharded(
        build(WatchedNet),
        sharding_strategy=strategy,
        auto_wrap_policy=policy,
        use_orig_params=use_orig_params,
    )
    assert_at_rest(model)
    train_step(model, 0)
    assert_at_rest(model)
    with torch.no_grad():
        model(inputs(0))
    assert_at_rest(model)
    with FSDP.summon_full_params(model):
        for block in module_of(model).blocks:
            module_of(block).forward(inputs(0, 2, 7))
    assert_at_rest(model)
    assert Watched.found == [FULL] * 9


@SHARDING
@ranks(2)
def test_while_any_unit_computes_every_unit_is_all_full_or_all_sharded(
    strategy: ShardingStrategy,
) -> None:
    model = sharded(
        build(Net), sharding_strategy=strategy, auto_wrap_policy=policy, use_orig_params=True
    )
    blocks = list(module_of(model).blocks)
    shards = [
        [p for unit in units_of(block) for handle in unit.handles for p in handle.params]
        for block in blocks
    ]
    seen: list[set[bool]] = []

    def look(*_: Any) -> None:
        for block, sharded_ones in zip(blocks, shards, strict=True):
            shown = [p for _, p in module_of(block).named_parameters()]
            pairs = zip(shown, sharded_ones, strict=True)
            seen.append({one is other for one, other in pairs})

    for block in map(module_of, blocks):
        block.register_forward_hook(look)
        block.down.register_full_backward_hook(look)
    train_step(model, 0)
    assert len(seen) == 18
    assert all(len(forms) == 1 for forms in seen)
    assert {True} in seen
    assert {False} in seen


@BOTH
@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_every_storage_has_one_owner(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    model = sharded(
        build(Net),
        sharding_strategy=strategy,
        auto_wrap_policy=blocks_policy(),
        use_orig_params=use_orig_params,
    )
    train_step(model, 0)
    owners: dict[int, str] = {}
    for wrapper in FSDP.fsdp_modules(model):
        for handle in wrapper._unit.handles:
            storages = {handle.shard_tensor.untyped_storage()._cdata}
            storages |= {b.flat.untyped_storage()._cdata for b in handle.full_buffers.values()}
            for storage in storages:
                assert storage not in owners, f"{owners.get(storage)} and {wrapper._unit.name}"
                owners[storage] = wrapper._unit.name
    for gradient in (p.grad for p in model.parameters() if p.grad is not None):
        assert gradient.untyped_storage()._cdata not in owners


@SHARDING_MODES
@ranks(2)
def test_between_steps_a_rank_holds_its_part_of_everything_and_no_more(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    base = living_bytes()
    model = sharded(
        build(Net),
        sharding_strategy=strategy,
        auto_wrap_policy=blocks_policy(),
        use_orig_params=use_orig_params,
    )
    total = 4 * sum(p.numel() for p in build(Net).parameters())
    # Alignment and tails; a GPU's memory is handed out in pieces of 512 bytes.
    padding = 4 * 4 * 20 if device().type == "cpu" else 512 * 20
    if isinstance(strategy, InPlace):
        # A row of each parameter that two ranks cannot share evenly.
        padding += sum(4 * p.numel() // len(p) for p in build(Net).parameters() if len(p) % 2)
    assert living_bytes() - base <= total / 2 + padding, (living_bytes(), base, total)
    train_step(model, 0)
    assert living_bytes() - base <= total + 2 * padding
    model.zero_grad()
    assert living_bytes() - base <= total / 2 + padding, (living_bytes(), base, total)


@SHARDING_MODES
@ranks(2)
def test_the_sharded_forms_are_the_same_bits_after_any_number_of_uses(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    model = sharded(
        build(Net),
        sharding_strategy=strategy,
        auto_wrap_policy=blocks_policy(),
        use_orig_params=use_orig_params,
    )
    before = [p.detach().clone() for p in model.parameters()]
    for step in range(2):
        train_step(model, step)
        with torch.no_grad():
            model(inputs(step))
        with FSDP.summon_full_params(model):
            pass
    after = list(model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert_same_parameters(build(Net), model)


@pytest.mark.parametrize("world", ["default", "own group"])
@ranks(2)
def test_all_ranks_issue_the_same_collectives_in_the_same_order(world: str) -> None:
    group = dist.new_group([0, 1]) if world == "own group" else dist.group.WORLD
    model = sharded(
        build(Net), process_group=group, auto_wrap_policy=blocks_policy(), use_orig_params=True
    )
    train_step(model, 0)
    agreement = model._unit.shards._agreement
    orders: list[Any] = [None, None]
    dist.all_gather_object(orders, [str(o) for o in agreement.history()])
    assert orders[0] == orders[1]
    assert len(orders[0]) > 8


OPTIONS: list[dict[str, Any]] = [
    {},
    {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    {"sharding_strategy": ShardingStrategy.NO_SHARD},
    {"backward_prefetch": None},
    {"backward_prefetch": BackwardPrefetch.BACKWARD_POST, "forward_prefetch": True},
    {"limit_all_gathers": False},
    {"auto_wrap_policy": lambda **_: False},
    {"auto_wrap_policy": lambda recurse, **_: True},
    {"use_orig_params": False},
    {"cpu_offload": CPUOffload(offload_params=False)},
]


@ranks(2)
def test_results_do_not_depend_on_options_on_two_ranks() -> None:
    for options in OPTIONS:
        compare(**options)


@ranks(3)
def test_results_do_not_depend_on_options_on_three_ranks() -> None:
    for options in OPTIONS[:3]:
        compare(**options)
