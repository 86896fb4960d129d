"""Every option gives the losses and parameters of DistributedDataParallel, and of one process."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.engine.models import (
    ConvNet,
    Experts,
    NestedLinears,
    Recurrent,
    SharedTransformer,
    TiedLinears,
    Tiny,
    TrainingModel,
    WithEmptyParameters,
    make,
)
from tests.engine.parity import (
    adam,
    assert_same,
    full_parameters,
    sgd,
    train,
    train_alone,
    train_with_ddp,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    ShardingStrategy,
)
from fullshard.testing import device, ranks
from fullshard.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    size_based_auto_wrap_policy,
)

PLAIN = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
HYBRID = ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
LAYERS = ModuleWrapPolicy({nn.TransformerEncoderLayer, nn.TransformerDecoderLayer})

with_each_strategy = pytest.mark.parametrize("strategy", PLAIN)
with_both_modes = pytest.mark.parametrize("use_orig_params", [False, True])


def wrap(module: nn.Module, strategy: str = "FULL_SHARD", **options: Any) -> Any:
    return FullyShardedDataParallel(module, sharding_strategy=ShardingStrategy[strategy], **options)


@with_both_modes
@with_each_strategy
@ranks(2)
def test_prefetching_does_not_change_a_transformers_training(
    strategy: str, use_orig_params: bool
) -> None:
    expected = train_with_ddp(make(SharedTransformer))

    for backward, forward, limit in itertools.product(
        [None, *BackwardPrefetch], [False, True], [False, True]
    ):
        model = wrap(
            make(SharedTransformer),
            strategy,
            auto_wrap_policy=LAYERS,
            backward_prefetch=backward,
            forward_prefetch=forward,
            limit_all_gathers=limit,
            use_orig_params=use_orig_params,
        )
        found = train(model, sgd(model.parameters()))
        found.assert_close(expected, (backward, forward, limit))


@with_both_modes
@pytest.mark.parametrize("set_to_none", [False, True])
@ranks(2)
def test_ways_to_clear_gradients_do_not_change_training(
    set_to_none: bool, use_orig_params: bool
) -> None:
    for make_optimizer, foreach in itertools.product([sgd, adam], [False, True]):

        def optimizer_for(parameters: Any, make: Any = make_optimizer, many: bool = foreach) -> Any:
            optimizer = make(parameters)
            for group in optimizer.param_groups:
                group["foreach"] = many
            return optimizer

        expected = train_with_ddp(make(NestedLinears), optimizer_for, 4, set_to_none)
        for strategy in PLAIN:
            model = wrap(
                make(NestedLinears),
                strategy,
                auto_wrap_policy=always_wrap_policy,
                use_orig_params=use_orig_params,
            )
            found = train(model, optimizer_for(model.parameters()), 4, set_to_none)
            found.assert_close(expected, (strategy, make_optimizer.__name__, foreach))


MODELS: list[type[TrainingModel]] = [
    NestedLinears,
    TiedLinears,
    SharedTransformer,
    ConvNet,
    Experts,
    Recurrent,
    WithEmptyParameters,
    Tiny,
]


def policies_for(kind: type[TrainingModel]) -> dict[str, Any]:
    if kind is SharedTransformer:
        # Its attention computes with its output layer's weight, without calling that layer.
        return {"none": None, "layers": LAYERS}
    return {
        "none": None,
        "every module": always_wrap_policy,
        "by size": functools.partial(size_based_auto_wrap_policy, min_num_params=20),
        "linears": ModuleWrapPolicy({nn.Linear, nn.LSTM}),
        "with options": CustomPolicy(
            lambda module: (
                {"backward_prefetch": None, "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
                if isinstance(module, nn.Linear)
                else isinstance(module, nn.Sequential)
            )
        ),
    }


def _check_model(kind: type[TrainingModel], every: int) -> None:
    """Train with every combination, or with one of ``every`` of them, all options among these."""
    expected = train_alone(make(kind), steps=2)
    combinations = itertools.product([False, True], PLAIN, policies_for(kind).items())
    for use_orig_params, strategy, (name, policy) in itertools.islice(combinations, 0, None, every):
        model = wrap(make(kind), strategy, auto_wrap_policy=policy, use_orig_params=use_orig_params)
        found = train(model, sgd(model.parameters()), steps=2)
        found.assert_close(expected, (kind.__name__, name, use_orig_params, strategy))


@pytest.mark.parametrize("kind", MODELS)
@ranks(2)
def test_every_model_trains_on_two_ranks_as_in_one_process(kind: type[TrainingModel]) -> None:
    _check_model(kind, every=1)


@pytest.mark.parametrize("kind", MODELS)
@ranks(3)
def test_every_model_trains_on_three_ranks_as_in_one_process(kind: type[TrainingModel]) -> None:
    _check_model(kind, every=3)


@pytest.mark.parametrize("kind", [NestedLinears, Tiny])
@ranks(4)
def test_models_train_on_four_ranks_as_in_one_process(kind: type[TrainingModel]) -> None:
    _check_model(kind, every=3)


def pair_of_groups() -> dict[str, Any]:
    rank = dist.get_rank()
    shards = [dist.new_group(members) for members in ([0, 1], [2, 3])][rank // 2]
    copies = [dist.new_group(members) for members in ([0, 2], [1, 3])][rank % 2]
    return {"process_group": (shards, copies)}


def mesh() -> dict[str, Any]:
    return {"device_mesh": init_device_mesh(device().type, (2, 2), mesh_dim_names=("c", "s"))}


def nodes_of_two() -> dict[str, Any]:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    return {}


@with_both_modes
@pytest.mark.parametrize("groups", [pair_of_groups, mesh, nodes_of_two])
@ranks(4)
def test_hybrid_strategies_train_as_one_process(groups: Any, use_orig_params: bool) -> None:
    expected = train_alone(make(NestedLinears), adam)
    options = groups()

    for strategy, policy in itertools.product(HYBRID, [None, always_wrap_policy]):
        model = wrap(
            make(NestedLinears),
            strategy,
            auto_wrap_policy=policy,
            use_orig_params=use_orig_params,
            **options,
        )
        assert model.world_size == 2
        mine = sum(p.numel() for p in model.parameters())
        assert mine < sum(p.numel() for p in make(NestedLinears).parameters())
        found = train(model, adam(model.parameters()))
        found.assert_close(expected, (strategy, policy))


@ranks(4)
def test_groups_of_nodes_that_were_destroyed_are_made_again() -> None:
    expected = train_alone(make(NestedLinears), adam)
    options = nodes_of_two()

    for _ in range(2):
        model = wrap(make(NestedLinears), "HYBRID_SHARD", **options)
        train(model, adam(model.parameters())).assert_close(expected, "HYBRID_SHARD")
        shards, copies = model.process_group, model._inter_node_pg
        del model
        gc.collect()
        # All ranks have had the others' last messages.
        dist.barrier()
        for group in (shards, copies):
            dist.destroy_process_group(group)
        del shards, copies, group


@ranks(4)
def test_the_nodes_size_is_read_at_every_wrapping() -> None:
    sizes = []
    for size in ("2", "4"):
        os.environ["LOCAL_WORLD_SIZE"] = size
        sizes.append(wrap(make(Tiny), "HYBRID_SHARD").world_size)

    assert sizes == [2, 4]


@ranks(4)
def test_hybrid_copies_differ_in_nothing() -> None:
    options = pair_of_groups()
    model = wrap(make(NestedLinears), "HYBRID_SHARD", use_orig_params=True, **options)

    train(model, adam(model.parameters()))

    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    other = mine.clone()
    dist.broadcast(other, dist.get_rank() % 2, group=options["process_group"][1])
    assert torch.equal(mine, other)


@with_both_modes
@ranks(2)
def test_offloading_to_the_host_does_not_change_training(use_orig_params: bool) -> None:
    expected = train_with_ddp(make(SharedTransformer), adam)

    for strategy, prefetch in itertools.product(PLAIN, [None, BackwardPrefetch.BACKWARD_PRE]):
        model = wrap(
            make(SharedTransformer),
            strategy,
            auto_wrap_policy=LAYERS,
            cpu_offload=CPUOffload(offload_params=True),
            backward_prefetch=prefetch,
            use_orig_params=use_orig_params,
        )
        found = train(model, adam(model.parameters()))
        found.assert_close(expected, (strategy, prefetch))
        assert all(p.device.type == "cpu" for p in model.parameters())
        assert all(p.grad.device.type == "cpu" for p in model.parameters() if p.grad is not None)


def by_kind(module: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups with hyperparameters of their own: weights, biases, the rest."""
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": 0.1, "lr": 1e-2},
        {"params": [], "weight_decay": 0.01, "lr": 1e-3},
        {"params": []},
    ]
    for name, parameter in module.named_parameters():
        index = 0 if "weight" in name else 1 if "bias" in name else 2
        groups[index]["params"].append(parameter)
    return groups


@with_each_strategy
@ranks(2)
def test_parameter_groups_train_as_in_ddp_wherever_the_optimizer_is_built(strategy: str) -> None:
    for foreach, set_to_none in itertools.product([False, True], repeat=2):
        build = functools.partial(torch.optim.AdamW, lr=5e-3, foreach=foreach, eps=1e-6)
        plain = make(NestedLinears)
        reference = nn.parallel.DistributedDataParallel(plain)
        expected = train(reference, build(by_kind(plain)), 4, set_to_none)

        for before in (False, True):
            module = make(NestedLinears)
            optimizer = build(by_kind(module)) if before else None
            model = wrap(
                module, strategy, auto_wrap_policy=always_wrap_policy, use_orig_params=True
            )
            found = train(model, optimizer or build(by_kind(model)), 4, set_to_none)
            found.assert_close(expected, (foreach, set_to_none, before))


@with_both_modes
@ranks(2)
def test_a_model_may_be_moved_before_while_or_after_it_is_wrapped(use_orig_params: bool) -> None:
    expected = train_with_ddp(make(NestedLinears))
    host = torch.device("cpu")
    options = {"auto_wrap_policy": always_wrap_policy, "use_orig_params": use_orig_params}

    before = wrap(make(NestedLinears), **options)
    meanwhile = wrap(make(NestedLinears, place=host), device_id=device(), **options)
    after = wrap(make(NestedLinears, torch.float32, host), **options)
    after = after.to(device()).double()

    for model in (before, meanwhile):
        train(model, sgd(model.parameters())).assert_close(expected, model)
    # It lost digits on the way: float32 values, computed with in float64.
    rounded = train_with_ddp(make(NestedLinears, torch.float32).double())
    train(after, sgd(after.parameters())).assert_close(rounded, "after")


@with_both_modes
@with_each_strategy
@ranks(2)
def test_several_forwards_before_one_backward_sum_their_gradients(
    strategy: str, use_orig_params: bool
) -> None:
    for summons in (False, True):
        plain = make(SharedTransformer)
        model = wrap(
            make(SharedTransformer),
            strategy,
            auto_wrap_policy=LAYERS,
            use_orig_params=use_orig_params,
        )
        optimizers = [adam(plain.parameters()), adam(model.parameters())]
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            batches = [plain.get_input(rank, step + n) for rank in range(2) for n in (0, 10)]
            losses = [plain.get_loss(batch, plain(*batch)) for batch in batches]
            torch.stack(losses).sum().div(2).backward()

            mine = batches[2 * dist.get_rank() :][:2]
            first = plain.get_loss(mine[0], model(*mine[0]))
            if summons:
                full_parameters(model)
            second = plain.get_loss(mine[1], model(*mine[1]))
            (first + second).backward()
            for optimizer in optimizers:
                optimizer.step()

            assert_same(full_parameters(model), full_parameters(plain), (summons, step))


@with_both_modes
@with_each_strategy
@ranks(2)
def test_backwards_without_clearing_accumulate(strategy: str, use_orig_params: bool) -> None:
    plain = make(NestedLinears)
    model = wrap(
        make(NestedLinears),
        strategy,
        auto_wrap_policy=always_wrap_policy,
        use_orig_params=use_orig_params,
    )
    for step in range(3):
        for rank in range(2):
            inputs = plain.get_input(rank, step)
            plain.get_loss(inputs, plain(*inputs)).div(2).backward()
        inputs = plain.get_input(dist.get_rank(), step)
        plain.get_loss(inputs, model(*inputs)).backward()

    sgd(plain.parameters()).step()
    sgd(model.parameters()).step()

    assert_same(full_parameters(model), full_parameters(plain), strategy)


class AlikeGradients(nn.Module):
    """Autograd hands one tensor to two parameters, and one element for all of a third."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Parameter(torch.ones(3)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.first + self.second) + self.third.sum()


@ranks(1)
def test_gradients_on_a_single_rank_are_each_parameters_own() -> None:
    alone = AlikeGradients().to(device())
    model = wrap(AlikeGradients().to(device()), "NO_SHARD", use_orig_params=True)
    x = torch.arange(3.0, device=device())

    for each in alone, model:
        each(x).sum().backward()
        nn.utils.clip_grad_norm_(each.parameters(), 1.0)
        for parameter in each.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(2)
        each(x).sum().backward()

    for expected, found in zip(alone.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


@pytest.mark.parametrize("strategy", [*PLAIN[:2], *HYBRID])
@ranks(1)
def test_a_single_rank_trains_without_sharding(strategy: str) -> None:
    expected = train_alone(make(NestedLinears), adam)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        models = [
            wrap(make(NestedLinears), strategy, use_orig_params=use_orig_params)
            for use_orig_params in (False, True)
        ]

    if strategy in PLAIN:
        messages = [str(w.message) for w in caught if w.category is UserWarning]
        assert len([m for m in messages if "`NO_SHARD`" in m and "world size is 1" in m]) == 2
        assert all(m.sharding_strategy is ShardingStrategy.NO_SHARD for m in models)
    for model in models:
        train(model, adam(model.parameters())).assert_close(expected, strategy)
