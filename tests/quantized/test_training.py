"""Adapters beside sharded quantised weights train as beside whole ones, bit for bit."""

from __future__ import annotations

import copy
import importlib
import pickle
from typing import Any

import pytest
import torch
from tests.quantized.models import (
    LINEARS,
    assert_same_bytes,
    batch,
    bnb,
    both_ways,
    build,
    kinds,
    needs_torchao,
    shard,
    train,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.testing import device, ranks


def assert_trains_alike(bare: nn.Module, model: nn.Module) -> None:
    expected = train(bare)
    # Adapters learn: no loss is zero, and none is the one before.
    assert all(expected)
    assert len(set(expected)) == len(expected)
    assert train(model) == expected
    assert torch.equal(model(batch(7)), bare(batch(7)))


@kinds()
@both_ways
@ranks(2)
def test_adapters_train_bit_for_bit_as_in_one_process(how: str, kind: str) -> None:
    assert_trains_alike(build(kind), shard(build(kind), how))


@pytest.mark.parametrize("strategy", [ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD])
@kinds("nf4", "int8", "torchao int8")
@ranks(2)
def test_under_other_strategies(strategy: ShardingStrategy, kind: str) -> None:
    assert_trains_alike(build(kind), shard(build(kind), "wrapper", sharding_strategy=strategy))


@kinds("nf4", "int8", "torchao int8")
@both_ways
@ranks(1)
@pytest.mark.filterwarnings("ignore")
def test_on_one_rank(how: str, kind: str) -> None:
    assert_trains_alike(build(kind), shard(build(kind), how))


@kinds("nf4", "int8", "torchao int8")
@ranks(4)
def test_copies_of_shards(kind: str) -> None:
    strategy = ShardingStrategy.HYBRID_SHARD
    mesh = torch.distributed.init_device_mesh(device().type, (2, 2))
    model = shard(build(kind), "wrapper", sharding_strategy=strategy, device_mesh=mesh)
    assert_trains_alike(build(kind), model)


@kinds("nf4", "int8", "torchao int8")
@ranks(4)
def test_a_forward_that_reshards_to_two_of_four_ranks(kind: str) -> None:
    model = shard(build(kind), "fully_shard", reshard_after_forward=2)
    assert_trains_alike(build(kind), model)


@pytest.mark.parametrize("use_reentrant", [True, False])
@kinds("nf4", "int8", "torchao int8")
@ranks(2)
def test_under_activation_checkpointing(kind: str, use_reentrant: bool) -> None:
    def forward(model: Any) -> Any:
        def run(x: torch.Tensor) -> torch.Tensor:
            for block in model:
                x = checkpoint(block, x, use_reentrant=use_reentrant)
            return x

        return lambda x: run(x.requires_grad_())

    bare, model = build(kind), shard(build(kind), "fully_shard")
    assert train(model, forward=forward(model)) == train(bare, forward=forward(bare))


@kinds("nf4", "nf4 in bfloat16", "int8", "torchao int8")
@both_ways
@ranks(2)
def test_mixed_precision_casts_adapters_and_no_packed_elements(how: str, kind: str) -> None:
    low = torch.bfloat16
    bare = build(kind)
    for name, parameter in bare.named_parameters():
        if "base" not in name:
            parameter.data = parameter.data.to(low)
    precision: Any = {
        "wrapper": {"mixed_precision": MixedPrecision(low, torch.float32)},
        "fully_shard": {"mp_policy": MixedPrecisionPolicy(low, torch.float32)},
    }[how]
    model = shard(build(kind), how, **precision)
    assert torch.equal(model(batch(0)), bare(batch(0).to(low)))
    losses = train(model)
    assert losses[-1] < losses[0]


@kinds()
@both_ways
@ranks(2)
def test_a_module_computes_with_an_object_of_the_weights_class(how: str, kind: str) -> None:
    bare, model = build(kind), shard(build(kind), how)
    seen: list[torch.Tensor] = []
    model[0].up.base.register_forward_pre_hook(lambda module, _: seen.append(module.weight))
    model(batch(0))
    model(batch(0))
    assert type(seen[0]) is type(bare[0].up.base.weight)
    # Made once: a step makes no objects.
    assert seen[0] is seen[1]
    with fullshard.summon_full_params(model):
        for whole, original in zip(model.parameters(), bare.parameters(), strict=True):
            assert_same_bytes(whole, original)


@kinds("nf4", "nf4 in bfloat16", "int8")
@ranks(2)
def test_users_hold_parts_of_the_same_class_with_the_scales(kind: str) -> None:
    bare, model = build(kind), shard(build(kind), "wrapper")
    original, part = bare[0].up.base.weight, model.module[0].up.base.weight
    assert type(part) is type(original)
    assert part.dtype == original.dtype
    elements = torch.tensor(part.numel(), device=device())
    torch.distributed.all_reduce(elements)
    assert elements == original.numel()
    if kind == "int8":
        assert torch.equal(part.SCB, original.SCB)
        assert part.CB is None
    else:
        assert part.quant_state == original.quant_state


@kinds("nf4", "nf4 in bfloat16", "int8", "torchao int8")
@ranks(2)
def test_an_evaluation_computes_as_training_does_and_leaves_weights_as_they_are(kind: str) -> None:
    bare, model = build(kind), shard(build(kind), "wrapper")
    with torch.no_grad():
        # On some processors a bare Linear4bit would put its weight in another order in evaluation.
        expected = bare.train("nf4" in kind)(batch(0))
        assert torch.equal(model.eval()(batch(0)), expected)
    bare.train()
    model.train()
    assert train(model) == train(bare)


@kinds()
@ranks(2)
def test_a_copy_trains_like_the_original_and_apart_from_it(kind: str) -> None:
    bare, model = build(kind), shard(build(kind), "wrapper")
    train(bare, 1), train(model, 1)
    copied = copy.deepcopy(model)
    expected = bare(batch(3))
    train(model, 2)
    assert torch.equal(copied(batch(3)), expected)
    assert train(copied, 2) == train(bare, 2)


@kinds("nf4", "nf4 in bfloat16", "fp4 in float32", "int8", "torchao int8")
@both_ways
@ranks(2)
def test_conversions_leave_packed_elements_as_they_are(how: str, kind: str) -> None:
    model = shard(build(kind), how)
    expected = model(batch(0))
    model(batch(0)).sum().backward()
    for parameter in model.parameters():
        parameter.grad = None
    model.to(torch.float64).to(torch.float32).to(device())
    assert torch.equal(model(batch(0)), expected)
    losses = train(model)
    assert losses[-1] < losses[0]


@kinds("nf4", "int8", "torchao int8")
@ranks(2)
def test_the_first_ranks_weights_and_scales_reach_all_ranks(kind: str) -> None:
    own = build(kind, seed=torch.distributed.get_rank())
    model = shard(own, "wrapper", sync_module_states=True, device_id=device())
    assert torch.equal(model(batch(0)), build(kind, seed=0)(batch(0)))


@ranks(2)
def test_a_bias_is_cast_as_its_module_would_cast_it() -> None:
    bare, whole = build("nf4 with bias"), build("nf4 with bias")
    for model in (bare, whole):
        for module in model.modules():
            if isinstance(module, bnb.nn.Linear4bit):
                module.bias.data = module.bias.data.to(torch.bfloat16)
    assert_trains_alike(bare, shard(whole, "wrapper"))


@ranks(2)
def test_packed_elements_are_gathered_as_bytes_and_never_reduced() -> None:
    model = shard(build("nf4 in bfloat16"), "wrapper")
    train(model, 1)
    for wrapper in FSDP.fsdp_modules(model):
        for handle in wrapper._unit.handles:
            if "base" in handle.places[0][0].path:
                owners = [places[0].module for places in handle.places]
                assert all(isinstance(module, bnb.nn.Linear4bit) for module in owners)
                assert list(handle.full_buffers) == [torch.bfloat16]
                assert not handle.reduce_buffers


@kinds("nf4", "int8", "torchao int8")
@both_ways
@ranks(2)
def test_shards_offloaded_to_the_host(how: str, kind: str) -> None:
    offloaded: Any = {
        "wrapper": {"cpu_offload": CPUOffload(True), "device_id": device()},
        "fully_shard": {"offload_policy": CPUOffloadPolicy()},
    }[how]
    model = shard(build(kind).cpu(), how, **offloaded)
    assert_trains_alike(build(kind), model)


@pytest.mark.parametrize("kind", ["EmbeddingNF4", "EmbeddingFP4", "Embedding8bit"])
@both_ways
@ranks(2)
def test_quantised_embeddings(how: str, kind: str) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        embedding = getattr(bnb.nn, kind)(32, 64).requires_grad_(False).to(device())
        return nn.Sequential(embedding, nn.Linear(64, 8).to(device()))

    bare, whole, tokens = make(), make(), torch.arange(7, device=device())
    if how == "wrapper":
        model: Any = FSDP(whole, use_orig_params=True)
    else:
        model = fullshard.fully_shard(whole)
    expected = bare(tokens)
    assert torch.equal(model(tokens), expected)
    expected.sum().backward()
    model(tokens).sum().backward()
    with fullshard.summon_full_params(model, with_grads=True):
        found = dict(model.named_parameters())["1.weight"]
        assert torch.equal(found.grad, bare[1].weight.grad)


@kinds("nf4", "int8", "torchao int8")
@ranks(2)
def test_two_modules_with_one_weight(kind: str) -> None:
    bare, model = build(kind), build(kind)
    for each in (bare, model):
        torch.manual_seed(1)
        for block in each:
            block.twice = type(block.up)(block.up.base, 64, 96)
            block.down.register_forward_pre_hook(_add_twice(block))
    assert_trains_alike(bare, shard(model, "wrapper"))


def _add_twice(block: Any) -> Any:
    return lambda module, inputs: inputs[0] + block.twice(block.norm(inputs[0][:, :64]))


@kinds("nf4", "torchao int8")
@ranks(2)
def test_parameters_summoned_on_the_first_rank_in_host_memory(kind: str) -> None:
    bare, model = build(kind).cpu(), shard(build(kind), "wrapper")
    with fullshard.summon_full_params(model, rank0_only=True, offload_to_cpu=True, writeback=False):
        if torch.distributed.get_rank() == 0:
            whole = dict(model.named_parameters())
            for name, original in bare.named_parameters():
                assert_same_bytes(whole[name], original)
    assert torch.equal(model(batch(0)), bare.to(device())(batch(0)))


@kinds("nf4", "int8", "torchao int8")
@both_ways
@ranks(2)
def test_a_model_that_has_trained_before_it_is_sharded(how: str, kind: str) -> None:
    bare, model = build(kind), build(kind)
    assert train(bare) == train(model)
    model.zero_grad()
    assert_trains_alike(bare, shard(model, how))


class OfNF4Tensor(nn.Module):
    """A linear whose weight is torchao's, which says what ``fully_shard`` all-gathers of it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        module = "torchao.quantization.quantize_.workflows.nf4.nf4_tensor"
        self._functions = importlib.import_module(module)
        whole = self._functions.to_nf4(torch.randn(outputs, inputs), 32, 4)
        self.weight = nn.Parameter(whole, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self._functions.linear_nf4(x, self.weight)
        return product


@needs_torchao
@both_ways
@ranks(2)
def test_weights_whose_class_cannot_be_cut_by_rows(how: str) -> None:
    LINEARS["NF4Tensor"] = OfNF4Tensor
    assert_trains_alike(build("NF4Tensor"), shard(build("NF4Tensor"), how))


@kinds("nf4", "int8", "torchao int8")
@ranks(2)
def test_a_compiled_model(kind: str) -> None:
    bare, model = build(kind), shard(build(kind), "wrapper")
    compiled = torch.compile(model, backend="aot_eager")
    assert train(model, forward=compiled) == pytest.approx(train(bare), rel=1e-5)


@kinds("nf4", "int8")
@ranks(2)
def test_a_pickled_model(kind: str) -> None:
    bare, model = build(kind), shard(build(kind), "wrapper")
    train(bare, 1), train(model, 1)
    read = pickle.loads(pickle.dumps(model))
    assert torch.equal(read(batch(3)), bare(batch(3)))


@kinds("nf4", "nf4 in bfloat16")
@ranks(2)
def test_full_precision_that_accelerate_asks_for_leaves_packed_elements(kind: str) -> None:
    bare, model = build(kind), shard(build(kind), "wrapper")
    for wrapper in FSDP.fsdp_modules(model):
        for handle in wrapper._unit.handles:
            # As accelerate does with models that were loaded in a lower precision.
            handle.flat_param.data = handle.flat_param.data.to(torch.float32)
            handle._orig_param_dtype = torch.float32
    assert_trains_alike(bare, model)
