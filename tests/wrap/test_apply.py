"""Carrying out a plan with a stand-in for the wrapper class."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from fullshard.wrap import (
    ModuleWrapPolicy,
    always_wrap_policy,
    apply_plan,
    decide,
    is_unit,
    resolve_ignored,
    wrap_submodules,
)


def test_every_decided_module_is_replaced_by_its_unit(
    nested_sequential: nn.Sequential, unit_class: Any
) -> None:
    linears = [nested_sequential[0], nested_sequential[1], *nested_sequential[2]]  # type: ignore[misc]
    units = apply_plan(decide(nested_sequential, always_wrap_policy), unit_class)
    assert isinstance(nested_sequential, nn.Sequential)  # the root is the caller's
    assert [unit.module for unit in units[:4]] == linears
    assert nested_sequential[2] is units[4]
    assert nested_sequential[2].module[0] is units[2]


def test_children_are_constructed_before_their_parents(
    nested_sequential: nn.Sequential,
) -> None:
    seen: list[bool] = []

    class Recording(nn.Module):
        _is_fullshard_unit = True

        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            seen.append(all(is_unit(child) for child in module.children()))
            self._fsdp_wrapped_module = module

    apply_plan(decide(nested_sequential, always_wrap_policy), Recording)
    assert seen == [True] * 5


def test_a_module_at_two_places_becomes_one_unit_at_both(unit_class: Any) -> None:
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.Sequential(shared))
    apply_plan(decide(model, ModuleWrapPolicy({nn.Linear})), unit_class)
    assert isinstance(model[0], unit_class)
    assert model[0] is model[1][0]
    assert model[0].module is shared


def test_the_constructor_gets_the_units_arguments_and_nothing_else(
    nested_sequential: nn.Sequential, unit_class: Any
) -> None:
    arguments = {
        "forward_prefetch": True,
        "auto_wrap_policy": always_wrap_policy,
        "ignored_modules": None,
    }
    wrap_submodules(nested_sequential, always_wrap_policy, unit_class, arguments)
    assert nested_sequential[0].arguments == {"forward_prefetch": True}


def test_a_unit_is_told_which_parameters_to_leave(unit_class: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    wrap_submodules(model, ModuleWrapPolicy({nn.Linear}), unit_class, {})
    assert model[0].arguments == {"_left_to_ancestor": {model[0].module.weight}}
    assert model[1].arguments == {"_left_to_ancestor": {model[0].module.weight}}
    assert model[2].arguments == {}


def test_a_unit_is_told_which_modules_below_it_are_ignored(
    nested_sequential: nn.Sequential, unit_class: Any
) -> None:
    ignored = [nested_sequential[1], nested_sequential[2][0]]
    wrap_submodules(
        nested_sequential,
        ModuleWrapPolicy({nn.Sequential}),
        unit_class,
        {"ignored_modules": ignored},
        resolve_ignored(nested_sequential, ignored),
    )
    assert nested_sequential[2].arguments == {"ignored_states": [ignored[1]]}


def test_a_unit_is_told_which_parameters_below_it_are_ignored(
    nested_sequential: nn.Sequential, unit_class: Any
) -> None:
    weight = nested_sequential[2][0].weight
    ignored = resolve_ignored(nested_sequential, ignored_states=[weight])
    wrap_submodules(nested_sequential, ModuleWrapPolicy({nn.Linear}), unit_class, {}, ignored)
    assert nested_sequential[2][0].arguments == {"ignored_states": [weight]}
    assert nested_sequential[2][1].arguments == {}


def test_wrapping_warns_of_a_policy_that_matches_nothing(
    nested_sequential: nn.Sequential, unit_class: Any
) -> None:
    with pytest.warns(UserWarning, match=r"matches no module .* Linear \(4 x"):
        wrap_submodules(nested_sequential, ModuleWrapPolicy({nn.Conv2d}), unit_class, {})


def test_a_parent_that_guards_its_attributes_does_not_hinder_wrapping(unit_class: Any) -> None:
    class Guarded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.__dict__["closed"] = True

        def __setattr__(self, name: str, value: object) -> None:
            if self.__dict__.get("closed"):
                raise AttributeError(name)
            super().__setattr__(name, value)

    model = Guarded()
    wrap_submodules(model, always_wrap_policy, unit_class, {})
    assert isinstance(model.linear, unit_class)
