"""Finds out why a backend has failed: most likely a rank is gone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from .order_check import Agreement

#: Seconds within which a collective that failed is explained, or raises what the backend said.
EXPLAIN_WITHIN = 6.0
_LOOK_EVERY = 0.05
#: What gloo's errors are known by, which have no type of their own: where they come from.
_OF_GLOO = ("gloo/", "gloo\\")


def is_of_backend(error: BaseException) -> bool:
    """Return True if a collective or a store has failed, not the program."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _OF_GLOO)


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
