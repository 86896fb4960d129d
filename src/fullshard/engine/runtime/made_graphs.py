"""Graphs that backwards make (``create_graph``), which other backwards may go through."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

from .autograd import is_handed_out
from .untraced import untraced


class MadeGraph:
    """A graph that a backward made; its nodes hold it."""


class PendingGraphs:
    """The graphs that are alive and that no backward without ``retain_graph`` has gone through."""

    def __init__(self) -> None:
        self._graphs: weakref.WeakSet[MadeGraph] = weakref.WeakSet()

    def __bool__(self) -> bool:
        return len(self._graphs) > 0

    def watch(self, graph: MadeGraph, found: Any) -> None:
        """Learn when another backward goes through ``graph``, of which ``found`` are gradients.

        A gradient without ``grad_fn`` cannot be hooked. If none has one, the graph does not count
        as pending, and pins no unit in the next backward.
        """
        hook = functools.partial(self._go_through, graph)
        for gradient in found if isinstance(found, tuple) else (found,):
            node = None if gradient is None else gradient.grad_fn
            if node is not None and not is_handed_out(gradient):
                self._graphs.add(graph)
                node.register_prehook(hook)

    @untraced
    def _go_through(self, graph: MadeGraph, _: Any) -> None:
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self._graphs.discard(graph)
