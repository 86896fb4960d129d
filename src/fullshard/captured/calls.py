"""Which calls of a step run eagerly, which are captured, and which graphs are kept.

No tensors and no effects: kinds of calls are compared and counted, nothing more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from enum import Enum, auto

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
        self._limit = limit
        #: Kinds that have a graph, least recently used first.
        self._kept: OrderedDict[Hashable, None] = OrderedDict()
        #: How many calls there were of kinds that have none, least recent first.
        self._counts: OrderedDict[Hashable, int] = OrderedDict()
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
        if len(self._counts) > _COUNTED_PER_GRAPH * self._limit:
            self._counts.popitem(last=False)
        self._eager_in_a_row += 1
        return Action.EAGER

    def keep(self, kind: Hashable) -> Hashable | None:
        """A graph of this kind was made; returns the kind whose graph has to go, if one has."""
        self._counts.pop(kind, None)
        self._kept[kind] = None
        self._kept.move_to_end(kind)
        return self._kept.popitem(last=False)[0] if len(self._kept) > self._limit else None

    def forget(self) -> None:
        """All graphs are gone: count from the beginning."""
        self._kept.clear()
        self._counts.clear()
        self._eager_in_a_row = 0
