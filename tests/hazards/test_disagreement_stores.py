"""Ranks that disagree are told so whatever kind of store they met at."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.hazards.test_disagreement import disagreement, patience
from torch import nn

from fullshard import FullyShardedDataParallel as FSDP
from fullshard.engine.comm.mailbox import own_mailbox
from fullshard.engine.comm.order_check import Agreement
from fullshard.testing import device, ranks
from fullshard.wrap import ModuleWrapPolicy


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, skipped: int | None = None) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index != skipped:
                x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("kind", ["file", "tcp"])
@pytest.mark.parametrize("healthy_steps", [0, 2])
@ranks(2, timeout=40)
def test_a_skipped_unit_is_named(healthy_steps: int, kind: str, tmp_path: Path) -> None:
    rank = dist.get_rank()
    dist.destroy_process_group()
    method = f"file://{tmp_path}/rendezvous" if kind == "file" else "env://"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = FSDP(Layers().to(device()), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    data = torch.ones(2, 4, device=device())
    for _ in range(healthy_steps):
        model(data).backward()
    message = disagreement(lambda: model(data, 1 if rank == 1 else None).backward())
    for part in ("rank 0", "rank 1", "layers.1", "layers.2"):
        assert part in message


@ranks(2, timeout=40)
def test_a_slow_rank_is_waited_for_at_a_file_store_too(tmp_path: Path) -> None:
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=rank, world_size=2
    )
    model = FSDP(Layers().to(device()), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    with patience(0.2):
        for _ in range(2):
            if rank == 1:
                time.sleep(0.7)
            model(torch.ones(2, 4, device=device())).backward()


@ranks(2, timeout=40)
def test_threads_that_train_on_groups_of_their_own_do_not_wait_for_each_other() -> None:
    """On the host: on a GPU all backwards have one thread of autograd's, which gloo makes wait."""
    models = [
        FSDP(
            Layers(),
            process_group=dist.new_group([0, 1]),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        )
        for _ in range(2)
    ]

    def train(model: FSDP) -> None:
        for _ in range(5):
            model(torch.ones(2, 4)).backward()

    with patience(4.0):
        started = time.monotonic()
        threads = [threading.Thread(target=train, args=(model,)) for model in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert time.monotonic() - started < 3.0


class _Counting:
    """A store that counts what torch warns of on some: waits."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.waits = 0

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.waits += 1
        self._store.wait(keys, timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_who_waits_for_long_never_waits_at_the_store_in_vain() -> None:
    shared = dist.HashStore()
    early, late = _Counting(shared), Agreement(shared, rank=1, world_size=2)

    def come_late() -> None:
        time.sleep(1.0)
        late.check(("gather", "unit", 3))

    thread = threading.Thread(target=come_late)
    with patience(0.1):
        thread.start()
        Agreement(early, rank=0, world_size=2).check(("gather", "unit", 3))
    thread.join()
    assert early.waits == 0


@pytest.mark.parametrize("are_introduced", [False, True])
def test_a_group_made_anew_at_the_same_store_hears_nothing_of_the_verdict_on_the_one_before(
    are_introduced: bool,
) -> None:
    store = dist.HashStore()

    def settle(number: int, *operations: tuple[str, str, int]) -> list[str]:
        agreements = [Agreement(store, rank, world_size=2) for rank in range(2)]
        addresses = [own_mailbox("127.0.0.1").open_for(each) for each in agreements]
        said: list[str] = []

        def act(rank: int) -> None:
            agreements[rank].inquiry.begin_as(number)
            if are_introduced:
                agreements[rank].inquiry.note_mailboxes(addresses)
            time.sleep(rank)
            try:
                agreements[rank].check(operations[rank])
            except RuntimeError as error:
                said.append(str(error))

        threads = [threading.Thread(target=act, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return said

    here, there = ("gather", "here", 1), ("gather", "there", 1)
    with patience(0.2):
        assert len(settle(1, here, there)) == 2
        assert settle(2, here, here) == []
