"""Training over collectives that are complete only when somebody has waited for them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.engine.late_group import LateGroup
from tests.engine.models import Experts, NestedLinears, SharedTransformer, TrainingModel, make
from tests.engine.parity import adam, full_parameters, sgd, train, train_alone
from torch import nn

from fullshard import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from fullshard.testing import ranks
from fullshard.wrap import ModuleWrapPolicy

UNITS = ModuleWrapPolicy({nn.Linear, nn.Sequential})
LAYERS = ModuleWrapPolicy({nn.TransformerEncoderLayer, nn.TransformerDecoderLayer})

with_both_modes = pytest.mark.parametrize("use_orig_params", [False, True])


def wrap(module: nn.Module, group: Any, strategy: str = "FULL_SHARD", **options: Any) -> Any:
    policy = LAYERS if isinstance(module, SharedTransformer) else UNITS
    return FullyShardedDataParallel(
        module,
        group,
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=policy,
        **options,
    )


@with_both_modes
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@ranks(2)
def test_a_training_waits_for_what_it_uses(strategy: str, use_orig_params: bool) -> None:
    group = LateGroup()
    expected = train_alone(make(NestedLinears), steps=2)
    for backward, forward, limit in itertools.product(
        [None, *BackwardPrefetch], [False, True], [False, True]
    ):
        options: dict[str, Any] = {
            "backward_prefetch": backward,
            "forward_prefetch": forward,
            "limit_all_gathers": limit,
            "use_orig_params": use_orig_params,
        }
        model = wrap(make(NestedLinears), group, strategy, **options)
        found = train(model, sgd(model.parameters()), steps=2)
        found.assert_close(expected, options)
    group.assert_nothing_sent_was_changed()


@with_both_modes
@ranks(2)
def test_a_transformer_waits_for_what_it_uses(use_orig_params: bool) -> None:
    group = LateGroup()
    expected = train_alone(make(SharedTransformer), steps=2)

    model = wrap(make(SharedTransformer), group, use_orig_params=use_orig_params)
    found = train(model, sgd(model.parameters()), steps=2)

    found.assert_close(expected, "a transformer")
    group.assert_nothing_sent_was_changed()


@with_both_modes
@pytest.mark.parametrize("kind", [NestedLinears, Experts])
@ranks(2)
def test_gradients_that_are_kept_are_added_to(
    kind: type[TrainingModel], use_orig_params: bool
) -> None:
    group = LateGroup()
    expected = train_alone(make(kind), adam, set_to_none=False)
    for strategy, offload in itertools.product(["FULL_SHARD", "SHARD_GRAD_OP"], [False, True]):
        model = wrap(
            make(kind),
            group,
            strategy,
            use_orig_params=use_orig_params,
            cpu_offload=CPUOffload(offload),
        )
        found = train(model, adam(model.parameters()), set_to_none=False)
        found.assert_close(expected, (strategy, offload))
    group.assert_nothing_sent_was_changed()


@with_both_modes
@ranks(2)
def test_low_precision_gives_what_it_gives_over_gloo(use_orig_params: bool) -> None:
    late = LateGroup()
    for reduce in (torch.float32, torch.bfloat16, torch.float16):
        precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduce)
        expected, found = (
            train(model, sgd(model.parameters()))
            for model in (
                wrap(
                    make(NestedLinears, torch.float32),
                    group,
                    mixed_precision=precision,
                    use_orig_params=use_orig_params,
                )
                for group in (dist.group.WORLD, late)
            )
        )
        found.assert_close(expected, reduce)
    late.assert_nothing_sent_was_changed()


@with_both_modes
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@ranks(4)
def test_hybrid_strategies_wait_for_both_sums(strategy: str, use_orig_params: bool) -> None:
    rank = dist.get_rank()
    shards = [dist.new_group(members) for members in ([0, 1], [2, 3])][rank // 2]
    copies = [dist.new_group(members) for members in ([0, 2], [1, 3])][rank % 2]
    groups = (LateGroup(shards), LateGroup(copies))
    expected = train_alone(make(NestedLinears), adam)

    model = wrap(make(NestedLinears), groups, strategy, use_orig_params=use_orig_params)
    found = train(model, adam(model.parameters()))

    found.assert_close(expected, strategy)
    for group in groups:
        group.assert_nothing_sent_was_changed()


@with_both_modes
@ranks(2)
def test_a_backward_that_broke_off_while_gradients_were_on_their_way_leaves_nothing(
    use_orig_params: bool,
) -> None:
    group = LateGroup()
    expected = train_alone(make(NestedLinears))
    model = wrap(make(NestedLinears), group, use_orig_params=use_orig_params)
    optimizer = sgd(model.parameters())
    first = next(m for m in model.modules() if isinstance(m, nn.Linear))

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("on purpose")

    before = full_parameters(model)
    hook = first.register_full_backward_hook(fail)
    inputs = model.module.get_input(dist.get_rank(), 0)
    with pytest.raises(ZeroDivisionError):
        model.module.get_loss(inputs, model(*inputs)).backward()
    hook.remove()
    optimizer.zero_grad()
    for name, parameter in full_parameters(model).items():
        torch.testing.assert_close(parameter, before[name], rtol=0, atol=0)

    train(model, optimizer).assert_close(expected, "after a failure")
    group.assert_nothing_sent_was_changed()
