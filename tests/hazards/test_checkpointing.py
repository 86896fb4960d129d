"""Activation checkpointing of both kinds: inside units, around them, with frozen parts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.original.training import (
    EITHER_API,
    EITHER_MODES,
    WIDTH,
    Block,
    Net,
    assert_same_gradients,
    average_gradients,
    blocks_policy,
    build,
    compare,
    compare_models,
    inputs,
    sharded,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from fullshard import BackwardPrefetch, ShardingStrategy
from fullshard.testing import ranks

EACH_MODE = pytest.mark.parametrize(("strategy", "use_orig_params"), EITHER_MODES)
EACH_STRATEGY = pytest.mark.parametrize("strategy", EITHER_API)
EACH_KIND = pytest.mark.parametrize("reentrant", [True, False])


class InsideBlock(Block):
    """A part of the unit's own computation is checkpointed, in two pieces."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(lambda x: torch.tanh(self.up(x)), x, use_reentrant=self.reentrant)
        out = checkpoint(self.down, hidden, use_reentrant=self.reentrant)
        return x + self.scale * out


class InsideReentrant(InsideBlock):
    reentrant = True


class Around(Net):
    """Each unit, or all of them together, in a checkpoint."""

    def __init__(self, reentrant: bool, together: bool, block: type[Block] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.reentrant, self.together = reentrant, together

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        if self.together:
            x = checkpoint(self.run_blocks, x, use_reentrant=self.reentrant)
        else:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def policy(module: nn.Module, recurse: bool, **_: Any) -> bool:
    return recurse or isinstance(module, Block)


@EACH_MODE
@EACH_KIND
@ranks(2)
def test_checkpoints_inside_a_unit(
    reentrant: bool, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    class Inside(Net):
        def __init__(self) -> None:
            super().__init__()
            kind = InsideReentrant if reentrant else InsideBlock
            self.blocks = nn.ModuleList(kind() for _ in range(3))

    compare(
        Inside,
        sharding_strategy=strategy,
        auto_wrap_policy=policy,
        use_orig_params=use_orig_params,
    )


@EACH_MODE
@EACH_KIND
@pytest.mark.parametrize("together", [False, True])
@ranks(2)
def test_checkpoints_around_units(
    together: bool, reentrant: bool, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    compare(
        lambda: Around(reentrant, together),
        sharding_strategy=strategy,
        auto_wrap_policy=policy,
        use_orig_params=use_orig_params,
    )


@EACH_STRATEGY
@pytest.mark.parametrize("prefetch", [None, BackwardPrefetch.BACKWARD_POST])
@ranks(2)
def test_checkpoints_around_checkpoints(
    prefetch: BackwardPrefetch | None, strategy: ShardingStrategy
) -> None:
    compare(
        lambda: Around(reentrant=False, together=True, block=InsideBlock),
        sharding_strategy=strategy,
        auto_wrap_policy=policy,
        backward_prefetch=prefetch,
    )


@EACH_MODE
@EACH_KIND
@pytest.mark.parametrize("outside", [False, True])
@ranks(2)
def test_checkpoint_wrappers_inside_and_outside_of_units(
    outside: bool, reentrant: bool, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    impl = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    reference, bare = build(Net), build(Net)
    if outside:
        bare.blocks = nn.ModuleList(
            checkpoint_wrapper(sharded(block, **options), checkpoint_impl=impl)
            for block in bare.blocks
        )
    else:
        bare.blocks = nn.ModuleList(
            sharded(checkpoint_wrapper(block, checkpoint_impl=impl), **options)
            for block in bare.blocks
        )
    model = sharded(bare, **options)
    assert [n for n, _ in model.named_buffers()] == []
    compare_models(reference, model)


@EACH_STRATEGY
@ranks(2)
def test_checkpointing_applied_after_wrapping(strategy: ShardingStrategy) -> None:
    reference = build(Net)
    model = sharded(
        build(Net),
        sharding_strategy=strategy,
        auto_wrap_policy=blocks_policy(),
        use_orig_params=True,
    )
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    compare_models(reference, model)


@EACH_STRATEGY
@EACH_KIND
@pytest.mark.parametrize("frozen", ["up", "blocks.1", "blocks.0"])
@ranks(2)
def test_checkpointed_units_with_frozen_parts(
    frozen: str, reentrant: bool, strategy: ShardingStrategy
) -> None:
    def make() -> nn.Module:
        model = Around(reentrant, together=False)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen not in name)
        return model

    compare(make, sharding_strategy=strategy, auto_wrap_policy=policy)


@EACH_STRATEGY
@EACH_KIND
@ranks(2)
def test_checkpointed_parts_of_a_unit_with_frozen_parts(
    reentrant: bool, strategy: ShardingStrategy
) -> None:
    def make() -> nn.Module:
        kind = InsideReentrant if reentrant else InsideBlock
        model = Net()
        model.blocks = nn.ModuleList(kind() for _ in range(3))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("up" not in name)
        return model

    compare(make, sharding_strategy=strategy, auto_wrap_policy=policy)


@EACH_STRATEGY
@EACH_KIND
@ranks(2)
def test_a_sequence_of_checkpointed_segments(reentrant: bool, strategy: ShardingStrategy) -> None:
    class Segments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(5, WIDTH)
            self.blocks = nn.Sequential(*(Block() for _ in range(4)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint_sequential(self.blocks, 2, self.embed(x), use_reentrant=reentrant)

    compare(Segments, sharding_strategy=strategy, auto_wrap_policy=policy)


@EACH_STRATEGY
@EACH_KIND
@ranks(2)
def test_one_unit_under_two_checkpoints_in_one_step(
    reentrant: bool, strategy: ShardingStrategy
) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(5, WIDTH)
            self.block = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for _ in range(2):
                x = checkpoint(self.block, x, use_reentrant=reentrant)
            return self.block(x)

    compare(Twice, sharding_strategy=strategy, auto_wrap_policy=policy)


@EACH_STRATEGY
@EACH_KIND
@ranks(2)
def test_a_forward_of_frozen_parameters_between_a_forward_and_its_backward(
    reentrant: bool, strategy: ShardingStrategy
) -> None:
    """As of a discriminator that is trained, and then judges for a generator."""
    kind = InsideReentrant if reentrant else InsideBlock
    bare = build(lambda: nn.Sequential(nn.Linear(5, WIDTH), kind(), kind()))
    model = sharded(
        copy.deepcopy(bare),
        sharding_strategy=strategy,
        auto_wrap_policy=policy,
        use_orig_params=True,
    )

    for step in range(2):
        for each in (bare, model):
            parameters = list(each.parameters())
            loss = each(inputs(step)).square().sum()
            for parameter in parameters:
                parameter.requires_grad_(False)
            each(inputs(step + 10).requires_grad_()).sum()
            for parameter in parameters:
                parameter.requires_grad_(True)
            loss.backward()
        average_gradients(bare)
        assert_same_gradients(bare, model)
        for each in (bare, model):
            each.zero_grad()


@EACH_STRATEGY
@ranks(2)
def test_selective_checkpointing(strategy: ShardingStrategy) -> None:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def contexts() -> Any:
        def choose(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            keep = op is torch.ops.aten.addmm.default
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(choose)

    class Selective(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for block in self.blocks:
                run: Callable[..., Any] = block
                x = checkpoint(run, x, use_reentrant=False, context_fn=contexts)
            return self.head(x)

    compare(Selective, sharding_strategy=strategy, auto_wrap_policy=policy)


class DetachedScale(nn.Module):
    """Its input goes on beside a part that is computed from it without a way back."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.shift = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.scale * torch.tanh(self.shift(x.detach()))
        y: torch.Tensor = checkpoint(self.inner, x, use_reentrant=True)
        return y


@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_parameters_used_with_detached_inputs_come_after_the_inputs_gradients(
    use_orig_params: bool,
) -> None:
    bare = build(lambda: DetachedScale(nn.Linear(WIDTH, WIDTH)))
    wrapped = copy.deepcopy(bare)
    wrapped.inner = sharded(wrapped.inner, use_orig_params=use_orig_params)
    model = sharded(wrapped, use_orig_params=use_orig_params)

    for step in range(3):
        expected, found = (inputs(step, 4, WIDTH).requires_grad_() for _ in range(2))
        losses = [bare(expected).square().sum(), model(found).square().sum()]
        torch.testing.assert_close(losses[1], losses[0])
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(found.grad, expected.grad)
        average_gradients(bare)
        if use_orig_params:
            assert_same_gradients(bare, model)
        for each in (bare, model):
            each.zero_grad()
