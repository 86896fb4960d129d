"""Finds out whether a backend has failed, and why: most likely a rank is gone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

if TYPE_CHECKING:
    from .order_check import Agreement

#: Seconds within which a collective that failed is explained, or raises what the backend said.
EXPLAIN_WITHIN = 6.0
_LOOK_EVERY = 0.05
#: What gloo's errors are known by, which have no type of their own: where they come from.
_OF_GLOO = ("gloo/", "gloo\\")
#: What works say that have succeeded: c10d's number for it.
_SUCCESS = 0


def is_of_backend(error: BaseException) -> bool:
    """Return True if a collective or a store has failed, not the program."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _OF_GLOO)


def is_given_up(work: Any) -> bool:
    """True if the backend gave up a work, which NCCL's then reports as complete."""
    try:
        result = work.get_future_result()
    except (AttributeError, RuntimeError):
        # Its backend does not say.
        return False
    return bool(result.done() and result.value() != _SUCCESS)


def is_broken(reference: Any) -> bool:
    """True if a backend says that a collective of the group, a weak reference, has failed."""
    group = reference()
    for device in group._device_types if group is not None else ():
        # Only NCCL's says so, of any collective: also of the program's own.
        with contextlib.suppress(AttributeError, RuntimeError):
            if group._get_backend(device).get_error() != ErrorType.SUCCESS:
                return True
    return False


def explanation(agreements: Sequence[Agreement], error: BaseException) -> RuntimeError | None:
    """The verdict on what made a backend say ``error``, if one of ``agreements`` finds one."""
    deadline = time.monotonic() + EXPLAIN_WITHIN
    while agreements and time.monotonic() < deadline:
        for agreement in agreements:
            found = agreement.verdict_on_failure()
            if found is not None:
                found.add_note(
                    f"Rank {agreement.inquiry.own_name} was told by its backend: {error}"
                )
                return found
        time.sleep(_LOOK_EVERY)
    return None
