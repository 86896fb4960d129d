"""Runs functions on all ranks so that an error on one rank is raised on all of them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from ...engine.comm.announcement import Announcements, announcements_of
from ...engine.comm.disagreement import RankLostError, RanksDisagreeError
from ...engine.comm.process_groups import is_alive
from ..model.units import units_in
from .errors import CheckpointError

Result = TypeVar("Result")

_groups: dict[Any, Any] = {}


class CheckpointGroup:
    """The ranks that save or load one checkpoint, or one process without ranks.

    They communicate over a gloo process group of their own, so that a save in the background does
    not interfere with the collectives of training.
    """

    def __init__(self, verb: str = "", model: nn.Module | None = None) -> None:
        self.group: Any = None
        self._in_background = False
        self._verb = verb
        unit = None if model is None else next(iter(units_in(model)), None)
        self._unit = "" if unit is None else unit.name
        #: The model's own groups, in which ranks know of each other what they do.
        self._models = [] if unit is None else [g for g in (unit.shards, unit.copies) if g]
        if dist.is_initialized():
            world = dist.group.WORLD
            if not is_alive(_groups.get(world)):
                _groups.clear()
                _groups[world] = dist.new_group(backend="gloo")
            self.group = _groups[world]

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank()

    @property
    def size(self) -> int:
        return 1 if self.group is None else dist.get_world_size()

    def work_in_background(self) -> None:
        """From now on the ranks train meanwhile, and notice there when one of them is gone."""
        self._in_background = True

    def checkpointing(self) -> contextlib.AbstractContextManager[None]:
        """A context for calls of torch.distributed.checkpoint."""
        return _without_group_warning() if self.group is None else contextlib.nullcontext()

    def on_first_rank(self, function: Callable[[], Result]) -> Result:
        """Call ``function`` on the first rank; return its result, or raise its error, on all."""
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            outcome = list(_attempt(function))
        messages = self._messages
        if messages is not None:
            outcome = messages.object_of_first(outcome, self._wait)
        result, error = outcome
        if error is not None:
            raise error
        return result

    def on_all_ranks(self, function: Callable[[], Result]) -> Result:
        """Call ``function`` on every rank; raise the first failing rank's error on all of them."""
        result, error = _attempt(function)
        errors, messages = [error], self._messages
        if messages is not None:
            with self._told(error):
                errors = messages.objects_of_all(error, self._wait)
        for found in errors:
            if found is not None:
                raise found
        return result

    @contextlib.contextmanager
    def _told(self, error: Exception | None) -> Iterator[None]:
        """Let ranks that are still in the middle of something know what ended it on this one."""
        with contextlib.ExitStack() as told:
            for group in self._models if error is not None else ():
                verb = f"failing to {self._verb} ({type(error).__name__}: {error})"
                told.enter_context(group.instead(verb, self._unit))
            try:
                yield
            except (RanksDisagreeError, RankLostError) as verdict:
                raise verdict from error

    @property
    def _messages(self) -> Announcements | None:
        return None if self.group is None else announcements_of(self.group)

    def _wait(self, work: Any) -> None:
        if self._models and not self._in_background:
            self._models[0].wait_for_other(work)
        else:
            work.wait()


def _attempt(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return function(), None
    except (RanksDisagreeError, RankLostError):
        # All ranks raise it, and the one that is gone would be waited for.
        raise
    except (CheckpointError, FileNotFoundError, TypeError, ValueError) as error:
        return None, error
    except Exception as error:
        return None, CheckpointError(f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def _without_group_warning() -> Iterator[None]:
    """Suppress the warning of torch.distributed.checkpoint about a missing process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def explain(failure: CheckpointException) -> CheckpointError:
    """The first error that torch.distributed.checkpoint collected, as a CheckpointError."""
    for rank, (error, _) in sorted(failure.failures.items()):
        if isinstance(error, CheckpointError):
            return error
        return CheckpointError(f"On rank {rank}: {type(error).__name__}: {error}")
    return CheckpointError(str(failure))
