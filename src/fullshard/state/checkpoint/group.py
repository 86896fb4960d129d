"""Runs functions on all ranks so that an error on one rank is raised on all of them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ...engine.comm.disagreement import RankLostError, RanksDisagreeError
from ...engine.comm.process_groups import is_alive
from .errors import CheckpointError

Result = TypeVar("Result")

_groups: dict[Any, Any] = {}


class CheckpointGroup:
    """The ranks that save or load one checkpoint, or one process without ranks.

    They communicate over a gloo process group of their own, so that a save in the background does
    not interfere with the collectives of training.
    """

    def __init__(self) -> None:
        self.group: Any = None
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

    def checkpointing(self) -> contextlib.AbstractContextManager[None]:
        """A context for calls of torch.distributed.checkpoint."""
        return _without_group_warning() if self.group is None else contextlib.nullcontext()

    def on_first_rank(self, function: Callable[[], Result]) -> Result:
        """Call ``function`` on the first rank; return its result, or raise its error, on all."""
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            outcome = list(_attempt(function))
        if self.group is not None:
            dist.broadcast_object_list(outcome, src=0, group=self.group)
        result, error = outcome
        if error is not None:
            raise error
        return result

    def on_all_ranks(self, function: Callable[[], Result]) -> Result:
        """Call ``function`` on every rank; raise the first failing rank's error on all of them."""
        result, error = _attempt(function)
        errors: list[Any] = [error] * self.size
        if self.group is not None:
            dist.all_gather_object(errors, error, group=self.group)
        for found in errors:
            if found is not None:
                raise found
        return result


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
