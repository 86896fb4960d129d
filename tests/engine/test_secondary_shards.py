"""Second shards that a few ranks keep between forward and backward."""

from __future__ import annotations

import copy
import os
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.engine.encoded import (
    APIS,
    Block,
    build,
    gradients_of,
    loss_of,
    parameters_of,
    shard,
    step_alone,
)
from tests.engine.traffic import counted_bytes
from torch import nn

import fullshard
from fullshard import Communication, FullyShardedDataParallel, MixedPrecision
from fullshard.engine.comm.collectives import Group
from fullshard.engine.comm.hosts import HOST_VARIABLE
from fullshard.engine.comm.neighbours import neighbours_in
from fullshard.engine.encoding.encodings import BlockEncoding
from fullshard.testing import device, ranks
from fullshard.wrap import ModuleWrapPolicy

with_both_apis = pytest.mark.parametrize("api", APIS)
TWO = Communication(secondary_shards=2)


@with_both_apis
@ranks(4)
def test_training_is_that_without_second_shards_bit_for_bit(api: str) -> None:
    results = []
    for given in (None, TWO):
        model = shard(api, build(5), given)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(4):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(parameters_of(model))

    for name, parameter in results[0].items():
        assert torch.equal(parameter, results[1][name]), name


@ranks(4)
def test_a_backward_gathers_among_the_few_ranks_and_they_keep_their_part_until_then() -> None:
    layers = 5
    model = shard("wrapper", build(layers), TWO)
    units = [wrapper._unit for wrapper in FullyShardedDataParallel.fsdp_modules(model)]
    loss_of(model).backward()

    with counted_bytes() as in_forward:
        loss = loss_of(model)
    kept = [unit.parts.held for unit in units if unit.parts is not None]
    shown = [p.numel() for p in model.parameters()]
    sharded = [p.numel() for unit in units for h in unit.handles for p in h.sharded]
    parts = [part.gather_input.untyped_storage().nbytes() for parts in kept for part in parts]
    with counted_bytes() as in_backward:
        loss.backward()

    # A host does not reshard the last two, with which backward begins.
    count = layers - 2 if device().type == "cpu" else layers
    assert sum(map(bool, kept)) == count
    numel = sum(p.numel() for p in build(1).parameters())
    assert sum(parts) == pytest.approx(count * 4 * numel / 2, rel=0.02)
    # Users see this rank's pieces, as they do without.
    assert sorted(shown) == sorted(sharded)
    assert list(in_forward.by_group_size) == [4]
    # All that goes through the group of four is gradients: three quarters of them.
    assert in_backward.by_group_size[4] == pytest.approx(layers * 4 * numel * 3 / 4, rel=0.02)
    assert in_backward.by_group_size[2] == pytest.approx(count * 4 * numel / 2, rel=0.02)
    assert not any(unit.parts is not None and unit.parts.held for unit in units)


@with_both_apis
@ranks(4)
def test_changes_between_a_forward_and_the_next_are_seen(api: str) -> None:
    each = step_alone(_scaled(build(4)), 4)
    model = shard(api, build(4), TWO)

    # A forward that no backward follows, and a change of all shards.
    loss_of(model, 3)
    with torch.no_grad():
        if api == "wrapper":
            for parameter in model.parameters():
                parameter.mul_(1.5)
        else:
            with fullshard.summon_full_params(model):
                _scaled(model)
    loss_of(model).backward()

    for name, gradient in gradients_of(model).items():
        assert gradient is not None
        mean = torch.stack([of_rank[name] for of_rank in each]).mean(0)
        torch.testing.assert_close(gradient.view_as(mean), mean, rtol=1e-4, atol=1e-4)


def _scaled(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return model


@ranks(4)
def test_state_dicts_accumulation_and_checkpointing_go_with_second_shards() -> None:
    from torch.utils.checkpoint import checkpoint

    def made() -> Any:
        model: Any = build(4)
        inner = model[1].forward
        model[1].forward = lambda x: checkpoint(inner, x, use_reentrant=False)
        return model

    expected = dict(build(4).named_parameters())
    each = [step_alone(made(), 4, step) for step in (0, 1)]
    model = shard("wrapper", made(), TWO)

    with model.no_sync():
        loss_of(model, 0).backward()
    loss = loss_of(model, 1)
    state = model.state_dict()
    loss.backward()

    for name, value in state.items():
        assert torch.equal(value.cpu(), expected[name].detach().cpu()), name
    for name, gradient in gradients_of(model).items():
        assert gradient is not None
        mean = sum(torch.stack([of_rank[name] for of_rank in step]).mean(0) for step in each)
        torch.testing.assert_close(gradient.view_as(mean), mean, rtol=1e-4, atol=1e-4)


@ranks(4)
def test_an_exception_between_forward_and_backward_leaves_nothing_behind() -> None:
    model = shard("wrapper", build(5), TWO)
    loss_of(model).backward()
    model.zero_grad()
    each = step_alone(build(5), 4)

    class Broken(Exception):
        pass

    def fail(*_: Any) -> None:
        raise Broken

    hook = model.module[4].register_forward_hook(fail)
    with pytest.raises(Broken):
        loss_of(model)
    hook.remove()
    units = [wrapper._unit for wrapper in FullyShardedDataParallel.fsdp_modules(model)]
    held = [unit for unit in units if unit.parts is not None and unit.parts.held]
    loss_of(model).backward()

    assert not held
    for name, gradient in gradients_of(model).items():
        assert gradient is not None
        mean = torch.stack([of_rank[name] for of_rank in each]).mean(0)
        torch.testing.assert_close(gradient.view_as(mean), mean, rtol=1e-4, atol=1e-4)


class _BrokenBackward(Exception):
    pass


def _fail_in_backward(*_: Any) -> None:
    raise _BrokenBackward


@with_both_apis
@ranks(4)
def test_an_exception_in_backward_finds_second_shards_that_are_being_gathered(api: str) -> None:
    each = step_alone(build(5), 4)
    model = shard(api, build(5), TWO)
    loss_of(model).backward()

    for position in range(5):
        blocks = [module for module in model.modules() if isinstance(module, Block)]
        # The next unit of the backward is on its way.
        hook = blocks[position].norm.register_full_backward_hook(_fail_in_backward)
        with pytest.raises(_BrokenBackward):
            loss_of(model).backward()
        hook.remove()
    model.zero_grad()
    loss_of(model).backward()

    for name, gradient in gradients_of(model).items():
        assert gradient is not None
        mean = torch.stack([of_rank[name] for of_rank in each]).mean(0)
        torch.testing.assert_close(gradient.view_as(mean), mean, rtol=1e-4, atol=1e-4)


@ranks(4)
def test_what_crosses_between_hosts_is_a_third_with_eight_bits_and_second_shards() -> None:
    os.environ[HOST_VARIABLE] = f"host {dist.get_rank() // 2}"
    try:
        group: Any = dist.new_group(range(4))
        plain = _crossing(group, None)
        whole = _crossing(group, Communication(secondary_shards=True))
        eight = _crossing(group, Communication(torch.int8, torch.int8, secondary_shards=True))
    finally:
        del os.environ[HOST_VARIABLE]

    # Of two all-gathers and a reduce, one all-gather stays on the host; then half the bytes.
    assert whole / plain == pytest.approx(2 / 3, rel=1e-2)
    if device().type == "cpu":
        assert eight / plain == pytest.approx((1 + 4 / 256) / 3, rel=1e-2)
    else:
        # Gradients are added up inside hosts first: of each rank's, a quarter comes from elsewhere
        # in one byte, and not three quarters in two.
        assert eight / plain == pytest.approx((1 + 4 / 256) / 3 * (1 + 1 / 3) / 2, rel=3e-2)
    assert eight / plain <= 0.36


def _crossing(group: Any, communication: Communication | None) -> int:
    """Bytes per step that come through groups whose ranks are on both hosts."""

    class Layer(nn.Sequential):
        pass

    torch.manual_seed(0)
    layers = [Layer(nn.Linear(256, 128), nn.Tanh(), nn.Linear(128, 256)) for _ in range(4)]
    model = FullyShardedDataParallel(
        nn.Sequential(*layers).to(device()),
        group,
        auto_wrap_policy=ModuleWrapPolicy({Layer}),
        use_orig_params=True,
        mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16),
        backward_prefetch=None,
        communication=communication,
    )
    inputs = torch.randn(2, 256, device=device())
    for _ in range(2):
        model(inputs).square().sum().backward()
    with counted_bytes() as received:
        model(inputs).square().sum().backward()
    return sum(n for ranks, n in received.by_ranks.items() if len({r // 2 for r in ranks}) == 2)


@with_both_apis
@pytest.mark.parametrize("hosts", ["aabb", "abab", "aaab", "abbc"])
@ranks(4)
def test_gradients_are_added_up_inside_hosts_and_encoded_once(api: str, hosts: str) -> None:
    os.environ[HOST_VARIABLE] = hosts[dist.get_rank()]
    each = []
    for rank in range(4):
        alone = _one_rank_uses_one(rank)
        loss_of(alone, rank=rank).backward()
        each.append({n: p.grad for n, p in alone.named_parameters() if p.grad is not None})
    try:
        mesh = dist.device_mesh.DeviceMesh.from_group(dist.new_group(range(4)), device().type)
        model: Any = _one_rank_uses_one(dist.get_rank())
        communication = Communication(reduce_dtype=torch.int8, min_numel=0)
        if api == "wrapper":
            model = shard(api, model, communication, process_group=mesh.get_group())
        else:
            for part in (*model, model):
                fullshard.fully_shard(part, mesh=mesh, communication=communication)
        loss_of(model).backward()
        found = gradients_of(model)
    finally:
        del os.environ[HOST_VARIABLE]

    assert [n for n, g in found.items() if g is None] == ["1.skipped.weight", "2.skipped.weight"]
    largest = sum(max(float(g.abs().max()) for g in of_rank.values()) for of_rank in each)
    for name, gradient in found.items():
        if gradient is not None:
            total = sum(of_rank[name] for of_rank in each if name in of_rank)
            off = (gradient.view_as(total) - total / 4).abs().max()
            # The sum of each other host's ranks is encoded, and the mean is over four.
            assert off <= largest * (1 / 254 + 2**-20) / 4 + 1e-5 * largest, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@ranks(4)
def test_backends_that_do_not_look_at_hosts_add_up_inside_them_first(dtype: torch.dtype) -> None:
    os.environ[HOST_VARIABLE] = f"host {dist.get_rank() // 2}"
    try:
        # As a backend other than gloo has it.
        group = Group(dist.new_group(range(4)), device().type)
        rank, numel = group.rank, 1000
        generator = torch.Generator().manual_seed(0)
        everything = torch.randn(4, 4 * numel, generator=generator).to(device(), dtype)
        present = torch.tensor([1, rank == 2, 0], dtype=torch.uint8, device=device())
        output = torch.empty(numel, device=device())
        encoding = BlockEncoding(torch.int8, 64)

        with counted_bytes() as received:
            finish = group.start_encoded_reduce(
                output, everything[rank].clone(), present, encoding, "unit"
            )
            found = finish()
    finally:
        del os.environ[HOST_VARIABLE]

    own = everything[:, rank * numel : (rank + 1) * numel].float()
    here = rank // 2 * 2
    there = own[2 - here : 4 - here].sum(0)
    off = (output - own.sum(0)).abs()
    bound = torch.cat([part.abs().max().expand_as(part) for part in there.split(64)]) / 254
    assert bool((off <= bound * (1 + 1e-3) + 1e-5).all())
    assert off.max() > 0
    assert found.tolist() == [1, 1, 0]
    # Half of two parts as they are, from the neighbour; one encoded part from the other host.
    messages = encoding.nbytes(numel)
    assert received.total == pytest.approx(2 * 4 * numel + messages, rel=0.02)


@pytest.mark.parametrize("hosts", ["aaab", "abab"])
@ranks(4)
def test_backends_that_do_not_look_at_hosts_send_everything_where_hosts_differ(hosts: str) -> None:
    os.environ[HOST_VARIABLE] = hosts[dist.get_rank()]
    try:
        group = Group(dist.new_group(range(4)), device().type)
        generator = torch.Generator().manual_seed(0)
        everything = torch.randn(4, 4 * 100, generator=generator).to(device())
        present = torch.ones(1, dtype=torch.uint8, device=device())
        output = torch.empty(100, device=device())

        encoding = BlockEncoding(torch.int8, 100)
        own = everything[group.rank].clone()
        group.start_encoded_reduce(output, own, present, encoding, "unit")()
    finally:
        del os.environ[HOST_VARIABLE]

    parts = everything[:, group.rank * 100 : (group.rank + 1) * 100]
    bound = float(parts.abs().amax(1).sum()) / 254 + 1e-5
    assert float((output - parts.sum(0)).abs().max()) <= bound


def _one_rank_uses_one(rank: int) -> Any:
    """The model as a rank has it: the second one alone uses the skipped weight, of one block."""
    model: Any = build()
    for block in model:
        block.uses_skipped = False
    model[0].uses_skipped = rank == 1
    return model


@with_both_apis
@ranks(4)
def test_on_one_host_second_shards_of_its_ranks_change_nothing(api: str) -> None:
    model = shard(api, build(), Communication(secondary_shards=True))

    loss_of(model).backward()

    units = [
        module._unit if isinstance(module, FullyShardedDataParallel) else None
        for module in model.modules()
    ]
    assert not any(unit is not None and unit.parts is not None for unit in units)
    assert all(gradient is not None for gradient in gradients_of(model).values())


@pytest.mark.parametrize("asked", [(True, 1), (1, True)])
@ranks(4)
def test_second_shards_of_one_rank_are_not_those_of_a_host(asked: tuple[bool | int, ...]) -> None:
    os.environ[HOST_VARIABLE] = "aabb"[dist.get_rank()]
    try:
        group = dist.new_group(range(4))
        found = {str(each): neighbours_in(group, each) for each in asked}
    finally:
        del os.environ[HOST_VARIABLE]

    assert found["1"] is None
    assert found["True"] is not None
    assert found["True"].size() == 2


@ranks(4)
def test_copies_and_pickles_of_a_model_keep_second_shards() -> None:
    model = shard("wrapper", build(5), TWO)
    loss_of(model).backward()

    def in_backward(model: Any) -> int:
        loss = loss_of(model)
        with counted_bytes() as received:
            loss.backward()
        return received.by_group_size[2]

    expected = in_backward(model)
    assert expected > 0
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss_of(other).backward()
        assert in_backward(other) == expected


@with_both_apis
@pytest.mark.parametrize("hosts", ["abab", "aaab"])
@ranks(4)
def test_hosts_that_do_not_follow_each_other_evenly_are_refused_second_shards(
    api: str, hosts: str
) -> None:
    os.environ[HOST_VARIABLE] = hosts[dist.get_rank()]
    communication = Communication(secondary_shards=True)
    try:
        group = dist.new_group()
        mesh = dist.device_mesh.DeviceMesh.from_group(group, device().type)
        model = build()
        applied: dict[str, Any] = {
            "wrapper": lambda: FullyShardedDataParallel(model, group, communication=communication),
            "fully_shard": lambda: fullshard.fully_shard(
                model, mesh=mesh, communication=communication
            ),
        }
        with pytest.raises(ValueError, match="expects hosts with equally many ranks"):
            applied[api]()
    finally:
        del os.environ[HOST_VARIABLE]

    for found, expected in zip(model.parameters(), build().parameters(), strict=True):
        assert torch.equal(found, expected)


@ranks(2)
def test_whom_a_forward_leaves_parameters_to_is_said_once() -> None:
    for reshards in (False, 2):
        with pytest.raises(ValueError, match="leave one of them out"):
            fullshard.fully_shard(build()[0], reshard_after_forward=reshards, communication=TWO)


@ranks(4)
def test_groups_of_the_few_ranks_that_were_destroyed_are_made_again() -> None:
    for _ in range(2):
        few = neighbours_in(dist.group.WORLD, 2)
        assert few is not None
        tensor = torch.ones(1, device=device())
        dist.all_reduce(tensor, group=few)
        assert tensor.item() == 2
        assert neighbours_in(dist.group.WORLD, 2) is few
        dist.barrier()
        dist.destroy_process_group(few)
