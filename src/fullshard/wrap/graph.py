r"""The module tree as a graph of integers. Pure: reads modules, changes nothing, knows no policy.

Note: Dominators
----------------
A module may be registered at several places and a parameter in several modules, so the
"tree" is really a directed graph. A unit is unsharded only while its module runs, so it can
manage a parameter only if every path from the root to that parameter goes through it: if it
*dominates* the parameter::

              root              embedding and head share one weight: only root
            /   |   \           dominates it, so no unit below may manage it.
    embedding blocks head       norm is registered in block 0 and in block 1:
              /    \            the lowest module that dominates its parameters,
             0      1           apart from norm itself, is blocks.
              \    /
               norm

The *place* of a parameter is the lowest module that dominates it. In a plain tree that is the
module that holds it, and a module dominates exactly what lies below it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import nn

__all__ = ["Edge", "ModuleGraph", "ParameterNode", "walk"]


@dataclass(frozen=True, slots=True)
class Edge:
    """One registration of a module: ``parent`` (its index) holds it under ``name``."""

    parent: int
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class ParameterNode:
    """One parameter, the modules (by index) that hold it, and its place (see "Dominators")."""

    parameter: nn.Parameter
    name: str  # in the first holder
    holders: tuple[int, ...]
    place: int


def walk(root: nn.Module, excluded: Collection[nn.Module] = ()) -> Iterator[nn.Module]:
    """Yield every module once, parents first, without descending into ``excluded``.

    The order is that of ``root.modules()``, but without recursion, so deep models work.
    ``root`` itself is always yielded.
    """
    seen: set[nn.Module] = set()
    stack = [root]
    while stack:
        module = stack.pop()
        if module in seen:
            continue
        seen.add(module)
        yield module
        if module not in excluded:
            below = [m for m in module._modules.values() if m is not None and m not in excluded]
            stack.extend(reversed(below))


class ModuleGraph:
    """The modules below ``root`` by index (0 is the root), numbered parents first.

    Modules in ``excluded`` are left out together with everything reachable through them
    alone; parameters in ``excluded_parameters`` are left out of :attr:`parameters`.
    """

    def __init__(
        self,
        root: nn.Module,
        excluded: Collection[nn.Module] = (),
        excluded_parameters: Collection[nn.Parameter] = (),
    ) -> None:
        self.modules: list[nn.Module] = []
        self.index_of: dict[nn.Module, int] = {}
        self.incoming: list[list[Edge]] = []
        self.outgoing: list[list[tuple[str, int]]] = []
        self.children_first: list[int] = []
        self.excluded_edges: list[tuple[Edge, nn.Module]] = []
        self._paths: dict[int, str] = {0: ""}
        self._traverse(root, excluded)
        self.dominator: list[int] = [0] * len(self.modules)
        self.depth: list[int] = [0] * len(self.modules)
        self._find_dominators()
        self.parameters: list[ParameterNode] = self._find_parameters(excluded_parameters)

    def _traverse(self, root: nn.Module, excluded: Collection[nn.Module]) -> None:
        self._add(root)
        open_modules = [(0, self._edges_out_of(root, excluded))]
        while open_modules:
            parent, edges = open_modules[-1]
            for name, module in edges:
                edge = Edge(parent, name)
                if module in excluded:
                    self.excluded_edges.append((edge, module))
                    continue
                known = self.index_of.get(module)
                index = self._add(module) if known is None else known
                self.outgoing[parent].append((name, index))
                self.incoming[index].append(edge)
                if known is None:
                    open_modules.append((index, self._edges_out_of(module, excluded)))
                    break
            else:
                self.children_first.append(parent)
                open_modules.pop()

    @staticmethod
    def _edges_out_of(
        module: nn.Module, excluded: Collection[nn.Module]
    ) -> Iterator[tuple[str, nn.Module]]:
        if module in excluded:  # only the root can be excluded here; the graph then ends with it
            return iter(())
        return iter([(n, m) for n, m in module._modules.items() if m is not None])

    def _add(self, module: nn.Module) -> int:
        index = len(self.modules)
        self.index_of[module] = index
        self.modules.append(module)
        self.incoming.append([])
        self.outgoing.append([])
        return index

    @property
    def parents_first(self) -> Iterator[int]:
        """Indices in an order in which every module comes after all modules that hold it."""
        return reversed(self.children_first)

    def _find_dominators(self) -> None:
        finished = {0}
        for index in self.parents_first:
            if index == 0:
                continue
            # An edge from an unfinished module closes a cycle, so it adds no new path to this one.
            parents = [e.parent for e in self.incoming[index] if e.parent in finished]
            self.dominator[index] = self._lowest_common(parents)
            self.depth[index] = self.depth[self.dominator[index]] + 1
            finished.add(index)

    def _lowest_common(self, indices: list[int]) -> int:
        """The lowest module that dominates all of ``indices``."""
        common = indices[0]
        for other in indices[1:]:
            while common != other:
                if self.depth[common] < self.depth[other]:
                    other = self.dominator[other]
                else:
                    common = self.dominator[common]
        return common

    def _find_parameters(self, excluded: Collection[nn.Parameter]) -> list[ParameterNode]:
        holders: dict[nn.Parameter, list[int]] = {}
        names: dict[nn.Parameter, str] = {}
        for index, module in enumerate(self.modules):
            for name, parameter in module._parameters.items():
                if parameter is None or parameter in excluded:
                    continue
                names.setdefault(parameter, name)
                places = holders.setdefault(parameter, [])
                if index not in places[-1:]:
                    places.append(index)
        return [
            ParameterNode(parameter, names[parameter], tuple(held), self._lowest_common(held))
            for parameter, held in holders.items()
        ]

    def path(self, index: int) -> str:
        """The dotted path of a module, by its first registration; empty for the root."""
        missing = []
        while index not in self._paths:
            missing.append(index)
            index = self.incoming[index][0].parent
        path = self._paths[index]
        for below in reversed(missing):
            name = self.incoming[below][0].name
            path = self._paths[below] = f"{path}.{name}" if path else name
        return path

    def parameter_path(self, node: ParameterNode) -> str:
        """The dotted name of a parameter, by its first registration."""
        prefix = self.path(node.holders[0])
        return f"{prefix}.{node.name}" if prefix else node.name
