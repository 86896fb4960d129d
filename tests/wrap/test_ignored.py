"""What ``ignored_modules`` and ``ignored_states`` stand for, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from fullshard.wrap import Ignored, resolve_ignored


def model_with_buffers() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)), nn.BatchNorm1d(2)
    )


def test_nothing_is_ignored_by_default() -> None:
    ignored = resolve_ignored(model_with_buffers())
    assert ignored == Ignored()
    assert not ignored


@pytest.mark.parametrize("argument", ["ignored_modules", "ignored_states"])
def test_an_ignored_module_stands_for_everything_below_it(argument: str) -> None:
    model = model_with_buffers()
    ignored = resolve_ignored(model, **{argument: [model[1]]})
    assert ignored.modules == set(model[1].modules())
    assert ignored.parameters == set(model[1].parameters())
    assert ignored.buffer_names == {f"1.{name}" for name, _ in model[1].named_buffers()}


def test_ignored_parameters_leave_their_modules_and_buffers_alone() -> None:
    model = model_with_buffers()
    ignored = resolve_ignored(model, ignored_states=[model[2].weight])
    assert ignored == Ignored(parameters=frozenset({model[2].weight}))


def test_ignored_states_may_be_a_generator() -> None:
    model = model_with_buffers()
    ignored = resolve_ignored(model, ignored_states=model[0].parameters())
    assert ignored.parameters == {model[0].weight, model[0].bias}


def test_what_a_nested_unit_ignores_is_ignored_above_it_too(unit_class: Any) -> None:
    model = model_with_buffers()
    unit = unit_class(model[1])
    unit._ignored_modules = {model[1][0]}
    unit._ignored_params = set(model[1][0].parameters())
    model[1] = unit
    ignored = resolve_ignored(model, [model[0]])
    assert ignored.modules == {model[0], unit.module[0]}
    assert ignored.parameters == {*model[0].parameters(), *unit.module[0].parameters()}
    assert ignored.buffer_names == {f"1.0.{name}" for name, _ in unit.module[0].named_buffers()}


def test_what_a_unit_below_an_ignored_module_manages_is_not_ignored(unit_class: Any) -> None:
    model = model_with_buffers()
    model[1][1] = unit_class(model[1][1])
    ignored = resolve_ignored(model, [model[1]])
    assert ignored.modules == {model[1], model[1][0]}


def test_ignoring_the_root_is_warned_about() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.warns(UserWarning, match="Trying to ignore the top-level module passed into") as w:
        ignored = resolve_ignored(model, [model])
    assert str(model) in str(w[0].message)
    assert "will result in all parameters being ignored and is not well-supported" in str(
        w[0].message
    )
    assert ignored.parameters == set(model.parameters())


def test_a_unit_cannot_be_ignored(unit_class: Any) -> None:
    model = nn.Sequential(unit_class(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="`ignored_modules` should not include FSDP modules"):
        resolve_ignored(model, [model[0]])


def test_both_arguments_at_once_are_refused() -> None:
    model = model_with_buffers()
    with pytest.raises(ValueError, match="Cannot pass both ignored_modules and ignored_states at"):
        resolve_ignored(model, [model[0]], [model[1]])


def test_ignored_modules_that_are_no_modules_are_refused_with_their_types() -> None:
    with pytest.raises(ValueError, match=r"ignored_modules expects nn.Module list elements.*int"):
        resolve_ignored(model_with_buffers(), [3])  # type: ignore[list-item]


@pytest.mark.parametrize("mix", [lambda m: [m[0], m[0].weight], lambda m: [3]])
def test_ignored_states_of_other_or_several_kinds_are_refused(mix: Any) -> None:
    model = model_with_buffers()
    with pytest.raises(
        ValueError,
        match=r"ignored_states expects all nn.Parameter or all nn.Module list elements but got",
    ):
        resolve_ignored(model, ignored_states=mix(model))


@pytest.mark.parametrize("one", [lambda m: m[1], lambda m: m[0].weight, lambda m: 3])
def test_a_single_thing_without_a_list_around_it_is_refused(one: Any) -> None:
    model = model_with_buffers()
    with pytest.raises(TypeError, match="ignored_states expects a list"):
        resolve_ignored(model, ignored_states=one(model))
