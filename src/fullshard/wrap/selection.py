"""Asking a policy which modules to wrap. Pure: the result is data, and nothing is wrapped here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from torch import nn

from fullshard.wrap.graph import ModuleGraph
from fullshard.wrap.ignored import Ignored
from fullshard.wrap.policies import PolicyFunction, _Policy

__all__ = ["Policy", "Selection", "Sizes", "policy_name", "select"]

Policy = PolicyFunction | _Policy


@dataclass(frozen=True, eq=False)
class Selection:
    """The modules to wrap (by index, without the root), each with its constructor arguments.

    ``exempt`` are the modules that become units of their own because mixed precision exempts their
    class. ``policy_matched`` is True if the policy itself picked a module.
    """

    arguments: dict[int, dict[str, Any]]
    exempt: frozenset[int]
    policy_matched: bool


class Sizes:
    """The element counts of a graph's modules, computed in time linear in its size."""

    def __init__(self, graph: ModuleGraph) -> None:
        self._graph = graph
        count = len(graph.modules)
        self.placed = [0] * count  # of the parameters whose place is this module
        self._held: list[list[tuple[nn.Parameter, int]]] = [[] for _ in range(count)]
        highest_place = list(graph.depth)  # of everything reachable from the module
        for node in graph.parameters:
            self.placed[node.place] += node.parameter.numel()
            for holder in node.holders:
                self._held[holder].append((node.parameter, node.parameter.numel()))
                highest_place[holder] = min(highest_place[holder], graph.depth[node.place])
        self._dominated = list(self.placed)
        for index in graph.children_first:
            for _, child in graph.outgoing[index]:
                above_child = graph.depth[graph.dominator[child]]
                highest_place[index] = min(highest_place[index], highest_place[child], above_child)
            if index:
                self._dominated[graph.dominator[index]] += self._dominated[index]
        self._reaches_out = [
            highest < depth for highest, depth in zip(highest_place, graph.depth, strict=True)
        ]

    def below(self, index: int) -> int:
        """Count the elements of all distinct parameters reachable from a module."""
        if not self._reaches_out[index]:
            return self._dominated[index]
        distinct: dict[nn.Parameter, int] = {}
        seen = {index}
        stack = [index]
        while stack:
            current = stack.pop()
            distinct.update(self._held[current])
            for _, child in self._graph.outgoing[current]:
                if child not in seen:
                    seen.add(child)
                    stack.append(child)
        return sum(distinct.values())


def select(
    graph: ModuleGraph,
    policy: Policy,
    ignored: Ignored,
    root_arguments: Mapping[str, Any],
    exempt_classes: tuple[type[nn.Module], ...],
) -> Selection:
    """Ask ``policy`` about the modules of ``graph``.

    Instances of ``exempt_classes`` are selected whatever the policy says, with
    ``mixed_precision`` turned off.
    """
    exempt = frozenset(
        index
        for index, module in enumerate(graph.modules)
        if index and isinstance(module, exempt_classes)
    )
    if _is_policy_object(policy):
        picked = _ask_object(graph, policy, ignored, root_arguments)
    elif callable(policy) and not isinstance(policy, type):
        _check_function(policy)
        picked = {index: dict(root_arguments) for index in _ask_function(graph, policy, exempt)}
    else:
        raise TypeError(_not_a_policy(policy))
    matched = bool(picked)
    picked.pop(0, None)
    for index in exempt:
        picked[index] = {
            **picked.get(index, root_arguments),
            "mixed_precision": None,
            "_exempt": True,
        }
    return Selection(picked, exempt, matched)


def _is_policy_object(policy: object) -> TypeGuard[_Policy]:
    # Recognised by its method, so that objects of torch's own policy classes work, too.
    return not isinstance(policy, type) and hasattr(policy, "_run_policy")


def _ask_object(
    graph: ModuleGraph, policy: _Policy, ignored: Ignored, root_arguments: Mapping[str, Any]
) -> dict[int, dict[str, Any]]:
    answer = policy._run_policy(graph.modules[0], set(ignored.modules), dict(root_arguments))
    return {
        graph.index_of[module]: arguments
        for module, arguments in answer.items()
        if module in graph.index_of
    }


def _check_function(policy: PolicyFunction) -> None:
    """Raise ``TypeError`` if ``policy`` cannot be called with the arguments of a policy."""
    try:
        signature = inspect.signature(policy)
    except ValueError:
        # Some callables, such as built-ins, have no signature to inspect.
        return
    try:
        signature.bind(module=None, recurse=True, nonwrapped_numel=0)
    except TypeError as error:
        raise TypeError(
            f"{_not_a_policy(policy)} Its signature is {signature}. Pass a function that takes "
            "only a module as CustomPolicy(function)"
        ) from error


def _ask_function(graph: ModuleGraph, policy: PolicyFunction, exempt: frozenset[int]) -> list[int]:
    """The modules that ``policy`` picks, children first.

    The elements of a nested unit do not count for the modules above it. The same goes for modules
    in ``exempt``, which become units in any case.
    """
    sizes = Sizes(graph)
    asked = _modules_to_ask_about(graph, policy, sizes)
    remaining = list(sizes.placed)
    wanted: list[int] = []
    for index in graph.children_first:
        if index == 0:
            break
        module, count = graph.modules[index], remaining[index]
        wants = index in asked and policy(module=module, recurse=False, nonwrapped_numel=count)
        if wants:
            wanted.append(index)
        if not wants and index not in exempt:
            remaining[graph.dominator[index]] += count
    return wanted


def _modules_to_ask_about(graph: ModuleGraph, policy: PolicyFunction, sizes: Sizes) -> set[int]:
    """The modules into which ``policy`` recurses, beginning at the root."""
    accepted: set[int] = set()
    visited: set[int] = set()
    stack = [0]
    while stack:
        index = stack.pop()
        if index in visited:
            continue
        visited.add(index)
        module, count = graph.modules[index], sizes.below(index)
        if policy(module=module, recurse=True, nonwrapped_numel=count):
            accepted.add(index)
            stack.extend(child for _, child in reversed(graph.outgoing[index]))
    return accepted


def policy_name(policy: object) -> str:
    """The name of a policy for messages, without memory addresses."""
    if isinstance(policy, functools.partial):
        bound = [f"{key}={_short(value)}" for key, value in policy.keywords.items()]
        return f"{policy_name(policy.func)}({', '.join(bound)})"
    name = getattr(policy, "__name__", None)
    return name if isinstance(name, str) else repr(policy)


def _short(value: object) -> str:
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, (set, frozenset, list, tuple)):
        return "{" + ", ".join(_short(entry) for entry in value) + "}"
    return policy_name(value)


def _not_a_policy(policy: object) -> str:
    expected = (
        "auto_wrap_policy expects a policy object such as ModuleWrapPolicy({Block}) or a "
        "function of (module, recurse, nonwrapped_numel)"
    )
    if isinstance(policy, type):
        return f"{expected}, but got the class {policy.__name__}."
    return f"{expected}, but got {policy!r}."
