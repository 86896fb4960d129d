"""Collectives over gloo of ranks that are spread over hosts, which here are hosts by name only."""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.encoded import assert_uneven_batches_train_as_one_process, build, shard
from tests.engine.models import NestedLinears, make
from tests.engine.parity import adam, train, train_alone
from torch import nn

from fullshard import FullyShardedDataParallel, ShardingStrategy
from fullshard.engine.comm.across_hosts import AcrossHosts
from fullshard.engine.comm.collectives import group_for
from fullshard.engine.comm.gloo import GlooGroup
from fullshard.engine.comm.hosts import HOST_VARIABLE, Hosts
from fullshard.testing import device, ranks
from fullshard.wrap import ModuleWrapPolicy

host_numbers = st.lists(st.integers(0, 3), min_size=1, max_size=12)


@given(host_numbers)
def test_every_byte_crosses_once_to_each_other_host(numbers: list[int]) -> None:
    hosts = Hosts.named(list(map(str, numbers)))

    crossings = Counter(
        (sender, hosts.of_ranks[relay])
        for sender in range(len(numbers))
        for relay in hosts.relays(sender)
    )

    expected = {
        (sender, host)
        for sender in range(len(numbers))
        for host in range(hosts.count)
        if host != hosts.of_ranks[sender]
    }
    assert crossings == Counter(expected)


@given(host_numbers)
def test_a_relay_knows_for_whom_it_is_one(numbers: list[int]) -> None:
    hosts = Hosts.named(list(map(str, numbers)))

    for rank in range(len(numbers)):
        for relay in hosts.relays(rank):
            assert rank in hosts.relayed(relay)
        for other in hosts.relayed(rank):
            assert rank in hosts.relays(other)


@given(host_numbers)
def test_ranks_of_a_host_carry_about_as_much(numbers: list[int]) -> None:
    hosts = Hosts.named(list(map(str, numbers)))

    for rank in range(len(numbers)):
        neighbours = hosts.neighbours(rank)
        loads = [len(hosts.relayed(n)) for n in neighbours]
        # Each other host's ranks go round: at most one more, for each other host.
        assert max(loads) - min(loads) <= hosts.count - 1


def _be_on_host(name: str) -> GlooGroup:
    os.environ[HOST_VARIABLE] = name
    group = group_for(dist.new_group(), torch.device("cpu"))
    assert isinstance(group, GlooGroup)
    assert isinstance(group._across, AcrossHosts)
    return group


LAYOUTS = {2 + 2: "aabb", 3: "aba", 5: "abcab"}


def _check_collectives(layout: str) -> None:
    rank, size = dist.get_rank(), len(layout)
    group = _be_on_host(layout[rank])
    for numel in (0, 1, 7, 30_000):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            pieces = [torch.arange(numel).add(r).remainder(61).to(dtype) for r in range(size)]
            outputs = [torch.empty(size * numel, dtype=dtype) for _ in range(2)]
            group.wait(*group.gather(outputs[:1], [pieces[rank]], "unit"))
            # In place, and several tensors at a time.
            own = outputs[1].view(size, -1)[rank].copy_(pieces[rank])
            more = torch.empty(size * numel, dtype=dtype)
            group.wait(*group.gather([outputs[1], more], [own, pieces[rank]], "unit"))
            for output in (*outputs, more):
                assert torch.equal(output, torch.cat(pieces)), (numel, dtype)

            fulls = [torch.arange(size * numel).add(r).remainder(7).to(dtype) for r in range(size)]
            total = torch.stack(fulls).sum(0)
            reduced = torch.empty(numel, dtype=dtype)
            finish = [group.start_reduce_scatter(reduced, fulls[rank].clone(), "unit")]
            finish[0]()
            assert torch.equal(reduced, total.view(size, -1)[rank]), (numel, dtype)

            summed = fulls[rank].clone()
            group.all_reduce(summed, "unit")
            assert torch.equal(summed, total), (numel, dtype)

            sent = pieces[rank].clone()
            group.broadcast([sent], "unit")
            assert torch.equal(sent, pieces[0]), (numel, dtype)


@ranks(4)
def test_two_hosts_of_two_ranks_get_the_results_of_one_host() -> None:
    _check_collectives("aabb")


@ranks(3)
def test_hosts_of_different_numbers_of_ranks_get_the_results_of_one_host() -> None:
    _check_collectives("aba")


@ranks(5)
def test_three_hosts_get_the_results_of_one_host() -> None:
    _check_collectives("abcab")


@ranks(4)
def test_several_operations_may_be_under_way() -> None:
    group = _be_on_host("abab"[dist.get_rank()])
    numel = 20_000
    pieces = [torch.full((numel,), float(10 * group.rank + turn)) for turn in range(4)]
    outputs = [torch.empty(4 * numel) for _ in range(4)]
    fulls = [torch.full((4 * numel,), float(group.rank + turn)) for turn in range(4)]
    sums = [torch.empty(numel) for _ in range(4)]

    gathers = [group.gather([o], [p], "unit") for o, p in zip(outputs, pieces, strict=True)]
    reduces = [group.start_reduce_scatter(s, f, "unit") for s, f in zip(sums, fulls, strict=True)]
    for started in gathers:
        group.wait(*started)
    for finish in reduces:
        finish()

    for turn in range(4):
        expected = torch.arange(4.0).mul(10).add(turn).repeat_interleave(numel)
        assert torch.equal(outputs[turn], expected)
        assert torch.equal(sums[turn], torch.full((numel,), float(6 + 4 * turn)))


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@ranks(4)
def test_training_on_two_hosts_is_that_of_the_bare_model(strategy: str) -> None:
    if device().type != "cpu":
        pytest.skip("the model is on a GPU, and this is about gloo's way with the host's memory")
    expected = train_alone(make(NestedLinears), adam)
    os.environ[HOST_VARIABLE] = "aabb"[dist.get_rank()]

    model = FullyShardedDataParallel(
        make(NestedLinears),
        dist.new_group(),
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear, nn.Sequential}),
        use_orig_params=True,
    )
    found = train(model, adam(model.parameters()))

    group = model._unit.shards
    assert isinstance(group, GlooGroup)
    assert group._across is not None
    found.assert_close(expected, strategy, tolerance=1e-9)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@ranks(4)
def test_ranks_that_run_out_of_data_follow_those_of_their_host(strategy: str) -> None:
    os.environ[HOST_VARIABLE] = "aabb"[dist.get_rank()]
    model = shard(
        "wrapper",
        build(),
        None,
        process_group=dist.new_group(),
        sharding_strategy=ShardingStrategy[strategy],
    )

    assert_uneven_batches_train_as_one_process(model, (3, 1, 0, 2))


@ranks(4)
def test_ranks_of_one_host_do_not_take_the_way_across_hosts() -> None:
    group = group_for(dist.new_group(), torch.device("cpu"))

    assert isinstance(group, GlooGroup)
    assert group._across is None
