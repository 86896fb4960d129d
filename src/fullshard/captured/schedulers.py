"""Notices learning-rate schedulers that step inside a captured step: in replays they would not.

A scheduler counts its steps on the host. A graph would repeat the learning rate of its capture, and
where that is constant for a while, calls would look alike, so that nothing else would tell.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator
from typing import Any

from torch.optim.lr_scheduler import LRScheduler


@contextlib.contextmanager
def noting_schedulers(note: Callable[[object], None]) -> Generator[None, None, None]:
    """Call ``note`` with each scheduler of torch's kind that steps in this context."""
    originals = [(kind, vars(kind)["step"]) for kind in _kinds(LRScheduler) if "step" in vars(kind)]
    for kind, original in originals:
        kind.step = _noted(original, note)
    try:
        yield
    finally:
        for kind, original in originals:
            kind.step = original


def _kinds(kind: Any) -> Iterator[Any]:
    yield kind
    for each in kind.__subclasses__():
        yield from _kinds(each)


def _noted(step: Any, note: Callable[[object], None]) -> Any:
    @functools.wraps(step)
    def run(scheduler: object, *args: Any, **kwargs: Any) -> Any:
        note(scheduler)
        return step(scheduler, *args, **kwargs)

    return run
