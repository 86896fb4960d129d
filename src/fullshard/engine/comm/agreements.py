"""The agreement of each process group: one, shared by all that use the group, or none."""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import weakref
from typing import Any, NoReturn

import torch.distributed as dist

from . import departure, failures, order_check
from .announcement import announcements_of
from .backends import is_gloo
from .introductions import leave_address
from .order_check import Agreement
from .order_table import OrderTable
from .watcher import watch

#: Set to "0" to start operations without agreeing on them.
SWITCH = "FULLSHARD_ORDER_CHECK"


class NoAgreement:
    """For groups of one rank, groups without a store, and when the check is switched off."""

    order: OrderTable | None = None

    def issue(self, work: Any) -> None:
        pass

    def note_capturing(self, active: bool) -> None:
        pass

    def check(self, asked: tuple[str, str, int], begins_pass: bool = False) -> None:
        pass

    def wait(self, work: Any) -> None:
        work.wait()

    def instead(self, verb: str, unit: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def explain(self, error: RuntimeError) -> NoReturn:
        raise error


#: How many groups of each name this process has had. A name comes again after its group is
#: destroyed, perhaps with the same store.
_made: collections.Counter[str] = collections.Counter()
_agreements: weakref.WeakKeyDictionary[Any, Agreement | NoAgreement] = weakref.WeakKeyDictionary()


def agreement_for(group: Any) -> Agreement | NoAgreement:
    """The agreement of ``group``; made once, shared by every unit that uses the group."""
    agreement = _agreements.get(group)
    if agreement is None:
        agreement = _agreements[group] = _make(group)
    return agreement


def _make(group: Any) -> Agreement | NoAgreement:
    if os.environ.get(SWITCH) == "0" or group.size() == 1:
        return NoAgreement()
    backend, store = dist.distributed_c10d._world.pg_map.get(group, (None, None))
    if store is None or backend == "fake":
        return NoAgreement()
    names = dist.get_process_group_ranks(group)
    agreement = Agreement(
        store,
        group.rank(),
        group.size(),
        _timeout_of(group),
        announcements_of(group),
        names,
        functools.partial(_is_destroyed, weakref.ref(group)),
    )
    agreement.inquiry.note_store(ends_with_first=names[0] == 0 and not _agent_has_store())
    if not is_gloo(group):
        agreement.inquiry.note_waiting("at or before")
        agreement.issued.backend_failed = functools.partial(failures.is_broken, weakref.ref(group))
        watch(agreement, group, order_check.PATIENCE)
    departure.leave_word_of(agreement)
    _made[group.group_name] += 1
    number = _made[group.group_name]
    agreement.inquiry.begin_as(number)
    agreement.inquiry.find_mailbox = leave_address(agreement, group.rank(), store, number)
    return agreement


def _is_destroyed(reference: Any) -> bool:
    return reference() not in dist.distributed_c10d._world.pg_map


def _agent_has_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _timeout_of(group: Any) -> float:
    """Seconds after which the group's collectives fail, by the most patient of its backends."""
    timeouts = []
    for device in group._device_types:
        with contextlib.suppress(AttributeError, RuntimeError):
            timeouts.append(group._get_backend(device).options._timeout.total_seconds())
    return max(timeouts, default=order_check.LAST_RESORT)
