"""Models whose frozen weights are quantised, with adapters in full precision beside them."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.testing import device
from fullshard.wrap import ModuleWrapPolicy

bnb = pytest.importorskip("bitsandbytes")
HAS_TORCHAO = importlib.util.find_spec("torchao") is not None

MakeLinear = Callable[[int, int], nn.Module]


def four_bits(
    storage: torch.dtype = torch.uint8, nested: bool = True, bias: bool = False, kind: str = "nf4"
) -> MakeLinear:
    def make(inputs: int, outputs: int) -> nn.Module:
        linear = bnb.nn.Linear4bit(
            inputs,
            outputs,
            bias=bias,
            compute_dtype=torch.float32,
            quant_type=kind,
            quant_storage=storage,
            compress_statistics=nested,
        )
        return linear.requires_grad_(False)

    return make


def eight_bits(bias: bool = False) -> MakeLinear:
    def make(inputs: int, outputs: int) -> nn.Module:
        linear = bnb.nn.Linear8bitLt(inputs, outputs, bias=bias, has_fp16_weights=False)
        return linear.requires_grad_(False)

    return make


def of_torchao(config: str) -> MakeLinear:
    def make(inputs: int, outputs: int) -> nn.Module:
        quantization = importlib.import_module("torchao.quantization")
        linear = nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
        quantization.quantize_(linear, getattr(quantization, config)())
        return linear

    return make


#: By name, what makes a quantised linear.
LINEARS: dict[str, MakeLinear] = {
    "nf4": four_bits(),
    "nf4 in bfloat16": four_bits(torch.bfloat16),
    "nf4 in float16, one state": four_bits(torch.float16, nested=False),
    "fp4 in float32": four_bits(torch.float32, kind="fp4"),
    "nf4 with bias": four_bits(bias=True),
    "int8": eight_bits(),
    "int8 with bias": eight_bits(bias=True),
    "torchao int8": of_torchao("Int8WeightOnlyConfig"),
    "torchao float8": of_torchao("Float8WeightOnlyConfig"),
    "torchao intx": of_torchao("IntxWeightOnlyConfig"),
}
needs_torchao = pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is missing")


def kinds(*names: str) -> Any:
    """Parametrize a test by kinds of linears; by all of them if none are named."""
    found = [
        pytest.param(name, marks=needs_torchao) if "torchao" in name else name
        for name in names or LINEARS
    ]
    return pytest.mark.parametrize("kind", found)


class Adapted(nn.Module):
    """A quantised linear and a trainable product of two small matrices."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(4, inputs) / 8)
        self.b = nn.Parameter(torch.randn(outputs, 4) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapted = (x.to(self.a.dtype) @ self.a.T) @ self.b.T
        return self.base(x) + adapted.to(x.dtype)


class Block(nn.Module):
    def __init__(self, make: MakeLinear) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64).requires_grad_(False)
        self.up = Adapted(make(64, 96), 64, 96)
        self.down = Adapted(make(96, 64), 96, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def build(kind: str, seed: int = 0, blocks: int = 3) -> nn.Sequential:
    """The same model on every rank, quantised on its device."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(Block(LINEARS[kind]) for _ in range(blocks)))
    return model.to(device())


def shard(model: nn.Module, how: str, **options: Any) -> Any:
    """Shard the blocks of a model, each a unit, by the wrapper or by ``fully_shard``."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*both parameters with requires_grad.*")
        if how == "wrapper":
            policy = ModuleWrapPolicy({Block})
            return FSDP(model, auto_wrap_policy=policy, use_orig_params=True, **options)
        for module in model.children():
            fullshard.fully_shard(module, **options)
        return fullshard.fully_shard(model, **options)


both_ways = pytest.mark.parametrize("how", ["wrapper", "fully_shard"])


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(step)).to(device())


def train(model: nn.Module, steps: int = 3, forward: Any = None) -> list[float]:
    """Losses of training the adapters, on the same data on every rank."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trainable, lr=1e-2)
    forward = model if forward is None else forward
    losses = []
    for step in range(steps):
        loss = forward(batch(step)).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same_bytes(one: Any, other: Any) -> None:
    """The same class, dtype, shape and bits."""
    assert type(one) is type(other)
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    if hasattr(one, "__tensor_flatten__"):
        names, context = one.__tensor_flatten__()
        assert context == other.__tensor_flatten__()[1]
        for name in names:
            assert_same_bytes(getattr(one, name), getattr(other, name))
        return
    # Packed elements that pass for floating-point numbers may be NaN, which equals nothing.
    bits = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    assert torch.equal(*bits)


def assert_same_states(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert list(one) == list(other)
    for name, value in one.items():
        assert_same_bytes(value, other[name])
