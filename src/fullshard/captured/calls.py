"""Which calls of a step run eagerly, which are captured, and which graphs are kept.

No tensors and no effects: kinds of calls are compared and counted, nothing more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from enum import Enum, auto
from typing import Any

#: How many kinds of calls that have no graph are counted, per graph that may be kept.
_COUNTED_PER_GRAPH = 8
#: Calls in a row without a graph after which a warning tells, if ``warmup`` is not larger.
RESTLESS_AFTER = 20


class Action(Enum):
    """The ways to carry out one call."""

    EAGER = auto()
    CAPTURE = auto()
    REPLAY = auto()


class Calls:
    """Decides by earlier calls. The same calls in the same order get the same decisions.

    A kind of call is captured once ``warmup`` calls of that kind have come before, so kinds that
    hardly ever return (a learning rate that changes in every step, batches that all have different
    lengths) are never captured. At most ``limit`` graphs are kept; the least recently used one is
    dropped.
    """

    def __init__(self, warmup: int, limit: int) -> None:
        for name, value in (("warmup", warmup), ("graphs", limit)):
            if value < 1:
                raise ValueError(f"{name} expects 1 or more, but got {value}")
        self._warmup = warmup
        self.limit = limit
        #: Kinds that have a graph, least recently used first.
        self._kept: OrderedDict[Hashable, None] = OrderedDict()
        #: How many calls there were of kinds that have none, least recent first.
        self._counts: OrderedDict[Hashable, int] = OrderedDict()
        #: Kinds whose graph had to go, least recent first.
        self._gone: OrderedDict[Hashable, bool] = OrderedDict()
        #: How many graphs were made of kinds whose graph had gone.
        self._made_again = 0
        #: True after the one graph with which as many were made again as are kept.
        self.is_crowded = False
        self._eager_in_a_row = 0
        #: After so many calls in a row without a graph, the user is warned.
        self.restless_after = max(RESTLESS_AFTER, 2 * warmup)

    @property
    def kept(self) -> list[Hashable]:
        """The kinds that have a graph, least recently used first."""
        return [*self._kept]

    @property
    def is_restless(self) -> bool:
        """True at the one call at which kinds have changed for too long for any to be captured."""
        return self._eager_in_a_row == self.restless_after

    def since(self, kind: Hashable) -> int | None:
        """The number of other kinds without a graph called since this kind; None if it is new."""
        if kind not in self._counts:
            return None
        return next(i for i, each in enumerate(reversed(self._counts)) if each == kind)

    def decide(self, kind: Hashable) -> Action:
        """Decide on a call that is about to be made."""
        if kind in self._kept:
            self._kept.move_to_end(kind)
            self._eager_in_a_row = 0
            return Action.REPLAY
        count = self._counts.pop(kind, 0)
        if count >= self._warmup:
            # Keep the count, in case the capture yields no graph.
            self._counts[kind] = count
            self._eager_in_a_row = 0
            return Action.CAPTURE
        self._counts[kind] = count + 1
        self._bound(self._counts)
        self._eager_in_a_row += 1
        return Action.EAGER

    def keep(self, kind: Hashable) -> Hashable | None:
        """A graph of this kind was made; returns the kind whose graph has to go, if one has."""
        self._counts.pop(kind, None)
        is_again = self._gone.pop(kind, False)
        self._made_again += is_again
        self.is_crowded = is_again and self._made_again == self.limit
        self._kept[kind] = None
        self._kept.move_to_end(kind)
        if len(self._kept) <= self.limit:
            return None
        gone, _ = self._kept.popitem(last=False)
        self._gone[gone] = True
        self._bound(self._gone)
        return gone

    def _bound(self, kinds: OrderedDict[Hashable, Any]) -> None:
        """Forget the least recent of kinds without a graph, if there are many."""
        if len(kinds) > _COUNTED_PER_GRAPH * self.limit:
            kinds.popitem(last=False)

    def forget(self) -> None:
        """All graphs are gone: count from the beginning."""
        self._kept.clear()
        self._counts.clear()
        self._gone.clear()
        self._made_again = 0
        self._eager_in_a_row = 0
