"""What the order check asks of the store: nothing while nobody waits, and little of who waits."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from tests.hazards.test_disagreement import patience
from torch import nn

from fullshard import FullyShardedDataParallel as FSDP
from fullshard.engine.comm.mailbox import Address, own_mailbox
from fullshard.engine.comm.order_check import Agreement
from fullshard.testing import device, ranks

RANKS = 6


class Counting:
    """A store that counts its requests."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.requests = 0

    def __getattr__(self, name: str) -> Any:
        act = getattr(self._store, name)

        def counted(*given: Any) -> Any:
            self.requests += 1
            return act(*given)

        return counted


class Collective:
    """One that completes when it is told to."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def is_completed(self) -> bool:
        return self.done.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        if not self.done.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("Timed out")


def members() -> tuple[list[Counting], list[Agreement]]:
    """Ranks that have done one step, played by threads."""
    shared = dist.HashStore()
    stores = [Counting(shared) for _ in range(RANKS)]
    agreements = [Agreement(store, rank, RANKS) for rank, store in enumerate(stores)]
    mailbox = own_mailbox("127.0.0.1")
    addresses = [Address.unpacked(mailbox.open_for(each).packed()) for each in agreements]
    for each in agreements:
        each.inquiry.mailboxes = addresses
    for _ in range(3):
        everybody(agreements, step)
    return stores, agreements


def step(agreement: Agreement) -> None:
    agreement.check(("forward", "(root)", 0), begins_pass=True)
    for unit in range(3):
        agreement.check(("gather", f"layers.{unit}", 8))


def everybody(agreements: list[Agreement], act: Callable[[Agreement], None]) -> None:
    threads = [threading.Thread(target=act, args=(each,)) for each in agreements]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextmanager
def counted(stores: list[Counting]) -> Iterator[list[int]]:
    """The requests of each rank."""
    before = [store.requests for store in stores]
    found: list[int] = []
    yield found
    found.extend(store.requests - count for store, count in zip(stores, before, strict=True))


def test_a_slow_rank_costs_each_other_a_few_requests_and_known_steps_cost_none_after_it() -> None:
    stores, agreements = members()
    collective = Collective()
    late = threading.Timer(3.0, collective.done.set)
    with patience(0.2), counted(stores) as while_waiting:
        late.start()
        everybody(agreements[1:], lambda each: each.wait(collective))
    assert while_waiting[0] == 0
    # The examiner looks after all of them.
    *others, _examiner = sorted(while_waiting[1:])
    assert max(others) <= 6, while_waiting

    with counted(stores) as afterwards:
        for _ in range(3):
            everybody(agreements, step)
    assert afterwards == [0] * RANKS


@ranks(2)
def test_a_process_group_that_is_destroyed_is_freed() -> None:
    group = dist.new_group()
    model = FSDP(nn.Linear(4, 4).to(device()), process_group=group)
    for _ in range(2):
        model(torch.ones(2, 4, device=device())).sum().backward()
    freed = weakref.ref(group)
    dist.destroy_process_group(group)
    del model, group
    gc.collect()
    assert freed() is None
