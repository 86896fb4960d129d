"""Quantised weights that could not be sharded are refused at construction, by their path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.quantized.models import bnb, both_ways, build, needs_torchao, shard
from torch import nn

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import MixedPrecision, MixedPrecisionPolicy
from fullshard.testing import ranks


def not_quantized_yet(model: Any) -> None:
    model[1].up.base = bnb.nn.Linear4bit(64, 96, bias=False).requires_grad_(False)


def eight_bits_not_quantized_yet(model: Any) -> None:
    model[1].up.base = bnb.nn.Linear8bitLt(64, 96, has_fp16_weights=False).requires_grad_(False)


def quantized_in_each_forward(model: Any) -> None:
    model[1].up.base = bnb.nn.Linear8bitLt(64, 96, bias=False)


def on_meta(model: Any) -> None:
    model[1].up.base = bnb.nn.Linear4bit(64, 96, bias=False, device="meta").requires_grad_(False)


def trainable(model: Any) -> None:
    linear = bnb.nn.Linear4bit(64, 96, bias=False, quant_storage=torch.bfloat16)
    model[1].up.base = linear.to("cpu").requires_grad_(True)


def in_another_order(model: Any) -> None:
    # As an evaluation leaves it on processors with instructions for bfloat16.
    model[1].up.base.weight.quant_state.packing_format_for_cpu = True


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (not_quantized_yet, "is not quantised yet: call model.to"),
        (eight_bits_not_quantized_yet, "is not quantised yet: call model.to"),
        (quantized_in_each_forward, "has_fp16_weights=True"),
        (on_meta, "on the meta device"),
        (trainable, "requires a gradient"),
        (in_another_order, "shard the model before its first evaluation"),
    ],
)
@both_ways
@ranks(2)
def test_a_weight_that_cannot_be_sharded(
    how: str, damage: Callable[[Any], None], reason: str
) -> None:
    model = build("nf4").cpu()
    damage(model)
    path = r"1\.up\.base\.weight" if how == "wrapper" else r"up\.base\.weight"
    with pytest.raises(ValueError, match=rf"{path}', a (Params4bit|Int8Params).*{reason}"):
        shard(model, how)
    if how == "wrapper":
        # Nothing was wrapped.
        assert not FSDP.fsdp_modules(model)


@pytest.mark.parametrize("kind", ["nf4", "int8", pytest.param("torchao int8", marks=needs_torchao)])
@ranks(2)
def test_flat_parameters(kind: str) -> None:
    model = build(kind).requires_grad_(False)
    with pytest.raises(ValueError, match=r"up\.base\.weight'.*Pass use_orig_params=True"):
        FSDP(model)


@needs_torchao
@ranks(2)
def test_a_trainable_object_that_wraps_others() -> None:
    model = build("torchao int8")
    weight = model[1].up.base.weight
    model[1].up.base.weight = nn.Parameter(weight.detach(), requires_grad=True)
    with pytest.raises(ValueError, match=r"1\.up\.base\.weight'.*requires a gradient"):
        shard(model, "wrapper")


@ranks(2)
def test_a_forward_that_would_replace_a_full_bias_is_refused() -> None:
    model = shard(build("int8 with bias"), "wrapper")
    with pytest.raises(RuntimeError, match=r"bias in torch\.float32 computes in torch\.bfloat16"):
        model(torch.randn(4, 64, dtype=torch.bfloat16))


@both_ways
@ranks(2)
def test_mixed_precision_that_differs_from_a_bias_is_refused_at_construction(how: str) -> None:
    low = torch.bfloat16
    precision: Any = {
        "wrapper": {"mixed_precision": MixedPrecision(low)},
        "fully_shard": {"mp_policy": MixedPrecisionPolicy(low)},
    }[how]
    with pytest.raises(
        ValueError, match=r"Linear4bit at '(0\.)?up\.base' computes in torch.float32"
    ):
        shard(build("nf4 with bias"), how, **precision)
