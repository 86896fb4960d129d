"""LoRA as people write it: adapters inside frozen linears, one unit per block, no special care."""

from __future__ import annotations

import pytest
import torch
from tests.original.training import STRATEGIES, build, compare, compare_models, inputs
from torch import nn

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy
from fullshard.testing import ranks
from fullshard.wrap import ModuleWrapPolicy


class LoraLinear(nn.Module):
    """A frozen base with two small trainable matrices beside it."""

    def __init__(self, width: int, base_dtype: torch.dtype, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).to(base_dtype).requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, width) / width)
        self.lora_b = nn.Parameter(torch.randn(width, rank) / rank)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = self.base(x.to(self.base.weight.dtype)).to(x.dtype)
        return base + (x @ self.lora_a.T) @ self.lora_b.T


class LoraBlock(nn.Module):
    def __init__(self, width: int, base_dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width).requires_grad_(False)
        self.first = LoraLinear(width, base_dtype)
        self.second = LoraLinear(width, base_dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(self.norm(x))))


class LoraNet(nn.Module):
    def __init__(self, base_dtype: torch.dtype = torch.float32, width: int = 9) -> None:
        super().__init__()
        self.embed = nn.Linear(5, width).requires_grad_(False)
        self.blocks = nn.ModuleList(LoraBlock(width, base_dtype) for _ in range(3))
        self.head = nn.Linear(width, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def per_block() -> ModuleWrapPolicy:
    return ModuleWrapPolicy({LoraBlock})


@pytest.mark.parametrize("base_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_lora_trains_with_one_policy_per_block(
    strategy: ShardingStrategy, base_dtype: torch.dtype
) -> None:
    model = compare(
        lambda: LoraNet(base_dtype), sharding_strategy=strategy, auto_wrap_policy=per_block()
    )
    dtypes = {n: p.dtype for n, p in model.named_parameters()}
    assert dtypes["blocks.0.first.base.weight"] == base_dtype
    assert dtypes["blocks.0.first.lora_a"] == torch.float32


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_frozen_parts_get_no_gradient_and_stay_bit_for_bit(strategy: ShardingStrategy) -> None:
    before = dict(build(lambda: LoraNet(torch.bfloat16)).named_parameters())
    model = compare(
        lambda: LoraNet(torch.bfloat16), sharding_strategy=strategy, auto_wrap_policy=per_block()
    )
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("lora" in name)
        if "lora" not in name:
            assert parameter.grad is None
    with FSDP.summon_full_params(model):
        for name, parameter in model.named_parameters():
            changed = not torch.equal(parameter.detach(), before[name].detach())
            assert changed == ("lora" in name), name


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_gradients_and_optimizer_state_have_the_size_of_the_trainable_part(
    strategy: ShardingStrategy,
) -> None:
    model = FSDP(
        build(LoraNet),
        sharding_strategy=strategy,
        auto_wrap_policy=per_block(),
        use_orig_params=True,
    )
    optimizer = torch.optim.Adam(p for p in model.parameters() if p.requires_grad)
    model(inputs(0)).square().mean().backward()
    optimizer.step()
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    storages = {
        p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage().nbytes()
        for p in model.parameters()
        if p.grad is not None
    }
    alignment = sum(16 * len(list(w.parameters())) for w in FSDP.fsdp_modules(model))
    assert sum(storages.values()) <= 4 * trainable + alignment
    moments = sum(s["exp_avg"].numel() for s in optimizer.state.values())
    assert moments == sum(p.numel() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_frozen_parameters_are_not_reduced(strategy: ShardingStrategy) -> None:
    model = FSDP(
        build(LoraNet),
        sharding_strategy=strategy,
        auto_wrap_policy=per_block(),
        use_orig_params=True,
    )
    for wrapper in FSDP.fsdp_modules(model):
        for handle in wrapper._unit.handles:
            assert len(set(handle.trainable)) == 1
    model(inputs(0)).square().mean().backward()
    # Only the groups with trainable parameters ever made a reduce buffer.
    for wrapper in FSDP.fsdp_modules(model):
        for handle in wrapper._unit.handles:
            reduces = handle.is_sharded and any(handle.trainable)
            assert bool(handle.reduce_buffers) == reduces


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_adapters_added_to_a_pretrained_model_and_unfrozen_later(
    strategy: ShardingStrategy,
) -> None:
    reference = build(LoraNet)
    model = FSDP(
        build(LoraNet),
        sharding_strategy=strategy,
        auto_wrap_policy=per_block(),
        use_orig_params=True,
    )
    compare_models(reference, model)
    for each in (reference, model):
        for name, parameter in each.named_parameters():
            if "norm" in name or "head" in name:
                parameter.requires_grad_(True)
    compare_models(reference, model, first_step=3)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("wrap_linears", [True, False])
@ranks(2)
def test_the_first_blocks_input_needs_no_gradient_and_everything_below_is_frozen(
    wrap_linears: bool, strategy: ShardingStrategy
) -> None:
    """Frozen units at both ends: one has no gradient to wait for, the other only passes it on."""
    policy = ModuleWrapPolicy({LoraBlock, nn.Linear} if wrap_linears else {nn.Linear})
    compare(LoraNet, sharding_strategy=strategy, auto_wrap_policy=policy)


@ranks(2)
def test_checkpointed_lora_blocks_train_as_unsharded_ones_do() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(LoraNet):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for index, block in enumerate(self.blocks):
                x = checkpoint(block, x, use_reentrant=False) if index else block(x)
            return self.head(x)

    for strategy in STRATEGIES:
        compare(Checkpointed, sharding_strategy=strategy, auto_wrap_policy=per_block())
