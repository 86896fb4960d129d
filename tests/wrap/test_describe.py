"""``describe``: its numbers against independent counts, its text by what a reader looks for."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.api import MixedPrecision
from fullshard.wrap import (
    Description,
    ModuleWrapPolicy,
    UnitDescription,
    always_wrap_policy,
    describe,
    size_based_auto_wrap_policy,
)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )


class Model(nn.Module):
    def __init__(self, width: int = 8, layers: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 20, bias=False)


def by_path(description: Description) -> dict[str, UnitDescription]:
    return {unit.path: unit for unit in description.units}


def line_of(description: Description, start: str) -> str:
    (line,) = [
        line for line in str(description).splitlines() if line.lstrip("├└│─ ").startswith(start)
    ]
    return line


def test_units_are_counted_as_their_modules_are() -> None:
    model = Model()
    description = describe(model, ModuleWrapPolicy({Block}), world_size=4)
    assert [unit.path for unit in description.units] == ["", *(f"layers.{i}" for i in range(32))]
    block = by_path(description)["layers.7"]
    elements = sum(p.numel() for p in model.layers[7].parameters())
    assert block.class_name == "Block"
    assert block.parameters == len(list(model.layers[7].parameters()))
    assert (block.elements, block.bytes) == (elements, 4 * elements)
    assert block.shard_elements == math.ceil(elements / 4)
    assert description.elements == sum(p.numel() for p in model.parameters())


def test_every_rank_keeps_the_same_rounded_up() -> None:
    description = describe(nn.Linear(5, 7), world_size=4)  # 42 elements
    (unit,) = description.units
    assert (unit.shard_elements, unit.shard_bytes) == (11, 44)
    assert unit.gathered_bytes == 4 * 44
    assert (description.shard_elements, description.shard_bytes) == (11, 44)


def test_original_parameters_are_padded_to_16_bytes_except_the_last() -> None:
    model = nn.Sequential(*(nn.Linear(i, o, bias=False) for i, o in [(3, 7), (7, 5), (5, 5)]))
    (unit,) = describe(model, world_size=1, use_orig_params=True).units
    assert unit.shard_elements == 21 + 3 + 35 + 1 + 25
    assert unit.elements == 21 + 35 + 25


def test_the_padding_follows_the_dtype_that_parameters_compute_in() -> None:
    model = nn.Sequential(*(nn.Linear(i, o, bias=False) for i, o in [(3, 7), (7, 5), (5, 5)]))
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    (unit,) = describe(model, world_size=1, use_orig_params=True, mixed_precision=precision).units
    assert unit.shard_elements == 21 + 3 + 35 + 5 + 25
    assert unit.shard_bytes == 4 * unit.shard_elements  # kept in full precision
    assert unit.gathered_bytes == 2 * unit.shard_elements


def test_parameters_of_different_dtypes_are_sharded_apart() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False).half())
    (unit,) = describe(model, world_size=2).units
    assert unit.shard_elements == 5 + 5
    assert unit.shard_bytes == 5 * 4 + 5 * 2


def test_original_parameters_that_are_frozen_are_sharded_apart() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[0].requires_grad_(False)
    (unit,) = describe(model, world_size=2, use_orig_params=True).units
    assert unit.shard_elements == 5 + 5


def test_a_model_on_the_meta_device_can_be_described() -> None:
    with torch.device("meta"):
        model = Model(width=1024, layers=2)
    description = describe(model, ModuleWrapPolicy({Block}))
    assert description.elements == sum(p.numel() for p in model.parameters())


def test_equal_layers_are_shown_as_one_line() -> None:
    description = describe(Model(), ModuleWrapPolicy({Block}), world_size=4)
    line = line_of(description, "layers.0")
    assert "layers.0 … layers.31 (32 x Block)" in line
    elements = 8 * 2 + (8 * 32 + 32) + (32 * 8 + 8)
    assert f"{elements:,}" in line
    assert str(description).count("norm (LayerNorm)") == 1


def test_a_layer_that_differs_is_shown_on_its_own() -> None:
    model = Model(layers=5)
    model.layers[2].requires_grad_(False)
    text = str(describe(model, ModuleWrapPolicy({Block})))
    assert "layers.0 … layers.1 (2 x Block)" in text
    assert "layers.2 (Block)" in text
    assert "layers.3 … layers.4 (2 x Block)" in text


def test_frozen_parameters_are_counted_and_marked() -> None:
    model = Model(layers=2)
    model.layers[0].requires_grad_(False)
    model.embedding.requires_grad_(False)
    description = describe(model, ModuleWrapPolicy({Block}), use_orig_params=True)
    units = by_path(description)
    frozen = sum(p.numel() for p in model.layers[0].parameters())
    assert units["layers.0"].frozen_elements == frozen
    assert units["layers.1"].frozen_elements == 0
    assert units[""].frozen_elements == model.embedding.weight.numel()
    assert description.frozen_elements == frozen + model.embedding.weight.numel()
    assert line_of(description, "layers.0 (Block)").endswith("frozen")
    assert line_of(description, "embedding").endswith("frozen")


def test_a_unit_with_frozen_and_trainable_parameters_is_remarked_on() -> None:
    model = Model(layers=2)
    model.embedding.requires_grad_(False)
    refused = describe(model, ModuleWrapPolicy({Block}), use_orig_params=False)
    allowed = describe(model, ModuleWrapPolicy({Block}), use_orig_params=True)
    start = "(root) (Model) has frozen (160) and trainable (160) parameters: "
    assert any(
        r.startswith(start) and "rejects this unless use_orig_params=True" in r
        for r in refused.remarks
    )
    assert any(r.startswith(start) and "take no gradient memory" in r for r in allowed.remarks)


def test_units_too_small_for_a_collective_are_remarked_on_once_per_class() -> None:
    description = describe(Model(), ModuleWrapPolicy({Block}))
    (remark,) = [r for r in description.remarks if "latency" in r]
    assert remark.startswith(
        "Units that all-gather less than 1.0 MiB (32): layers.0 (like 31 more of class Block) "
        "2.2 KiB."
    )


def test_units_large_enough_for_a_collective_are_not_remarked_on() -> None:
    with torch.device("meta"):
        model = Model(width=512, layers=2)
    assert describe(model, ModuleWrapPolicy({Block})).remarks == ()


def test_units_without_parameters_are_remarked_on() -> None:
    description = describe(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), always_wrap_policy)
    assert any(r.startswith("Units without parameters (1): 1 (ReLU)") for r in description.remarks)


def test_a_policy_that_matches_nothing_is_remarked_on_without_a_warning(
    recwarn: pytest.WarningsRecorder,
) -> None:
    description = describe(Model(), ModuleWrapPolicy({nn.Conv2d}))
    assert "matches no module of Model" in description.remarks[0]
    assert not recwarn.list


def test_units_that_are_never_called_are_remarked_on() -> None:
    lists = nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]))
    (remark,) = [
        r for r in describe(lists, ModuleWrapPolicy({nn.ModuleList})).remarks if "never called" in r
    ]
    assert remark.startswith("0 (ModuleList) becomes a unit")
    attention = nn.Sequential(nn.MultiheadAttention(4, 2))
    remarks = describe(attention, always_wrap_policy).remarks
    assert any("0.out_proj" in r and "without calling it" in r for r in remarks)


def test_a_shared_module_is_shown_once_and_explained() -> None:
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.Sequential(shared))
    description = describe(model, ModuleWrapPolicy({nn.Linear}))
    assert by_path(description)["0"].places == ("0", "1.0")
    assert "the same module as 0" in str(description)
    assert any("registered under 2 names (0, 1.0)" in r for r in description.remarks)


def test_a_shared_parameter_is_counted_once_and_explained() -> None:
    model = Model()
    model.head.weight = model.embedding.weight
    description = describe(model, ModuleWrapPolicy({nn.Embedding, nn.Linear, Block}))
    assert description.elements == sum(p.numel() for p in model.parameters())
    assert by_path(description)["head"].left_to_ancestor == 1
    assert any(
        r.startswith("embedding.weight is used in several units, so (root)")
        for r in description.remarks
    )
    assert "weight shared: embedding.weight in 2 modules" in line_of(description, "head")


def test_ignored_modules_are_shown_and_counted_apart() -> None:
    model = Model(layers=3)
    description = describe(model, ModuleWrapPolicy({Block}), ignored_modules=[model.layers[1]])
    elements = sum(p.numel() for p in model.layers[1].parameters())
    assert description.ignored_elements == elements
    assert description.elements == sum(p.numel() for p in model.parameters()) - elements
    assert line_of(description, "layers.1").endswith("ignored")
    assert f"{elements:,} parameters are ignored" in str(description)


def test_ignored_parameters_are_shown_and_counted_apart() -> None:
    model = Model(layers=1)
    description = describe(model, ignored_states=[model.head.weight])
    assert description.ignored_elements == model.head.weight.numel()
    assert line_of(description, "head").endswith("weight ignored")


def test_batch_norms_kept_in_full_precision_are_shown_as_units() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=20)
    units = by_path(describe(model, policy, world_size=2, mixed_precision=precision))
    assert units["0"].gathered_bytes == 20 * 2
    assert units["1"].gathered_bytes == 8 * 4


def test_printing_and_the_representation_are_the_same_text() -> None:
    description = describe(Model())
    assert repr(description) == str(description) == description.text


def test_a_model_that_is_wrapped_already_is_refused(unit_class: Any) -> None:
    with pytest.raises(ValueError, match="not already have FSDP applied but found 0 in"):
        describe(nn.Sequential(unit_class(nn.Linear(2, 2))))


def test_a_world_without_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 rank, but got 0"):
        describe(Model(), world_size=0)


def test_a_module_that_contains_the_root_is_shown_only_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.append(nn.Sequential(model))
    assert line_of(describe(model), "0 (Sequential)").endswith("the same module as (root)")


def test_the_number_of_ranks_may_be_given_by_position() -> None:
    assert describe(Model(), None, 4).world_size == 4


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"model expects an nn\.Module, but got 3"):
        describe(3)  # type: ignore[arg-type]


def test_a_function_of_a_module_alone_is_no_policy() -> None:
    with pytest.raises(
        TypeError, match=r"Its signature is \(module\)\. .* CustomPolicy\(function\)"
    ):
        describe(Model(), lambda module: True)
