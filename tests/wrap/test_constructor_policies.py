"""Every policy through the real constructor, and wrapping by hand with the real class."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.engine.models import SharedTransformer, make
from tests.engine.parity import assert_same, full_parameters
from tests.wrap.wrapped import RankAndSize, linears, size_based, unit_paths
from torch import nn
from torch.nn import TransformerDecoderLayer, TransformerEncoderLayer
from torch.nn.modules.batchnorm import _BatchNorm

from fullshard import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.testing import device, ranks
from fullshard.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    _or_policy,
    _wrap_module_cls_individually,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

# -- a model that has units already -------------------------------------------------------------


class Chain(nn.Module):
    """Three units in a row; the first may lie one level deeper."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        first = [self.linear(), FSDP(self.linear())]
        self.lin1 = nn.Sequential(*first) if nested else first[1]
        self.lin2, self.lin3 = FSDP(self.linear()), FSDP(self.linear())

    @staticmethod
    def linear() -> nn.Module:
        return nn.Linear(1, 1, bias=False).to(device())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin3(self.lin2(self.lin1(x)))


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("moved_after", [True, False])
@ranks(2)
def test_a_policy_refuses_a_model_with_units_and_names_the_first(
    moved_after: bool, nested: bool
) -> None:
    model = Chain(nested)
    if moved_after:
        model.to(device())
    path = "lin1.1" if nested else "lin1"
    with pytest.raises(
        ValueError,
        match="FSDP auto wrapping requires modules to not already have FSDP applied but found "
        f"{path} in",
    ):
        FSDP(model, auto_wrap_policy=size_based_auto_wrap_policy)
    # By hand it may be wrapped, and it is as before.
    assert torch.isfinite(FSDP(model)(torch.ones(2, 1, device=device()))).all()


# -- batch norms --------------------------------------------------------------------------------


class BatchNormNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(10, 10, bias=False)
        self.bn1 = nn.BatchNorm1d(10)
        self.bn2 = nn.BatchNorm2d(10)
        self.bn3 = nn.BatchNorm3d(10)
        self.sync_bn = nn.SyncBatchNorm(10)


NORMS = ["bn1", "bn2", "bn3", "sync_bn"]
INDIVIDUALLY = functools.partial(_wrap_module_cls_individually, module_classes=[_BatchNorm])


def never(*args: Any, **kwargs: Any) -> bool:
    return False


@pytest.mark.parametrize("use_or_policy", [True, False])
@ranks(2)
def test_batch_norms_are_wrapped_individually(use_or_policy: bool) -> None:
    policy = functools.partial(_or_policy, policies=[never, INDIVIDUALLY])
    model = FSDP(BatchNormNet(), auto_wrap_policy=policy if use_or_policy else INDIVIDUALLY)
    assert unit_paths(model) == NORMS
    assert isinstance(model.lin, nn.Linear)


@ranks(2)
def test_batch_norms_are_wrapped_individually_inside_a_unit_too() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn_container = BatchNormNet()

    def container(module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        return recurse or isinstance(module, BatchNormNet)

    both = functools.partial(_or_policy, policies=[container, INDIVIDUALLY])
    assert unit_paths(FSDP(Outer(), auto_wrap_policy=both)) == [
        "bn_container",
        *(f"bn_container.{name}" for name in NORMS),
    ]
    assert unit_paths(FSDP(Outer(), auto_wrap_policy=container)) == ["bn_container"]


# -- the size of things -------------------------------------------------------------------------


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nested_lin = nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.nested_lin(x)


class FourDeep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin1, self.lin2, self.lin3 = (nn.Linear(1, 1, bias=False) for _ in range(3))
        self.lin4 = Nested()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin4(self.lin3(self.lin2(self.lin1(x))))


#: When the model is moved, and whether it rests on the host: then it is not moved afterwards.
MOVES = [("before", False), ("after", False), ("before", True)]


@pytest.mark.parametrize(("moved", "offload"), MOVES)
@pytest.mark.parametrize("forward_prefetch", [False, True])
@pytest.mark.parametrize("prefetch", list(BackwardPrefetch))
@ranks(2)
def test_options_reach_every_unit_in_order_and_the_model_trains(
    offload: bool, prefetch: BackwardPrefetch, forward_prefetch: bool, moved: str
) -> None:
    model = FSDP(
        FourDeep().to(device()) if moved == "before" else FourDeep(),
        auto_wrap_policy=size_based(0),
        cpu_offload=CPUOffload(offload),
        backward_prefetch=prefetch,
        forward_prefetch=forward_prefetch,
    )
    if moved == "after":
        model = model.to(device())
    inner = model.module.lin4
    order = [model.lin1, model.lin2, model.lin3, inner.module.nested_lin, inner, model]
    for unit in order:
        assert isinstance(unit, FSDP)
        assert unit.cpu_offload == CPUOffload(offload)
        assert unit.backward_prefetch is prefetch
        assert unit.forward_prefetch is forward_prefetch
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.ones(1, device=device())).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("size", [1, 2])
def test_modules_too_small_alone_are_wrapped_together(size: int) -> None:
    model = FSDP(linears(), RankAndSize(0, size), auto_wrap_policy=size_based(40))
    assert unit_paths(model) == ["2"]


def test_lists_are_not_wrapped_but_what_is_in_them_may_be() -> None:
    small = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
    large = nn.ModuleDict({"a": nn.Linear(10, 10), "b": nn.ModuleList([nn.Linear(10, 10)])})
    policy = size_based(40)
    assert unit_paths(FSDP(small, RankAndSize(), auto_wrap_policy=policy)) == []
    model = FSDP(large, RankAndSize(), auto_wrap_policy=policy)
    assert unit_paths(model) == ["a", "b.0"]
    assert isinstance(model["a"], FSDP)


def test_attention_is_a_forced_leaf_and_other_classes_can_be_made_so() -> None:
    attention = nn.Sequential(nn.Linear(10, 10), nn.MultiheadAttention(100, 1))
    model = FSDP(attention, RankAndSize(), auto_wrap_policy=size_based(40))
    assert unit_paths(model) == ["0"]
    assert isinstance(model[1].out_proj, nn.Linear)

    leaves = size_based_auto_wrap_policy.FORCE_LEAF_MODULES | {nn.Linear}  # type: ignore[attr-defined]
    module = nn.Sequential(nn.Linear(10, 10), nn.ModuleList([nn.Linear(10, 10)]))
    policy = size_based(40, force_leaf_modules=leaves)
    assert unit_paths(FSDP(module, RankAndSize(), auto_wrap_policy=policy)) == []


def test_other_classes_can_be_excluded_and_their_children_are_not() -> None:
    module = nn.Sequential(nn.Sequential(nn.Linear(10, 10), nn.Linear(2, 2)), nn.Linear(10, 10))
    policy = size_based(40, exclude_wrap_modules={nn.Sequential})
    assert unit_paths(FSDP(module, RankAndSize(), auto_wrap_policy=policy)) == ["0.0", "1"]


@pytest.mark.parametrize("use_device_id", [True, False])
@pytest.mark.parametrize(("moved", "offload"), MOVES)
@pytest.mark.parametrize("size", [1, 2])
def test_a_model_wrapped_by_size_trains_wherever_it_was_moved(
    size: int, moved: str, offload: bool, use_device_id: bool
) -> None:
    @ranks(size)
    def body() -> None:
        model = FSDP(
            linears().to(device()) if moved == "before" else linears(),
            cpu_offload=CPUOffload(offload),
            auto_wrap_policy=size_based(40),
            device_id=device() if use_device_id else None,
        )
        assert unit_paths(model) == ["2"]
        if moved == "after":
            model = model.to(device())
        assert model.compute_device == device()
        data = torch.rand(1, 5, device=device())
        nn.functional.mse_loss(data, model(data)).backward()
        gradients = [p.grad for p in model.parameters()]
        assert len(gradients) == 2
        assert all(g is not None and torch.isfinite(g).all() for g in gradients)

    body()


# -- classes and functions ----------------------------------------------------------------------

LAYERS = {TransformerEncoderLayer, TransformerDecoderLayer}
LAYER_PATHS = ["transformer.encoder.layers.0", "transformer.decoder.layers.0"]
LAYER_POLICIES = {
    "transformer": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=LAYERS),
    "object": ModuleWrapPolicy(LAYERS),
    "object as function": functools.partial(_or_policy, policies=[ModuleWrapPolicy(LAYERS)]),
    "lambda": functools.partial(
        lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, tuple(LAYERS))
    ),
    "custom": CustomPolicy(lambda m: isinstance(m, tuple(LAYERS))),
}


@pytest.mark.parametrize("kind", LAYER_POLICIES)
@ranks(2)
def test_policies_that_name_the_layers_wrap_them_and_train_as_the_bare_model(kind: str) -> None:
    bare = make(SharedTransformer, norm=False)
    model: Any = FSDP(make(SharedTransformer, norm=False), auto_wrap_policy=LAYER_POLICIES[kind])
    assert unit_paths(model) == LAYER_PATHS
    batches = [bare.get_input(rank) for rank in range(2)]
    losses = [bare.get_loss(batch, bare(*batch)) for batch in batches]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (bare, model)]
    torch.stack(losses).mean().backward()
    mine = batches[dist.get_rank()]
    bare.get_loss(mine, model(*mine)).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert_same(full_parameters(model), full_parameters(bare), kind)


@ranks(2)
def test_always_wrapping_wraps_everything() -> None:
    model = FSDP(linears(), auto_wrap_policy=always_wrap_policy)
    assert unit_paths(model) == ["0", "1", "2", "2.0", "2.1"]


@pytest.mark.parametrize("uniform", [True, False])
@ranks(2)
def test_a_custom_policy_may_give_arguments_to_single_modules(uniform: bool) -> None:
    low = MixedPrecision(param_dtype=torch.bfloat16)
    full = MixedPrecision()

    def pick(module: nn.Module) -> bool | dict[str, Any]:
        if isinstance(module, nn.MultiheadAttention):
            return False if uniform else {"mixed_precision": full}
        if isinstance(module, nn.TransformerDecoder):
            return uniform or {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
        return isinstance(module, tuple(LAYERS))

    module = make(SharedTransformer, torch.float32, norm=False)
    model: Any = FSDP(module, auto_wrap_policy=CustomPolicy(pick), mixed_precision=low)
    units = {m.module: m for m in FSDP.fsdp_modules(model) if m is not model}
    assert len(units) == (3 if uniform else 6)
    for inner, unit in units.items():
        exempt = isinstance(inner, nn.MultiheadAttention)
        keeps = isinstance(inner, nn.TransformerDecoder) and not uniform
        assert unit.mixed_precision == (full if exempt else low)
        strategy = ShardingStrategy.SHARD_GRAD_OP if keeps else ShardingStrategy.FULL_SHARD
        assert unit.sharding_strategy is strategy


@ranks(2)
def test_units_with_arguments_of_their_own_train() -> None:
    def pick(module: nn.Module) -> bool | dict[str, Any]:
        if isinstance(module, nn.Linear) and module.bias is None:
            precision = MixedPrecision(param_dtype=torch.float32, cast_forward_inputs=True)
            return {"mixed_precision": precision}
        if isinstance(module, nn.LayerNorm):
            return {"sharding_strategy": ShardingStrategy.NO_SHARD, "forward_prefetch": True}
        return isinstance(module, nn.Linear)

    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 6, bias=False), nn.Flatten()
    ).to(device())
    low = MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    model = FSDP(module, auto_wrap_policy=CustomPolicy(pick), mixed_precision=low)
    seen: list[torch.dtype] = []
    model[2].module.register_forward_pre_hook(lambda m, _: seen.append(m.weight.dtype))
    model[0].module.register_forward_pre_hook(lambda m, _: seen.append(m.weight.dtype))
    output = model(torch.randn(3, 5, device=device()))
    output.square().mean().backward()
    assert seen == [torch.bfloat16, torch.float32]
    assert output.dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


# -- by hand ------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_wrapped_layer_knows_its_rank_and_the_number_of_ranks(by_hand: bool) -> None:
    group = RankAndSize(1, 2)
    if by_hand:
        with enable_wrap(wrapper_cls=FSDP, process_group=group):
            layer = wrap(nn.Linear(5, 5))
    else:
        layer = FSDP(nn.Linear(5, 5), process_group=group, auto_wrap_policy=size_based(1))
    assert isinstance(layer, FSDP)
    assert (layer.rank, layer.world_size) == (1, 2)


def test_outside_of_the_context_nothing_is_wrapped() -> None:
    group = RankAndSize()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = wrap(nn.Linear(5, 5), process_group=group)

    model = Model()
    with enable_wrap(wrapper_cls=FSDP, process_group=group):
        wrapped = wrap(model)
    assert isinstance(wrapped, FSDP)
    assert isinstance(wrapped.lin, nn.Linear)


def test_arguments_of_the_call_override_those_of_the_context() -> None:
    other = RankAndSize(0, 2)
    with enable_wrap(wrapper_cls=FSDP, process_group=RankAndSize(0, 4), forward_prefetch=True):
        layer = wrap(nn.Linear(5, 5), process_group=other)
    assert layer.process_group is other
    assert (layer.rank, layer.world_size, layer.forward_prefetch) == (0, 2, True)
