"""Assigning each parameter to the unit that manages it. Pure, over a :class:`ModuleGraph`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from fullshard.wrap.graph import ModuleGraph, ParameterNode

__all__ = ["Assignment", "assign"]

_NOTHING: frozenset[nn.Parameter] = frozenset()


@dataclass(frozen=True, eq=False)
class Assignment:
    """The result of :func:`assign`; modules are identified by their index in the graph.

    ``enclosing[i]`` holds the innermost unit on each path from the root to module ``i``: the units
    whose forward may be running when module ``i`` runs. In a tree there is exactly one.
    """

    managed: dict[int, list[ParameterNode]]
    left_to_ancestor: dict[int, frozenset[nn.Parameter]]
    enclosing: list[frozenset[int]]


def assign(graph: ModuleGraph, units: Iterable[int]) -> Assignment:
    """Assign each parameter to the innermost of ``units`` (and the root) that dominates it.

    A unit that reaches a parameter without dominating it leaves it to the ancestor that does.
    See "Dominators" in :mod:`fullshard.wrap.graph`.
    """
    is_unit = [False] * len(graph.modules)
    is_unit[0] = True
    for index in units:
        is_unit[index] = True

    manager = [0] * len(graph.modules)
    enclosing: list[frozenset[int]] = [frozenset()] * len(graph.modules)
    for index in graph.parents_first:
        if is_unit[index]:
            manager[index] = index
            enclosing[index] = frozenset((index,))
        else:
            manager[index] = manager[graph.dominator[index]]
            enclosing[index] = _outside(graph, enclosing, index)

    managed: dict[int, list[ParameterNode]] = {i: [] for i, unit in enumerate(is_unit) if unit}
    left: dict[int, set[nn.Parameter]] = {}
    for node in graph.parameters:
        ancestor = manager[node.place]
        managed[ancestor].append(node)
        for unit in _units_between(graph, enclosing, node, ancestor):
            left.setdefault(unit, set()).add(node.parameter)
    frozen = {unit: frozenset(left[unit]) if unit in left else _NOTHING for unit in managed}
    return Assignment(managed, frozen, enclosing)


def _outside(graph: ModuleGraph, enclosing: list[frozenset[int]], index: int) -> frozenset[int]:
    edges = graph.incoming[index]
    if len(edges) == 1:  # the usual case shares one set object along a whole branch
        return enclosing[edges[0].parent]
    return frozenset().union(*(enclosing[edge.parent] for edge in edges))


def _units_between(
    graph: ModuleGraph, enclosing: list[frozenset[int]], node: ParameterNode, ancestor: int
) -> set[int]:
    """The units below ``ancestor`` that lie on a path to ``node``."""
    found: set[int] = set()
    pending = {unit for holder in node.holders for unit in enclosing[holder]}
    while pending:
        unit = pending.pop()
        if unit != ancestor and unit not in found:
            found.add(unit)
            pending |= _outside(graph, enclosing, unit)
    return found
