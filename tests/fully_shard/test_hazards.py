"""What programs do to modules: recomputation, compilation, hooks, repeated runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.fully_shard.side_by_side import (
    OURS,
    THEIRS,
    both,
    build,
    by_block,
    forward_loss,
)
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate as torch_replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard.testing import device, ranks

MARK = "_is_fsdp_managed_module"


@pytest.mark.parametrize("implementation", list(CheckpointImpl))
@ranks(2)
def test_activation_checkpointing_inside_units(implementation: CheckpointImpl) -> None:
    def shard(api: Any, model: Any) -> None:
        for index, block in enumerate(model.blocks):
            wrapped = checkpoint_wrapper(block, checkpoint_impl=implementation)
            model.blocks[index] = wrapped
            api.fully_shard(wrapped)
        api.fully_shard(model)

    both(shard)


@ranks(2)
def test_activation_checkpointing_around_units() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = build()

        @property
        def blocks(self) -> Any:
            return self.model.blocks

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.model.embed(x)
            for block in self.blocks:
                hidden = checkpoint(block, hidden, use_reentrant=False)
            return self.model.head(hidden)

    both(by_block(), make=Outer)


@ranks(2)
def test_a_block_is_compiled_before_it_is_sharded() -> None:
    model: Any = build()
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
        fullshard.fully_shard(block)
    fullshard.fully_shard(model)
    plain: Any = build()
    by_block()(OURS, plain)

    for step in range(2):
        losses = []
        for each in (model, plain):
            loss = forward_loss(each, step)
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1])
        torch.testing.assert_close(
            model.head.weight.grad.to_local(), plain.head.weight.grad.to_local()
        )


@ranks(2)
def test_a_unit_that_runs_twice_reduces_its_gradients_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = build()

        @property
        def blocks(self) -> Any:
            return self.model.blocks

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.model.embed(x)
            for block in (*self.blocks, self.blocks[0]):
                hidden = block(hidden)
            return self.model.head(hidden)

    both(by_block(), make=Twice)


@ranks(2)
def test_user_hooks_see_what_torchs_show() -> None:
    def shard(api: Any, model: Any) -> None:
        by_block()(api, model)
        model.blocks[0].register_forward_hook(lambda module, args, output: output * 2)
        model.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))

    both(shard)


@ranks(2)
def test_slicing_a_sharded_container_gives_a_plain_one() -> None:
    model: Any = fullshard.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))

    assert type(model[:1]) is nn.Sequential
    assert model[:1][0] is model[0]


@ranks(2)
def test_the_fast_path_of_a_transformer_layer_passes_no_unit_by() -> None:
    outputs: list[torch.Tensor] = []
    for api in (THEIRS, OURS):
        torch.manual_seed(0)
        layer: Any = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        api.fully_shard(layer.linear1)
        api.fully_shard(layer)
        with torch.no_grad():
            outputs.append(layer.eval()(torch.ones(2, 3, 8)))

    torch.testing.assert_close(*outputs)


@ranks(2)
def test_modules_are_marked_for_others_as_torchs_are() -> None:
    """By the mark transformers knows that all ranks have to run every layer, and every step."""
    marked: list[set[str]] = []
    for api in (THEIRS, OURS):
        model: Any = build()
        api.fully_shard(model.blocks[0])
        replicated = torch_replicate if api is THEIRS else fullshard.replicate
        replicated(model.blocks[1])
        api.fully_shard(model)
        found = {n for n, m in model.named_modules() if getattr(m, MARK, False)}
        marked.append(found)
    wrapper = fullshard.FullyShardedDataParallel(build().to(device()))

    assert marked[1] == marked[0]
    assert {"", "blocks.0.up"} < marked[0]
    assert all(getattr(module, MARK) for module in wrapper.module.modules())
