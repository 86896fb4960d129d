"""An operation under way, and the moment at which nothing of it is left."""

from __future__ import annotations

import atexit
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

#: Seconds after which a tensor that something else holds as well is not waited for.
_PATIENCE = 0.1
#: How long to leave the processor to the thread that holds a tensor.
_PAUSE = 2e-5
#: Seconds left at the end of a program to threads that hold what torch's own functions sent.
_AT_EXIT = 0.02


#: Operations that failed, with the memory they may still touch: it is never freed.
kept_alive: list[Any] = []


class PendingWork:
    """A collective that a backend works on, with the tensors it was given, and what follows it.

    Note: who lets go last
        A thread of gloo keeps an operation, and so its tensors, for a moment after it is complete.
        When that thread is the last to hold a tensor that Python knows, it needs Python's lock to
        free it. It then competes with the step; its memory is freed some time later; and when the
        program is just ending, the lock is refused in a way that aborts the process. So tensors
        are given to gloo as aliases that nothing else holds, and whoever waits for an operation
        holds them until gloo does not.
    """

    __slots__ = ("_tensors", "then", "work")

    def __init__(self, work: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        self.work = work
        self._tensors = tensors
        #: What is left to do when it is complete.
        self.then: Callable[[], object] | None = None

    def and_then(self, following: Callable[[], object]) -> None:
        """Call ``following`` when the operation is complete, after what is called already."""
        earlier = self.then
        self.then = following if earlier is None else functools.partial(_both, earlier, following)

    def finish(self) -> None:
        """Return when nothing is left of a completed work: not held, and not to be done."""
        self.work = None
        self._await_release()
        then, self.then = self.then, None
        if then is not None:
            then()

    def _await_release(self) -> None:
        tensors, self._tensors = self._tensors, ()
        deadline = 0.0
        for tensor in tensors:
            while tensor._use_count() > 1:  # type: ignore[attr-defined]
                now = time.monotonic()
                deadline = deadline or now + _PATIENCE
                if now > deadline:
                    return
                time.sleep(_PAUSE)


def _both(first: Callable[[], object], second: Callable[[], object]) -> None:
    first()
    second()


@functools.cache
def leave_time_at_exit() -> None:
    """Let gloo's threads free what they hold before the interpreter refuses them its lock.

    For operations that are not waited for here: the program's own, and torch's for objects.
    """
    atexit.register(time.sleep, _AT_EXIT)
