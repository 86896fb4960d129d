"""The order of operations that all ranks of a process group know. Pure: no communication.

Note: one prediction per place
    All ranks have seen the same operations so far, so each holds the same tree of what followed
    what, and stands at the same node of it. A node predicts one thing: the operation that followed
    it last, or that a pass begins (which one follows from the last few passes), or nothing yet.
    The prediction is the same on all ranks. Where there is one, a rank about to do just that may
    start without asking, and one about to do something else knows that others may start without
    it. Where there is none, no rank starts anything before it has asked.
"""

from __future__ import annotations

import collections
import enum
import hashlib
from typing import Any

from .disagreement import Operation, Place

#: How many past operations a rank can be compared by.
_REMEMBERED = 512
#: From how many of the last passes the next one is predicted; the longest that is known counts
#: (micro-batches, training and evaluation in turn).
_CONTEXTS = (32, 8, 1)
#: The tree is forgotten when a model that never repeats itself has made it this large.
_NODE_LIMIT = 200_000


class Node:
    """An operation after those that lead to it from the beginning of its pass."""

    __slots__ = ("children", "digest", "following", "index", "operation", "previous")

    def __init__(self, operation: Operation | None, previous: Node | None, digest: bytes) -> None:
        self.operation = operation
        self.previous = previous
        self.index: int = 0 if previous is None else previous.index + 1
        #: The same on all ranks that did the same in this pass.
        self.digest = digest
        self.children: dict[Operation, Node] = {}
        #: What is predicted: an operation's node, or one of the two below.
        self.following: Node = NOTHING_KNOWN

    def forgetful(self) -> Node:
        """The same operation with the same past, without a prediction."""
        node = Node(self.operation, self.previous, self.digest)
        node.index = self.index
        return node


# Their operation is None, which is equal to nothing that a rank may ask for.
NOTHING_KNOWN: Node = object.__new__(Node)
PASS_BEGINS: Node = object.__new__(Node)
NOTHING_KNOWN.operation = PASS_BEGINS.operation = None


class Expectation(enum.Enum):
    """The relation of an operation to the one that all ranks expect."""

    FOLLOWS = enum.auto()
    DEVIATES = enum.auto()
    #: Nothing was expected: no rank starts before it has asked.
    IS_NEW = enum.auto()


class OrderTable:
    """The operations that followed each other so far, and where this rank stands among them.

    The step's path looks at ``position.following`` and, when that is what it is about to do, moves
    ``position`` there; everything else goes through :meth:`expectation` and :meth:`advance`.
    """

    def __init__(self) -> None:
        self.position = Node(None, None, b"")
        #: The place of the first node of the current pass; before the first pass, a node without
        #: an operation stands one place before the first operation.
        self._base = -1
        self._passes: dict[Operation, Node] = {}
        self._next_pass: dict[tuple[Any, ...], Node] = {}
        self._recent_passes: collections.deque[Node] = collections.deque(maxlen=max(_CONTEXTS))
        self._finished: collections.deque[tuple[int, Node]] = collections.deque(
            maxlen=max(_CONTEXTS)
        )
        self._size = 0

    @property
    def count(self) -> int:
        """The number of operations so far: the place of the next one."""
        return self._base + self.position.index + 1

    def expectation(self, operation: tuple[str, str, int], begins_pass: bool) -> Expectation:
        following = self.position.following
        if following is NOTHING_KNOWN:
            return Expectation.IS_NEW
        if following is not PASS_BEGINS:
            matches = not begins_pass and following.operation == operation
            return Expectation.FOLLOWS if matches else Expectation.DEVIATES
        if not begins_pass:
            return Expectation.DEVIATES
        predicted = self._predicted_pass()
        if predicted is None:
            return Expectation.IS_NEW
        matches = predicted.operation == operation
        return Expectation.FOLLOWS if matches else Expectation.DEVIATES

    def digest(self, operation: Operation, begins_pass: bool) -> int:
        """A number that is the same on ranks that did the same and are about to do the same."""
        asked = (self.count, self.position.digest, tuple(operation), begins_pass)
        return int.from_bytes(_digest(repr(asked).encode()), "big", signed=True)

    def advance(self, asked: tuple[str, str, int], begins_pass: bool) -> None:
        """Move on to an operation that all ranks do, and expect it here from now on."""
        operation = Operation(*asked)
        if self._size >= _NODE_LIMIT:
            self._forget()
        if begins_pass:
            self._begin(operation)
            return
        position = self.position
        node = position.children.get(operation)
        if node is None:
            digest = _digest(position.digest + repr(tuple(operation)).encode())
            node = position.children[operation] = Node(operation, position, digest)
            self._size += 1
        position.following = node
        self.position = node

    def _begin(self, operation: Operation) -> None:
        root = self._passes.get(operation)
        if root is None:
            root = Node(operation, None, _digest(repr(tuple(operation)).encode()))
            self._passes[operation] = root
            self._size += 1
        self.position.following = PASS_BEGINS
        known = len(self._next_pass)
        for context in self._contexts():
            self._next_pass[context] = root
        self._size += len(self._next_pass) - known
        count = self.count
        self._finished.append((self._base, self.position))
        self._recent_passes.append(root)
        self._base, self.position = count, root

    def _predicted_pass(self) -> Node | None:
        for context in self._contexts():
            predicted = self._next_pass.get(context)
            if predicted is not None:
                return predicted
        return None

    def _contexts(self) -> list[tuple[Any, ...]]:
        passes = (*self._recent_passes,)
        return [(length, self.position, *passes[-length:]) for length in _CONTEXTS]

    def _forget(self) -> None:
        self._passes.clear()
        self._next_pass.clear()
        self._recent_passes.clear()
        self.position = self.position.forgetful()
        self._size = 0

    def bookmark(self) -> tuple[int, Node, list[tuple[int, Node]]]:
        """The place of this rank in the order, for :meth:`return_to`."""
        return self._base, self.position, [*self._finished]

    def return_to(self, bookmark: tuple[int, Node, list[tuple[int, Node]]]) -> None:
        """Go back to a bookmark, and expect nothing: ranks may continue differently."""
        self._base, self.position, finished = bookmark
        self._finished.clear()
        self._finished.extend(finished)
        self._forget()

    def halt(self) -> None:
        """Have the step's path ask at the next operation, whatever it is."""
        self.position = self.position.forgetful()

    def history(self) -> list[Place]:
        """The last operations and their places. Also called from other threads."""
        base, position = self._base, self.position
        while (base, position) != (self._base, self.position):
            base, position = self._base, self.position
        found: list[Place] = []
        for first, last in ((base, position), *reversed(self._finished.copy())):
            node: Node | None = last
            while node is not None and len(found) < _REMEMBERED:
                if node.operation is not None:
                    found.append((first + node.index, node.operation))
                node = node.previous
        found.reverse()
        return found


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=8).digest()
