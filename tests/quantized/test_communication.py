"""Quantised weights beside options of communication: their packed elements are sent as they are."""

from __future__ import annotations

import torch
from tests.quantized.models import both_ways, build, kinds, shard
from tests.quantized.test_training import assert_trains_alike

from fullshard import Communication
from fullshard.testing import ranks

EIGHT_BITS = Communication(all_gather_dtype=torch.int8, reduce_dtype=torch.int8)


@kinds("nf4", "nf4 in bfloat16", "fp4 in float32", "int8", "torchao int8")
@both_ways
@ranks(2)
def test_packed_elements_are_not_encoded(how: str, kind: str) -> None:
    # Adapters are too small to be encoded, so that every bit is the same.
    assert_trains_alike(build(kind), shard(build(kind), how, communication=EIGHT_BITS))


@kinds("nf4", "nf4 in bfloat16", "int8", "torchao int8")
@both_ways
@ranks(4)
def test_secondary_shards_have_packed_elements_too(how: str, kind: str) -> None:
    model = shard(build(kind), how, communication=Communication(secondary_shards=2))
    assert_trains_alike(build(kind), model)
