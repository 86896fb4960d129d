"""A collective over gloo that is pending, until gloo has released its tensors."""

from __future__ import annotations

import atexit
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

#: Seconds for which to wait for a tensor that something else may hold, too.
_PATIENCE = 0.1
#: How long to leave the processor to the thread that holds a tensor.
_PAUSE = 2e-5
#: Seconds left at the end of a program to threads that hold what torch's own functions sent.
_AT_EXIT = 0.02


#: Operations that failed, with the memory they may still touch: it is never freed.
kept_alive: list[Any] = []


class PendingWork:
    """A pending collective, its tensors, and functions to call when it is complete.

    Note: who releases tensors last
        A thread of gloo keeps an operation, and so its tensors, for a moment after it is complete.
        When that thread is the last to hold a tensor that Python knows, it needs the GIL to free
        it. Then it competes with the step, and the memory is freed late; and if the program is
        just ending, the thread is refused the GIL, which aborts the process. So gloo is given
        aliases that nothing else holds, and whoever waits for an operation keeps them until gloo
        has released them.
    """

    __slots__ = ("_tensors", "then", "work")

    def __init__(self, work: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        self.work = work
        self._tensors = tensors
        #: Called when the collective is complete.
        self.then: Callable[[], object] | None = None

    def and_then(self, following: Callable[[], object]) -> None:
        """Call ``following`` when the operation is complete, after earlier such functions."""
        earlier = self.then
        self.then = following if earlier is None else functools.partial(_both, earlier, following)

    def finish(self) -> None:
        """After completion: wait until gloo has released the tensors, and call what follows."""
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
    """At exit, give gloo's threads time to free tensors while they can still get the GIL.

    This is for operations that nobody waits for here: the program's own, and torch's of objects.
    """
    atexit.register(time.sleep, _AT_EXIT)
