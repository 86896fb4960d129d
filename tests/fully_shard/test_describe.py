"""``describe`` of models that fully_shard is, or was, applied to; by what handles then hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.fully_shard.side_by_side import OURS, Block, Model, by_block
from torch import nn
from torch.distributed.tensor import Shard

import fullshard
from fullshard.state.model.units import units_in
from fullshard.testing import ranks
from fullshard.wrap import Description, ModuleWrapPolicy, describe


def held(model: nn.Module) -> dict[str, int]:
    """The elements of this rank's shard of each unit, as they were allocated."""
    paths = {module: path for path, module in model.named_modules()}
    return {
        paths[unit.module]: sum(handle.shard_tensor.numel() for handle in unit.handles)
        for unit in units_in(model)
    }


def told(description: Description) -> dict[str, int]:
    return {unit.path: unit.shard_elements for unit in description.units}


def on_meta() -> Any:
    with torch.device("meta"):
        model = Model()
        model.blocks[1].requires_grad_(False)
        model.blocks[2].norm.requires_grad_(False)
        model.blocks[2].down.bfloat16()
    return model


@ranks(3)
def test_shards_are_as_large_as_those_that_are_then_held() -> None:
    model = on_meta()
    before = describe(model, ModuleWrapPolicy({Block}), world_size=3, layout="rows")
    elements = sum(p.numel() for p in model.parameters())
    by_block()(OURS, model)

    after = describe(model, world_size=3)

    assert told(before) == told(after) == held(model)
    assert before.elements == after.elements == elements
    remarks = [remark.replace("FSDP", "") for remark in after.remarks]
    assert remarks == list(before.remarks)
    assert any("blocks.2" in remark and "frozen" in remark for remark in remarks)


@ranks(2)
def test_columns_are_counted_where_they_are_what_is_cut() -> None:
    model: Any = nn.Linear(6, 3, bias=False)
    fullshard.fully_shard(model, shard_placement_fn=lambda parameter: Shard(1))

    (unit,) = describe(model, world_size=2).units

    assert unit.shard_elements == model.weight.to_local().numel() == 9


def test_rows_that_ranks_cannot_share_evenly_cost_padding() -> None:
    (flat,) = describe(nn.Linear(5, 3, bias=False), world_size=2).units
    (rows,) = describe(nn.Linear(5, 3, bias=False), world_size=2, layout="rows").units

    assert flat.shard_elements == 8
    # Two rows of three, of which the second rank has only one.
    assert rows.shard_elements == 10
    assert rows.gathered_bytes == 4 * 20


@ranks(2)
def test_what_cannot_be_described_is_refused() -> None:
    inside = nn.Sequential(fullshard.fully_shard(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="applied inside of Sequential, but not to it"):
        describe(inside)
    with pytest.raises(ValueError, match="leave policy out"):
        describe(inside[0], ModuleWrapPolicy({nn.Linear}))
    with pytest.raises(ValueError, match="'flat' or 'rows', but got 'columns'"):
        describe(nn.Linear(2, 2), layout="columns")  # type: ignore[arg-type]
