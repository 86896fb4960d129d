"""Activations that are checkpointed by torch's wrappers, or wait on the host, around units too."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.original.training import (
    EITHER_MODES,
    Block,
    Net,
    blocks_policy,
    build,
    compare_models,
    sharded,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)

from fullshard import BackwardPrefetch, ShardingStrategy
from fullshard.testing import device, ranks

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "offload": offload_wrapper,
    "reentrant": functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
    "not reentrant": checkpoint_wrapper,
    "offloaded checkpoint": lambda module: offload_wrapper(checkpoint_wrapper(module)),
    "checkpointed offload": lambda module: checkpoint_wrapper(offload_wrapper(module)),
}

EACH_MODE = pytest.mark.parametrize(("strategy", "use_orig_params"), EITHER_MODES)
EACH_WRAPPER = pytest.mark.parametrize("wrapper", WRAPPERS)


def shard(module: nn.Module, strategy: ShardingStrategy, use_orig_params: bool, **more: Any) -> Any:
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params, **more}
    return sharded(module, **options)


@EACH_MODE
@EACH_WRAPPER
@ranks(2)
def test_wrappers_inside_of_units_train_as_the_bare_model(
    wrapper: str, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    bare = build(Net)
    model = copy.deepcopy(bare)
    for index, block in enumerate(model.blocks):
        inside = WRAPPERS[wrapper](block)
        model.blocks[index] = shard(inside, strategy, use_orig_params)

    compare_models(bare, shard(model, strategy, use_orig_params))


@EACH_MODE
@EACH_WRAPPER
@ranks(2)
def test_wrappers_around_units_train_as_the_bare_model(
    wrapper: str, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    bare = build(Net)
    model = copy.deepcopy(bare)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = WRAPPERS[wrapper](shard(block, strategy, use_orig_params))

    compare_models(bare, shard(model, strategy, use_orig_params))


@EACH_WRAPPER
@ranks(2)
def test_wrappers_applied_to_a_sharded_model_train_as_the_bare_model(wrapper: str) -> None:
    bare = build(Net)
    model = sharded(copy.deepcopy(bare), auto_wrap_policy=blocks_policy(), use_orig_params=True)

    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=WRAPPERS[wrapper],
        check_fn=lambda module: isinstance(module, Block),
    )

    compare_models(bare, model)
    assert list(dict(model.named_parameters())) == list(dict(bare.named_parameters()))


@pytest.mark.parametrize("prefetch", [None, BackwardPrefetch.BACKWARD_PRE])
@EACH_MODE
@ranks(2)
def test_a_step_whose_saved_tensors_wait_on_the_host_is_the_bare_models(
    strategy: ShardingStrategy, use_orig_params: bool, prefetch: BackwardPrefetch | None
) -> None:
    def step(model: nn.Module, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(4, 5, generator=generator).to(device())
        with torch.autograd.graph.save_on_cpu(pin_memory=device().type == "cuda"):
            loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    bare = build(Net)
    options = {"auto_wrap_policy": blocks_policy(), "backward_prefetch": prefetch}
    model = shard(copy.deepcopy(bare), strategy, use_orig_params, **options)

    compare_models(bare, model, step)
