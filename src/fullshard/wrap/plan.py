"""Planning what to wrap, before anything is wrapped. Pure: needs no process group.

:func:`decide` turns a module tree and a policy into a :class:`Plan`; ``apply.py`` applies it and
``describe.py`` prints it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fullshard.wrap.assignment import Assignment, assign
from fullshard.wrap.graph import ModuleGraph, walk
from fullshard.wrap.ignored import NOTHING_IGNORED, Ignored, resolve_ignored
from fullshard.wrap.marker import is_in_place, is_unit
from fullshard.wrap.policies import CustomPolicy
from fullshard.wrap.selection import Policy, Selection, Sizes, policy_name, select

__all__ = ["Attribute", "Decision", "Plan", "decide", "units_in_place"]

_CLASSES_NAMED_AT_MOST = 12

# Arguments of the outermost constructor call that nested units do not inherit.
_NOT_INHERITED = ("auto_wrap_policy", "ignored_modules", "ignored_states", "module")


@dataclass(frozen=True, eq=False)
class Attribute:
    """The attribute under which a module is registered: ``parent._modules[name]``."""

    parent: nn.Module
    name: str


@dataclass(frozen=True, eq=False)
class Decision:
    """One module that becomes a unit, and the parameters that the unit will manage.

    ``path`` is relative to the root, by the first of ``places``; a module registered at several
    places has one decision. ``managed`` are the parameters of the unit, in the order of
    ``module.parameters()``. ``left_to_ancestor`` are parameters that the module uses but an
    enclosing unit manages, because they are used outside the module, too. ``ignored_modules`` and
    ``ignored_parameters`` are the ignored ones inside this unit but not inside a nested unit.
    """

    path: str
    module: nn.Module = field(repr=False)
    arguments: Mapping[str, Any]
    places: tuple[Attribute, ...] = field(repr=False)
    managed: tuple[nn.Parameter, ...] = field(repr=False)
    managed_names: tuple[str, ...]
    left_to_ancestor: frozenset[nn.Parameter] = field(repr=False)
    ignored_modules: tuple[nn.Module, ...] = field(repr=False)
    ignored_parameters: tuple[nn.Parameter, ...] = field(repr=False)


@dataclass(frozen=True, eq=False)
class Plan:
    """The units that a policy creates in a model.

    ``decisions`` are the nested units, children before parents; ``root`` is the outermost
    unit, which the caller wraps. ``warnings`` are messages for the user.
    """

    root: Decision
    decisions: tuple[Decision, ...]
    ignored: Ignored
    warnings: tuple[str, ...]
    graph: ModuleGraph = field(repr=False)

    def __str__(self) -> str:
        lines = [
            f"{decision.path or '(root)'}: {type(decision.module).__name__}, "
            f"{len(decision.managed)} parameters"
            for decision in (*self.decisions, self.root)
        ]
        return "\n".join(lines)


def decide(
    root: nn.Module,
    policy: Policy | None,
    *,
    ignored: Ignored = NOTHING_IGNORED,
    root_arguments: Mapping[str, Any] | None = None,
) -> Plan:
    """Plan the wrapping of ``root`` with ``policy``, without changing the model.

    ``root_arguments`` are the constructor arguments of the outermost unit, which every nested
    unit inherits. If ``mixed_precision`` sets a dtype, modules of the classes that it exempts
    (BatchNorm) become units of their own in full precision. Without a policy the root is the only
    unit. Raises ``ValueError`` if ``root`` already contains a unit.

    >>> from fullshard.wrap import ModuleWrapPolicy
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    >>> print(*(unit.path for unit in decide(model, ModuleWrapPolicy({nn.Linear})).decisions))
    0 2
    """
    _check_not_wrapped(root)
    return _decide(root, policy, ignored, root_arguments)


def units_in_place(
    root: nn.Module,
    *,
    ignored: Ignored = NOTHING_IGNORED,
    root_arguments: Mapping[str, Any] | None = None,
) -> Plan:
    """The plan that made the units of ``root``, to which ``fully_shard`` was applied."""
    if not is_in_place(root):
        raise ValueError(
            f"fully_shard was applied inside of {type(root).__name__}, but not to it: describe "
            "each of the modules that it was applied to, or the model before"
        )
    policy = CustomPolicy(is_in_place)
    return _decide(root, policy, ignored, root_arguments)


def _decide(
    root: nn.Module,
    policy: Policy | None,
    ignored: Ignored,
    root_arguments: Mapping[str, Any] | None,
) -> Plan:
    arguments = {k: v for k, v in (root_arguments or {}).items() if k not in _NOT_INHERITED}
    graph = ModuleGraph(root, ignored.modules, ignored.parameters)
    if policy is None:
        selection = Selection({}, frozenset(), policy_matched=True)
    else:
        exempt_classes = _exempt_classes(arguments.get("mixed_precision"))
        selection = select(graph, policy, ignored, arguments, exempt_classes)
    also_ignored = _ignored_by_single_modules(graph, selection, ignored)
    if also_ignored is not None:
        return _decide(root, policy, also_ignored, root_arguments)

    assignment = assign(graph, selection.arguments)
    reached = _IgnoredByUnit(graph, assignment, ignored)
    decisions = tuple(
        _decision(graph, assignment, reached, index, selection.arguments[index])
        for index in graph.children_first
        if index in selection.arguments
    )
    return Plan(
        root=_decision(graph, assignment, reached, 0, arguments),
        decisions=decisions,
        ignored=ignored,
        warnings=tuple(_warnings(graph, policy, selection)),
        graph=graph,
    )


def _check_not_wrapped(root: nn.Module) -> None:
    for module in walk(root):
        if is_unit(module):
            graph = ModuleGraph(root)
            path = graph.path(graph.index_of[module])
            raise ValueError(
                "FSDP auto wrapping requires modules to not already have FSDP applied but "
                f"found {path} in\n{root}"
            )


def _exempt_classes(mixed_precision: Any) -> tuple[type[nn.Module], ...]:
    """The module classes to keep in full precision; empty without mixed precision."""
    dtypes = ("param_dtype", "reduce_dtype", "buffer_dtype")
    if mixed_precision is None or all(getattr(mixed_precision, d) is None for d in dtypes):
        return ()
    return tuple(mixed_precision._module_classes_to_ignore or ())


def _ignored_by_single_modules(
    graph: ModuleGraph, selection: Selection, ignored: Ignored
) -> Ignored | None:
    """Add the parameters that a policy ignores for single modules to ``ignored``; None if none."""
    modules, parameters, names = ignored.modules, ignored.parameters, ignored.buffer_names
    for index, arguments in selection.arguments.items():
        if "ignored_modules" not in arguments and "ignored_states" not in arguments:
            continue
        own = resolve_ignored(
            graph.modules[index], arguments.get("ignored_modules"), arguments.get("ignored_states")
        )
        prefix = graph.path(index)
        modules |= own.modules
        parameters |= own.parameters
        names |= {f"{prefix}.{name}" for name in own.buffer_names}
    if modules == ignored.modules and parameters == ignored.parameters:
        return None
    return Ignored(modules, parameters, names)


class _IgnoredByUnit:
    """The ignored modules and parameters inside each unit, but not inside its nested units."""

    def __init__(self, graph: ModuleGraph, assignment: Assignment, ignored: Ignored) -> None:
        self.modules: dict[int, dict[nn.Module, None]] = {}
        self.parameters: dict[int, dict[nn.Parameter, None]] = {}
        for edge, module in graph.excluded_edges:
            for unit in assignment.enclosing[edge.parent]:
                self.modules.setdefault(unit, {})[module] = None
        if not ignored.parameters:
            return
        for index, holder in enumerate(graph.modules):
            met = [p for p in holder._parameters.values() if p in ignored.parameters]
            for unit in assignment.enclosing[index] if met else ():
                self.parameters.setdefault(unit, {}).update(dict.fromkeys(met))


def _decision(
    graph: ModuleGraph,
    assignment: Assignment,
    reached: _IgnoredByUnit,
    index: int,
    arguments: Mapping[str, Any],
) -> Decision:
    nodes = assignment.managed[index]
    return Decision(
        path=graph.path(index),
        module=graph.modules[index],
        arguments={k: v for k, v in arguments.items() if k not in _NOT_INHERITED},
        places=tuple(Attribute(graph.modules[e.parent], e.name) for e in graph.incoming[index]),
        managed=tuple(node.parameter for node in nodes),
        managed_names=tuple(graph.parameter_path(node) for node in nodes),
        left_to_ancestor=assignment.left_to_ancestor[index],
        ignored_modules=tuple(reached.modules.get(index, ())),
        ignored_parameters=tuple(reached.parameters.get(index, ())),
    )


def _warnings(graph: ModuleGraph, policy: Policy | None, selection: Selection) -> list[str]:
    messages = []
    if selection.exempt:
        classes = {repr(type(graph.modules[index])) for index in selection.exempt}
        messages.append(
            "Both mixed precision and an auto_wrap_policy were specified to FSDP, where the "
            f"wrapped module has submodules of type:\n{{{', '.join(sorted(classes))}}}\nThese "
            "modules will be wrapped as separate FSDP instacnes with mixed precision disabled."
        )
    occurring = {} if selection.policy_matched else _occurring_classes(graph)
    if occurring:
        shown = [
            f"{name} ({count} x, up to {largest:,} parameters)"
            for name, (count, largest) in list(occurring.items())[:_CLASSES_NAMED_AT_MOST]
        ]
        if len(occurring) > len(shown):
            shown.append(f"and {len(occurring) - len(shown)} other classes")
        messages.append(
            f"The auto_wrap_policy {policy_name(policy)} matches no module of "
            f"{type(graph.modules[0]).__name__}, so the root is the only unit and all-gathers all "
            f"parameters at once. Pass a policy that matches some of the classes in the model: "
            f"{', '.join(shown)}."
        )
    return messages


def _occurring_classes(graph: ModuleGraph) -> dict[str, tuple[int, int]]:
    """Map class names to the number of modules with parameters, and the most elements in one."""
    sizes = Sizes(graph)
    found: dict[str, tuple[int, int]] = {}
    for index, module in enumerate(graph.modules):
        elements = sizes.below(index)
        # A list or dict of modules has no forward, so it is no candidate for a unit.
        if index and elements and not isinstance(module, nn.ModuleList | nn.ModuleDict):
            count, largest = found.get(type(module).__name__, (0, 0))
            found[type(module).__name__] = (count + 1, max(largest, elements))
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))
