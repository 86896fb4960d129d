"""Random module graphs with random policies: what holds for every one of them.

A model is drawn as a list of nodes of which each hangs below one or two earlier ones, so that
modules are shared; parameters come from a common pool, so that they are shared too.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fullshard.wrap import (
    CustomPolicy,
    Ignored,
    ModuleWrapPolicy,
    Plan,
    _or_policy,
    always_wrap_policy,
    apply_plan,
    decide,
    describe,
    resolve_ignored,
    size_based_auto_wrap_policy,
)


class First(nn.Module):
    pass


class Second(nn.Module):
    pass


@dataclass
class Case:
    model: nn.Module
    policy: Any
    ignored: Ignored


@st.composite
def models(draw: st.DrawFn, *, shared: bool = True) -> nn.Module:
    count = draw(st.integers(1, 9))
    classes = draw(
        st.lists(st.sampled_from([First, Second, nn.ModuleList]), min_size=count, max_size=count)
    )
    nodes: list[nn.Module] = [
        (First if index == 0 else kind)() for index, kind in enumerate(classes)
    ]
    for index in range(1, count):
        parents = draw(st.lists(st.integers(0, index - 1), min_size=1, max_size=2 if shared else 1))
        for number, parent in enumerate(parents):
            name = str(len(nodes[parent]._modules))
            if not isinstance(nodes[parent], nn.ModuleList):
                name = f"child{index}_{number}"
            nodes[parent].add_module(name, nodes[index])
    pool = [
        nn.Parameter(torch.empty(numel), requires_grad=trainable)
        for numel, trainable in draw(
            st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=8)
        )
    ]
    for number, parameter in enumerate(pool):
        holders = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=3 if shared else 1))
        for holder in holders:
            nodes[holder].register_parameter(f"parameter{number}", parameter)
    return nodes[0]


@st.composite
def policies(draw: st.DrawFn, model: nn.Module) -> Any:
    modules = list(model.modules())

    def some_modules() -> set[nn.Module]:
        return set(draw(st.lists(st.sampled_from(modules))))

    kind = draw(st.sampled_from(["class", "custom", "size", "always", "or", "function"]))
    if kind == "class":
        return ModuleWrapPolicy(draw(st.sets(st.sampled_from([First, Second, nn.ModuleList]))))
    if kind == "custom":
        picked = some_modules()
        return CustomPolicy(lambda module: module in picked)
    size = functools.partial(size_based_auto_wrap_policy, min_num_params=draw(st.integers(0, 20)))
    if kind == "size":
        return size
    if kind == "or":
        return functools.partial(_or_policy, policies=[size, ModuleWrapPolicy({Second})])
    if kind == "always":
        return always_wrap_policy
    closed, wrapped = some_modules(), some_modules()

    def function(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return module not in closed if recurse else module in wrapped

    return function


@st.composite
def cases(draw: st.DrawFn) -> Case:
    model = draw(models())
    policy = draw(policies(model))
    below = list(model.modules())[1:]
    parameters = list(model.parameters())
    if below and draw(st.booleans()):
        chosen = draw(st.lists(st.sampled_from(below), max_size=2))
        return Case(model, policy, resolve_ignored(model, chosen))
    if parameters and draw(st.booleans()):
        states = draw(st.lists(st.sampled_from(parameters), max_size=2))
        return Case(model, policy, resolve_ignored(model, ignored_states=states))
    return Case(model, policy, Ignored())


def decided(case: Case) -> Plan:
    return decide(case.model, case.policy, ignored=case.ignored)


def ways_to(model: nn.Module, parameter: nn.Parameter) -> Iterator[tuple[nn.Module, ...]]:
    """Every chain of modules from the root to a module that holds ``parameter``."""

    def chains(module: nn.Module, above: tuple[nn.Module, ...]) -> Iterator[tuple[nn.Module, ...]]:
        chain = (*above, module)
        if any(held is parameter for held in module._parameters.values()):
            yield chain
        for child in module._modules.values():
            assert child is not None
            yield from chains(child, chain)

    return chains(model, ())


@given(cases())
def test_each_parameter_is_managed_by_exactly_one_unit_or_ignored(case: Case) -> None:
    plan = decided(case)
    managed = [id(p) for unit in (*plan.decisions, plan.root) for p in unit.managed]
    ignored = {id(p) for p in case.ignored.parameters}
    everything = {id(p) for p in case.model.parameters()}
    assert len(managed) == len(set(managed))
    assert set(managed) == everything - ignored


@given(cases())
def test_the_manager_is_the_innermost_unit_on_every_way_to_the_parameter(case: Case) -> None:
    plan = decided(case)
    units = (*plan.decisions, plan.root)
    unit_modules = {unit.module for unit in units}
    for unit in units:
        for parameter in unit.managed:
            ways = [
                [module for module in way if module in unit_modules]
                for way in ways_to(case.model, parameter)
            ]
            on_every_way = set.intersection(*map(set, ways))
            assert unit.module in on_every_way
            innermost = [module for module in ways[0] if module in on_every_way][-1]
            assert unit.module is innermost


@given(cases())
def test_nested_units_are_decided_before_those_around_them(case: Case) -> None:
    order = [decision.module for decision in decided(case).decisions]
    for earlier, later in itertools.combinations(order, 2):
        assert later not in set(earlier.modules())


@given(cases())
def test_every_decision_can_be_reached_and_is_not_ignored(case: Case) -> None:
    for decision in decided(case).decisions:
        assert decision.module is not case.model
        assert case.model.get_submodule(decision.path) is decision.module
        assert decision.module not in case.ignored.modules
        assert all(p.parent._modules[p.name] is decision.module for p in decision.places)


@given(cases())
def test_applying_a_plan_lets_constructors_find_what_was_decided(case: Case) -> None:
    """Units that look for parameters themselves, told only what they are told, agree."""

    class Unit(nn.Module):
        _is_fullshard_unit = True
        managed: set[nn.Parameter]

        def __init__(
            self,
            module: nn.Module,
            ignored_states: Any = None,
            _left_to_ancestor: frozenset[nn.Parameter] = frozenset(),
        ) -> None:
            super().__init__()
            self._fsdp_wrapped_module = module
            nested = [m for m in module.modules() if isinstance(m, Unit)]
            taken = {p for unit in nested for p in unit.managed}
            ignored = resolve_ignored(module, ignored_states=ignored_states)
            self._ignored_modules, self._ignored_params = ignored.modules, ignored.parameters
            self.managed = set(module.parameters()) - taken - ignored.parameters - _left_to_ancestor

    plan = decided(case)
    units = apply_plan(plan, Unit)
    for unit, decision in zip(units, plan.decisions, strict=True):
        assert unit.managed == set(decision.managed)
        assert all(place.parent._modules[place.name] is unit for place in decision.places)
    wrapped = [m for m in case.model.modules() if isinstance(m, Unit)]
    assert {id(unit) for unit in wrapped} == {id(unit) for unit in units}
    root = Unit(case.model, ignored_states=[*case.ignored.parameters] or None)
    assert root.managed == set(plan.root.managed)


@given(cases(), st.integers(1, 5), st.booleans())
def test_describing_counts_every_element_once(
    case: Case, world_size: int, use_orig_params: bool
) -> None:
    description = describe(
        case.model,
        case.policy,
        world_size=world_size,
        ignored_states=list(case.ignored.parameters),
        use_orig_params=use_orig_params,
    )
    total = sum(p.numel() for p in case.model.parameters())
    assert description.elements + description.ignored_elements == total
    assert description.shard_elements * world_size >= description.elements
    assert str(description)


@given(models(shared=False), st.integers(0, 20))
def test_in_a_plain_tree_sizes_are_what_recursion_finds(model: nn.Module, minimum: int) -> None:
    def remaining(module: nn.Module, wrapped: list[nn.Module]) -> int:
        count = sum(p.numel() for p in module.parameters(recurse=False))
        count += sum(remaining(child, wrapped) for child in module.children())
        total = sum(p.numel() for p in module.parameters())
        container = isinstance(module, nn.ModuleList)
        if module is model or total < minimum or count < minimum or container:
            return count
        wrapped.append(module)
        return 0

    expected: list[nn.Module] = []
    total = sum(p.numel() for p in model.parameters())
    if total >= minimum:
        remaining(model, expected)
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=minimum)
    assert [decision.module for decision in decide(model, policy).decisions] == expected
