"""What a model looks like, and computes, after its parameters were flattened."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard import FlatParameter, FullyShardedDataParallel, ShardingStrategy
from fullshard.testing import device, ranks
from fullshard.wrap import ModuleWrapPolicy

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def wrapped(module: nn.Module, **options: Any) -> FullyShardedDataParallel:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
        return FullyShardedDataParallel(module, **options)


class Transformer(nn.Transformer):
    def __init__(self, shared: bool = False) -> None:
        torch.manual_seed(0)
        super().__init__(16, 2, 2, 2, dim_feedforward=24, dropout=0.1)
        self.register_buffer("dummy", torch.tensor(1.0))
        if shared:
            for encoder, decoder in zip(self.encoder.layers, self.decoder.layers, strict=True):
                decoder.linear1.weight = encoder.linear1.weight
                decoder.linear2.weight = encoder.linear2.weight


def output_of(module: Any, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(1)
    source, target = torch.rand(5, 2, 16), torch.rand(3, 2, 16)
    return module(source.to(device(), dtype), target.to(device(), dtype))


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("half", [False, True])
@ranks(1)
def test_only_wrapped_modules_are_flattened(half: bool) -> None:
    module = Transformer().to(device())
    module = module.half() if half else module
    before = count(module)
    encoder, decoder = module.encoder.layers, module.decoder.layers
    flattened = count(encoder[1]) + count(decoder[0])
    untouched = [len(list(layer.parameters())) for layer in (encoder[0], decoder[1])]

    encoder[1], decoder[0] = wrapped(encoder[1]), wrapped(decoder[0])

    flat = [encoder[1]._flat_param, decoder[0]._flat_param]
    assert sum(p.numel() for p in flat) == flattened
    assert count(module) == before
    for layer, parameter in zip((encoder[1], decoder[0]), flat, strict=True):
        assert [*layer.parameters()] == [parameter]
        assert isinstance(parameter, FlatParameter)
    assert [len(list(layer.parameters())) for layer in (encoder[0], decoder[1])] == untouched


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("half", [False, True])
@ranks(2)
def test_converting_the_model_converts_flat_parameters(half: bool, use_orig_params: bool) -> None:
    module = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3)).to(device())
    old, new = torch.float32, torch.float16
    if half:
        module, old, new = module.half(), new, old
    values = [p.detach().clone() for p in module.parameters()]
    module[0] = wrapped(module[0], use_orig_params=use_orig_params)
    assert module[0]._flat_param.dtype == old

    module = module.to(new)

    assert module[0]._flat_param.dtype == new
    assert all(p.dtype == new for p in module.parameters())
    assert module(torch.ones(1, 5, dtype=new, device=device())).dtype == new
    with FullyShardedDataParallel.summon_full_params(module):
        for parameter, value in zip(module.parameters(), values, strict=True):
            assert parameter.dtype == new
            assert torch.equal(parameter, value.to(new))


@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_an_optimizer_made_after_conversion_trains(use_orig_params: bool) -> None:
    torch.manual_seed(0)
    module = nn.Linear(5, 3).to(device())
    reference = nn.Linear(5, 3).to(device())
    reference.load_state_dict(module.state_dict())
    reference = reference.double()
    model = wrapped(module, use_orig_params=use_orig_params).double()
    data = torch.ones(2, 5, dtype=torch.float64, device=device())

    for each in (model, reference):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(data).square().sum().backward()
        optimizer.step()

    with FullyShardedDataParallel.summon_full_params(model):
        for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(parameter, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("world", ["alone", "two"])
def test_a_module_without_parameters_runs(world: str) -> None:
    (_run_empty_alone if world == "alone" else _run_empty_on_two)()


class Increment(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def _run_empty() -> None:
    model = wrapped(Increment())
    data = torch.rand(3, requires_grad=True)

    output = model(data)

    assert [*model.parameters()] == []
    assert model._flat_param is None
    assert model._handle is None
    # On the device that the model computes on, which need not be the data's.
    assert torch.equal(output.cpu(), data + 1)
    output.sum().backward()
    assert torch.equal(data.grad, torch.ones(3))


_run_empty_alone = ranks(1)(_run_empty)


@ranks(2)
def _run_empty_on_two() -> None:
    _run_empty()


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@ranks(2)
def test_memory_formats_survive_flattening(strategy: str, use_orig_params: bool) -> None:
    seen: list[bool] = []

    class Convolution(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(self.weight.is_contiguous(memory_format=torch.channels_last))
            return super().forward(x)

    torch.manual_seed(0)
    module = nn.Sequential(Convolution(3, 5, 3), nn.Conv2d(5, 2, 3)).to(device())
    module[0].to(memory_format=torch.channels_last)
    expected = {name: p.detach().clone() for name, p in module.named_parameters()}
    strides = {name: p.stride() for name, p in module.named_parameters()}
    data = torch.rand(2, 3, 7, 7, device=device())
    wanted = module(data).detach()
    seen.clear()

    model = wrapped(
        module,
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=use_orig_params,
    )
    output = model(data)
    output.sum().backward()

    assert seen == [True]
    torch.testing.assert_close(output, wanted)
    with FullyShardedDataParallel.summon_full_params(model):
        for name, parameter in model.named_parameters():
            assert parameter.stride() == strides[name], name
            assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@ranks(1)
def test_output_alone_equals_the_modules_own(
    dtype: torch.dtype, shared: bool, use_orig_params: bool
) -> None:
    _check_output(dtype, shared, use_orig_params)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@ranks(2)
def test_output_on_two_ranks_equals_the_modules_own(
    dtype: torch.dtype, shared: bool, use_orig_params: bool
) -> None:
    _check_output(dtype, shared, use_orig_params)


def _check_output(dtype: torch.dtype, shared: bool, use_orig_params: bool) -> None:
    # In training mode: dropout draws the same numbers on both sides.
    expected = output_of(Transformer(shared).to(device(), dtype), dtype)

    model = wrapped(Transformer(shared).to(device(), dtype), use_orig_params=use_orig_params)

    torch.testing.assert_close(output_of(model, dtype), expected, rtol=0, atol=0)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@ranks(1)
def test_parameter_norms_after_a_step_equal_the_modules_own(
    dtype: torch.dtype, use_orig_params: bool
) -> None:
    def norm_after_step(module: nn.Module) -> torch.Tensor:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        output_of(module, dtype).sum().backward()
        optimizer.step()
        return torch.stack([p.detach().double().norm() for p in module.parameters()]).norm()

    expected = norm_after_step(Transformer(shared=True).to(device(), dtype))

    model = wrapped(Transformer(shared=True).to(device(), dtype), use_orig_params=use_orig_params)

    # A norm of norms: the same number whether parameters are one or many.
    torch.testing.assert_close(norm_after_step(model), expected, rtol=1e-6, atol=1e-6)


@ranks(3)
def test_shards_of_all_ranks_joined_are_the_parameters() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 2)).to(device())
    expected = torch.cat([p.detach().flatten() for p in module.parameters()])

    model = wrapped(module)

    # 42 + 16 = 58 elements: 20 per rank, the last two of them padding.
    shards = [torch.empty(20, device=device()) for _ in range(3)]
    dist.all_gather(shards, model._flat_param.detach())
    assert torch.equal(torch.cat(shards)[:58], expected)


@ranks(2)
def test_shared_parameters_are_shared_in_forward_and_when_summoned() -> None:
    model = wrapped(
        Transformer(shared=True).to(device()),
        auto_wrap_policy=ModuleWrapPolicy({nn.TransformerEncoderLayer}),
        use_orig_params=True,
    )
    seen: list[torch.Tensor] = []
    first, second = model.encoder.layers[0], model.decoder.layers[0]
    for layer in (first, second):
        layer.linear1.register_forward_pre_hook(lambda linear, _: seen.append(linear.weight))

    output_of(model, torch.float32).sum().backward()

    assert len(seen) == 2
    assert seen[0] is seen[1]
    with FullyShardedDataParallel.summon_full_params(model):
        assert first.linear1.weight is second.linear1.weight
