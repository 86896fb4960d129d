"""Rendering a plan as text: the module tree with its units and their sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from fullshard.wrap.description import UnitDescription
from fullshard.wrap.graph import ModuleGraph
from fullshard.wrap.plan import Plan

__all__ = ["render_tree", "size_text"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_HEADINGS = ("module", "units", "parameters", "size", "gathered", "per rank")


def size_text(count: int) -> str:
    """Format a number of bytes for people: ``1.5 MiB``."""
    if count < 1024:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


@dataclass(frozen=True)
class _Entry:
    """A run of siblings that print the same line; a single module is a run of one.

    ``index`` is the graph index of the first of them, or None for an ignored module.
    """

    first_name: str
    last_name: str
    count: int
    module: nn.Module
    index: int | None
    repeated: bool  # the module was shown before, under another path


@dataclass(frozen=True)
class _Line:
    label: str
    columns: tuple[str, ...]
    note: str


class _Tree:
    def __init__(self, plan: Plan, units: Mapping[str, UnitDescription]) -> None:
        self._plan = plan
        self._graph: ModuleGraph = plan.graph
        self._units = {self._graph.index_of[d.module]: units[d.path] for d in plan.decisions}
        self._units[0] = units[""]
        self._shared_names = _names_of_shared_parameters(self._graph)
        self._looks = self._number_looks()

    def _number_looks(self) -> list[int]:
        """Give every module a number such that equal numbers print the same lines."""
        numbers: dict[object, int] = {}
        looks = [-1] * len(self._graph.modules)
        for index in self._graph.children_first:
            if len(self._graph.incoming[index]) > 1:
                look: object = index  # a shared module is never merged into a run
            else:
                unit = self._units.get(index)
                look = (
                    type(self._graph.modules[index]),
                    None if unit is None else _numbers_of(unit),
                    self._note(index),
                    tuple((name, self._look_of(m, looks)) for name, m in self._below(index)),
                )
            looks[index] = numbers.setdefault(look, len(numbers))
        return looks

    def _look_of(self, module: nn.Module, looks: list[int]) -> object:
        index = self._graph.index_of.get(module)
        return type(module) if index is None else looks[index]

    def _below(self, index: int) -> list[tuple[str, nn.Module]]:
        module = self._graph.modules[index]
        if module in self._plan.ignored.modules:
            return []
        return [(name, child) for name, child in module._modules.items() if child is not None]

    def lines(self) -> Iterator[_Line]:
        root = self._graph.modules[0]
        shown = {0}
        stack = [("", "", 1, _Entry("", "", 1, root, 0, repeated=False))]
        while stack:
            lead, indent, times, entry = stack.pop()
            times *= entry.count
            yield self._line(lead, times, entry)
            if entry.index is None or entry.repeated:
                continue
            entries = self._entries(entry.index, shown)
            for position, below in reversed(list(enumerate(entries))):
                last = position == len(entries) - 1
                lead_below = indent + ("└─ " if last else "├─ ")
                stack.append((lead_below, indent + ("   " if last else "│  "), times, below))

    def _entries(self, index: int, shown: set[int]) -> list[_Entry]:
        entries: list[_Entry] = []
        looks: list[object] = []
        for name, module in self._unfolded(index):
            at = self._graph.index_of.get(module)
            look = (type(module),) if at is None else self._looks[at]
            if entries and looks[-1] == look and at not in shown and _same_list(entries[-1], name):
                run = entries.pop()
                entries.append(
                    _Entry(run.first_name, name, run.count + 1, run.module, run.index, False)
                )
            else:
                entries.append(_Entry(name, name, 1, module, at, at in shown))
                looks.append(look)
            if at is not None:
                shown.add(at)
        return entries

    def _unfolded(self, index: int) -> list[tuple[str, nn.Module]]:
        """The children to show below a module; plain containers are replaced by their content."""
        children = self._below(index)
        position = 0
        while position < len(children):
            name, module = children[position]
            if self._is_plain_container(module):
                content = self._below(self._graph.index_of[module])
                children[position : position + 1] = [(f"{name}.{n}", m) for n, m in content]
            else:
                position += 1
        return children

    def _is_plain_container(self, module: nn.Module) -> bool:
        index = self._graph.index_of.get(module)
        return (
            index is not None
            and isinstance(module, _CONTAINERS)
            and index not in self._units
            and len(self._graph.incoming[index]) == 1
            and not module._parameters
            and bool(module._modules)
        )

    def _line(self, lead: str, times: int, entry: _Entry) -> _Line:
        class_name = type(entry.module).__name__
        if entry.index == 0 and not entry.repeated:
            label = class_name
        elif entry.count == 1:
            label = f"{lead}{entry.first_name} ({class_name})"
        else:
            label = f"{lead}{entry.first_name} … {entry.last_name} ({entry.count} x {class_name})"
        if entry.index is None:
            return _Line(label, ("",) * 5, "ignored")
        if entry.repeated:
            first = self._graph.path(entry.index) or "(root)"
            return _Line(label, ("",) * 5, f"the same module as {first}")
        unit = self._units.get(entry.index)
        if unit is None:
            return _Line(label, ("",) * 5, self._note(entry.index))
        columns = (
            f"{times:,}",
            f"{unit.elements:,}",
            size_text(unit.bytes),
            size_text(unit.gathered_bytes),
            f"{unit.shard_elements:,} ({size_text(unit.shard_bytes)})",
        )
        return _Line(label, columns, self._note(entry.index))

    def _note(self, index: int) -> str:
        notes = []
        unit = self._units.get(index)
        module = self._graph.modules[index]
        own = {name: p for name, p in module._parameters.items() if p is not None}
        if unit is not None and unit.frozen_elements:
            all_frozen = unit.frozen_elements == unit.elements
            notes.append("frozen" if all_frozen else f"{unit.frozen_elements:,} frozen")
        elif unit is None and own and not any(p.requires_grad for p in own.values()):
            notes.append("frozen")
        elif unit is None and own and not all(p.requires_grad for p in own.values()):
            frozen = [name for name, p in own.items() if not p.requires_grad]
            notes.append(f"{', '.join(frozen)} frozen")
        for name, parameter in own.items():
            if parameter in self._plan.ignored.parameters:
                notes.append(f"{name} ignored")
            elif parameter in self._shared_names:
                notes.append(f"{name} shared: {self._shared_names[parameter]}")
        return ", ".join(notes)


def _names_of_shared_parameters(graph: ModuleGraph) -> dict[nn.Parameter, str]:
    """Map each parameter that several modules hold to its first name and the number of holders."""
    return {
        node.parameter: f"{graph.parameter_path(node)} in {len(node.holders)} modules"
        for node in graph.parameters
        if len(node.holders) > 1
    }


def _numbers_of(unit: UnitDescription) -> tuple[int, ...]:
    return (unit.elements, unit.bytes, unit.shard_elements, unit.gathered_bytes)


def _same_list(entry: _Entry, name: str) -> bool:
    """Return True if ``name`` continues the run, as ``layers.3`` does after ``layers.2``."""
    return entry.last_name.rpartition(".")[0] == name.rpartition(".")[0]


def render_tree(plan: Plan, units: Mapping[str, UnitDescription]) -> str:
    """Return the module tree of ``plan`` as text; ``units`` maps paths to the plan's units."""
    lines = list(_Tree(plan, units).lines())
    headings = _Line(_HEADINGS[0], _HEADINGS[1:], "")
    label_width = max(len(line.label) for line in (headings, *lines))
    widths = [
        max(len(line.columns[column]) for line in (headings, *lines))
        for column in range(len(headings.columns))
    ]
    return "\n".join(
        "  ".join(
            [
                line.label.ljust(label_width),
                *(c.rjust(w) for c, w in zip(line.columns, widths, strict=True)),
                line.note,
            ]
        ).rstrip()
        for line in (headings, *lines)
    )
