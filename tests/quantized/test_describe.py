"""``describe`` counts the bytes of quantised weights as ranks share them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.quantized.models import Block, build, kinds, shard
from torch import nn

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import MixedPrecision
from fullshard.testing import ranks
from fullshard.wrap import ModuleWrapPolicy, describe


@pytest.mark.parametrize("precision", [None, MixedPrecision(torch.bfloat16)])
@kinds("nf4", "nf4 in bfloat16", "int8", "torchao int8")
@ranks(2)
def test_a_unit_is_described_as_it_is(kind: str, precision: Any) -> None:
    described = describe(
        build(kind),
        ModuleWrapPolicy({Block}),
        world_size=2,
        use_orig_params=True,
        mixed_precision=precision,
    )
    model = shard(build(kind), "wrapper", mixed_precision=precision)
    units = {w._unit.module: w._unit for w in FSDP.fsdp_modules(model)}
    unit = units[_block(model)]
    (found,) = (u for u in described.units if u.path == "0")
    kept = sum(h.shard_tensor.numel() * h.shard_tensor.itemsize for h in unit.handles)
    assert found.shard_bytes == kept
    gathered = sum(h.layout.padded_numel * h.dtypes.compute.itemsize for h in unit.handles)
    assert found.gathered_bytes == gathered


def _block(model: Any) -> nn.Module:
    return next(m for m in model.modules() if isinstance(m, Block))
