"""What ``decide`` says beyond the policy's own choice: parameters, places, warnings, checks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.api import MixedPrecision
from fullshard.wrap import (
    CustomPolicy,
    Decision,
    ModuleWrapPolicy,
    Plan,
    always_wrap_policy,
    decide,
    resolve_ignored,
    size_based_auto_wrap_policy,
)


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)


def by_path(plan: Plan) -> dict[str, Decision]:
    return {decision.path: decision for decision in (*plan.decisions, plan.root)}


def test_without_a_policy_the_root_manages_everything() -> None:
    model = nn.Sequential(Block(), Block())
    plan = decide(model, None)
    assert plan.decisions == ()
    assert plan.root.managed == tuple(model.parameters())
    assert list(plan.root.managed_names) == [name for name, _ in model.named_parameters()]


def test_deciding_changes_nothing() -> None:
    model = nn.Sequential(Block(), Block())
    before = list(model.named_modules())
    decide(model, always_wrap_policy)
    assert list(model.named_modules()) == before


def test_a_unit_manages_what_no_nested_unit_manages() -> None:
    model = nn.Sequential(Block(), nn.Linear(4, 2))
    units = by_path(decide(model, ModuleWrapPolicy({Block, nn.LayerNorm})))
    assert list(units) == ["0.norm", "0", ""]
    assert units["0.norm"].managed_names == ("0.norm.weight", "0.norm.bias")
    assert units["0"].managed_names == ("0.linear.weight", "0.linear.bias")
    assert units[""].managed_names == ("1.weight", "1.bias")


def test_weights_tied_across_two_units_are_left_to_the_unit_around_both() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    inner[1].weight = inner[0].weight
    model = nn.Sequential(inner, nn.Linear(4, 4))
    units = by_path(decide(model, always_wrap_policy))
    assert units["0.0"].managed_names == ("0.0.bias",)
    assert units["0.1"].managed_names == ("0.1.bias",)
    assert units["0.0"].left_to_ancestor == {inner[0].weight}
    assert units["0.1"].left_to_ancestor == {inner[0].weight}
    assert units["0"].managed_names == ("0.0.weight",)
    assert units["0"].left_to_ancestor == frozenset()


def test_a_weight_used_outside_of_any_nested_unit_is_left_to_the_root() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(9, 4), "head": nn.Linear(4, 9, bias=False)})
    model["head"].weight = model["embedding"].weight
    units = by_path(decide(model, ModuleWrapPolicy({nn.Embedding})))
    assert units["embedding"].managed == ()
    assert units["embedding"].left_to_ancestor == {model["head"].weight}
    assert units[""].managed == (model["embedding"].weight,)


def test_weights_tied_inside_one_unit_stay_in_it() -> None:
    block = Block()
    block.again = nn.Linear(4, 4)
    block.again.weight = block.linear.weight
    units = by_path(decide(nn.Sequential(block), ModuleWrapPolicy({Block})))
    assert set(units["0"].managed) == set(block.parameters())
    assert units["0"].left_to_ancestor == frozenset()


def test_a_nested_unit_and_those_around_it_leave_the_same_parameter_to_the_ancestor() -> None:
    model = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(4, 4))), nn.Linear(4, 4))
    model[1].weight = model[0][0][0].weight
    units = by_path(decide(model, always_wrap_policy))
    for path in ("0.0.0", "0.0", "0", "1"):
        assert units[path].left_to_ancestor == {model[1].weight}
    assert units[""].managed == (model[1].weight,)


def test_a_module_at_two_places_is_decided_once_with_both_places() -> None:
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.Sequential(shared, nn.Linear(2, 2)))
    units = by_path(decide(model, always_wrap_policy))
    assert list(units) == ["0", "1.1", "1", ""]
    assert [(p.parent, p.name) for p in units["0"].places] == [(model, "0"), (model[1], "0")]
    assert units["0"].managed == (shared.weight, shared.bias)


def test_a_module_at_two_places_in_one_parent_has_both_places() -> None:
    shared = nn.Linear(3, 3)
    (decision,) = decide(nn.Sequential(shared, shared), always_wrap_policy).decisions
    assert [place.name for place in decision.places] == ["0", "1"]


def test_an_unwrapped_module_shared_by_two_units_is_managed_around_both() -> None:
    first, second = Block(), Block()
    second.norm = first.norm
    units = by_path(decide(nn.Sequential(first, second), ModuleWrapPolicy({Block})))
    norm = {first.norm.weight, first.norm.bias}
    assert set(units[""].managed) == norm
    assert units["0"].left_to_ancestor == norm
    assert units["1"].left_to_ancestor == norm


def test_a_large_module_shared_by_two_small_parents_is_found_by_size() -> None:
    shared = nn.Linear(10, 10)
    first, second = nn.Sequential(shared), nn.Sequential(shared)
    plan = decide(
        nn.Sequential(first, second),
        functools.partial(size_based_auto_wrap_policy, min_num_params=110),
    )
    assert [decision.module for decision in plan.decisions] == [shared]


def test_ignored_modules_are_managed_by_nobody_and_named_to_the_unit_around_them() -> None:
    model = nn.Sequential(Block(), Block())
    ignored = resolve_ignored(model, [model[0].norm])
    units = by_path(decide(model, ModuleWrapPolicy({Block}), ignored=ignored))
    assert units["0"].managed == (model[0].linear.weight, model[0].linear.bias)
    assert units["0"].ignored_modules == (model[0].norm,)
    assert units["1"].ignored_modules == ()
    assert units[""].ignored_modules == ()


def test_ignored_parameters_are_managed_by_nobody_and_do_not_count() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    counts: dict[nn.Module, int] = {}

    def record(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        counts[module] = nonwrapped_numel
        return True

    ignored = resolve_ignored(model, ignored_states=[model[0].weight])
    units = by_path(decide(model, record, ignored=ignored))
    assert counts[model[0]] == 5
    assert counts[model[1]] == 30
    assert units["0"].managed == (model[0].bias,)
    assert units["0"].ignored_parameters == (model[0].weight,)


def test_what_custom_policy_ignores_for_one_module_no_unit_manages() -> None:
    model = nn.Sequential(Block(), Block())

    def pick(module: nn.Module) -> bool | dict[str, Any]:
        if module is model[0]:
            return {"ignored_modules": [model[0].norm]}
        return module is model[1]

    units = by_path(decide(model, CustomPolicy(pick)))
    assert units["0"].ignored_modules == (model[0].norm,)
    assert "ignored_modules" not in units["0"].arguments
    managed = {parameter for unit in units.values() for parameter in unit.managed}
    assert managed == set(model.parameters()) - set(model[0].norm.parameters())


@pytest.mark.parametrize("nested", [True, False])
def test_a_model_that_contains_a_unit_is_refused_with_its_path(
    nested: bool, unit_class: Any
) -> None:
    unit = unit_class(nn.Linear(1, 1))
    model = nn.Module()
    model.lin1 = nn.Sequential(nn.Linear(1, 1), unit) if nested else unit
    model.lin2 = unit_class(nn.Linear(1, 1))
    path = "lin1.1" if nested else "lin1"
    with pytest.raises(
        ValueError,
        match="FSDP auto wrapping requires modules to not already have FSDP "
        f"applied but found {path} in",
    ):
        decide(model, size_based_auto_wrap_policy)


@pytest.mark.parametrize(
    "policy",
    [
        ModuleWrapPolicy({nn.Conv2d}),
        CustomPolicy(lambda module: False),
        functools.partial(size_based_auto_wrap_policy, min_num_params=1000),
    ],
)
def test_a_policy_that_matches_nothing_is_told_which_classes_occur(policy: Any) -> None:
    (message,) = decide(nn.Sequential(Block(), Block(), nn.ReLU()), policy).warnings
    assert "matches no module of Sequential" in message
    assert "Block (2 x, up to 28 parameters)" in message
    assert "Linear (2 x, up to 20 parameters)" in message
    assert "LayerNorm (2 x, up to 8 parameters)" in message
    assert "ReLU" not in message


def test_a_policy_that_matches_only_the_root_is_not_warned_about() -> None:
    assert decide(Block(), ModuleWrapPolicy({Block})).warnings == ()


def test_a_policy_on_a_model_without_submodules_is_not_warned_about() -> None:
    assert decide(nn.Linear(2, 2), ModuleWrapPolicy({nn.Conv2d})).warnings == ()


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))


LOW = [
    MixedPrecision(param_dtype=torch.bfloat16),
    MixedPrecision(reduce_dtype=torch.bfloat16),
    MixedPrecision(buffer_dtype=torch.float16),
]
POLICIES: list[Any] = [
    ModuleWrapPolicy({nn.Conv2d}),
    CustomPolicy(lambda module: isinstance(module, nn.Conv2d)),
    functools.partial(size_based_auto_wrap_policy, min_num_params=100),
]


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("policy", POLICIES)
def test_batch_norms_under_mixed_precision_become_units_in_full_precision(
    precision: MixedPrecision, policy: Any
) -> None:
    plan = decide(Convolution(), policy, root_arguments={"mixed_precision": precision})
    precisions = {d.path: d.arguments["mixed_precision"] for d in plan.decisions}
    assert precisions == {"conv": precision, "norm": None, "head.1": None}
    (message,) = plan.warnings
    assert message.startswith(
        "Both mixed precision and an auto_wrap_policy were specified to FSDP, where the wrapped "
        "module has submodules of type:\n"
    )
    assert "BatchNorm1d" in message
    assert "BatchNorm2d" in message
    assert message.endswith(
        "\nThese modules will be wrapped as separate FSDP instacnes with mixed precision disabled."
    )


@pytest.mark.parametrize("precision", [None, MixedPrecision()])
def test_batch_norms_in_full_precision_are_left_to_the_policy(
    precision: MixedPrecision | None,
) -> None:
    plan = decide(Convolution(), POLICIES[0], root_arguments={"mixed_precision": precision})
    assert [d.path for d in plan.decisions] == ["conv"]
    assert plan.warnings == ()


def test_batch_norms_without_a_policy_are_left_in_the_root() -> None:
    plan = decide(Convolution(), None, root_arguments={"mixed_precision": LOW[0]})
    assert plan.decisions == ()


def test_the_classes_kept_in_full_precision_can_be_chosen() -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, _module_classes_to_ignore=(nn.Linear,))
    plan = decide(Convolution(), POLICIES[0], root_arguments={"mixed_precision": precision})
    assert [d.path for d in plan.decisions] == ["conv", "head.0"]


def test_keeping_batch_norms_in_full_precision_does_not_split_forced_leaves() -> None:
    model = nn.Sequential(nn.MultiheadAttention(100, 1), nn.BatchNorm1d(4))
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=40)
    plan = decide(model, policy, root_arguments={"mixed_precision": LOW[0]})
    assert [d.path for d in plan.decisions] == ["1"]


def test_a_tree_deeper_than_pythons_stack_is_decided() -> None:
    model: nn.Module = nn.Linear(1, 1)
    for _ in range(3000):
        model = nn.Sequential(model)
    plan = decide(model, ModuleWrapPolicy({nn.Linear}))
    assert [d.path.count(".") for d in plan.decisions] == [2999]


def test_a_module_that_contains_its_own_parent_is_decided() -> None:
    model, child = nn.Sequential(nn.Linear(2, 2)), Block()
    model.append(child)
    child.parent = model
    assert [d.path for d in decide(model, ModuleWrapPolicy({Block})).decisions] == ["1"]
