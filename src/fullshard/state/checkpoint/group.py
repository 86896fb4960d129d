"""Steps that all ranks take together: what fails on one rank fails on all, with the same error."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ...engine.comm.process_groups import is_alive
from .errors import CheckpointError

Result = TypeVar("Result")

_groups: dict[Any, Any] = {}


class CheckpointGroup:
    """The ranks that save or load one checkpoint, or one process alone.

    They speak over a group of their own, so that a save in the background does not get between
    the collectives of training, and on the host, whatever training uses.
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
        """Around calls of torch.distributed.checkpoint."""
        return _meant_alone() if self.group is None else contextlib.nullcontext()

    def first_decides(self, decide: Callable[[], Result]) -> Result:
        """What ``decide`` returns on the first rank, on every rank."""
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            outcome = list(_attempt(decide))
        if self.group is not None:
            dist.broadcast_object_list(outcome, src=0, group=self.group)
        result, error = outcome
        if error is not None:
            raise error
        return result

    def each(self, function: Callable[[], Result]) -> Result:
        """Call ``function`` on every rank; raise on all what it raised on the first that failed."""
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
    except (CheckpointError, FileNotFoundError, TypeError, ValueError) as error:
        return None, error
    except Exception as error:
        return None, CheckpointError(f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def _meant_alone() -> Iterator[None]:
    """torch.distributed.checkpoint warns of a process without a group: here it is meant so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def explain(failure: CheckpointException) -> CheckpointError:
    """What torch.distributed.checkpoint says went wrong, in one sentence."""
    for rank, (error, _) in sorted(failure.failures.items()):
        if isinstance(error, CheckpointError):
            return error
        return CheckpointError(f"On rank {rank}: {type(error).__name__}: {error}")
    return CheckpointError(str(failure))
