"""How much memory optimizer state dicts take, by what the allocator says."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.engine.memory import watched_memory
from tests.state.optimizers import optim_kind
from tests.state.test_state_memory import SMALL, STAGING, UNIT, UNITS, WIDTH, stack

from fullshard import FullyShardedDataParallel as FSDP
from fullshard.testing import device, ranks

#: What Adam keeps of the whole model.
STATE = 2 * UNITS * UNIT
SHARD = UNIT // 4
# Between GPUs gloo copies what it sends, too.
SENT = 0 if device().type == "cpu" else SHARD


def stepped(use_orig_params: bool) -> tuple[FSDP, torch.optim.Optimizer]:
    model = stack(use_orig_params)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, WIDTH, device=device())).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(4)
def test_rank0_only_holds_one_entry_of_one_unit_at_a_time_and_nothing_on_other_ranks(
    use_orig_params: bool,
) -> None:
    model, optimizer = stepped(use_orig_params)
    with optim_kind(model, "full on the first rank"):
        FSDP.optim_state_dict(model, optimizer)
        with watched_memory() as memory:
            state = FSDP.optim_state_dict(model, optimizer)
        on_host = STATE if device().type == "cpu" else 0
        if dist.get_rank() == 0:
            assert len(state["state"]) == 2 * UNITS
            assert memory.peak <= on_host + UNIT + STAGING + SHARD + SENT + SMALL, memory
        else:
            assert state == {}
            assert memory.peak <= SHARD + SENT + SMALL, memory
            assert memory.left <= SMALL


@ranks(4)
def test_sharded_state_is_a_share_of_it_and_is_made_one_entry_at_a_time() -> None:
    model, optimizer = stepped(True)
    with optim_kind(model, "sharded"):
        FSDP.optim_state_dict(model, optimizer)
        with watched_memory() as memory:
            state = FSDP.optim_state_dict(model, optimizer)
        assert memory.left <= STATE // 4 + SMALL
        assert memory.peak <= STATE // 4 + UNIT + STAGING + SHARD + SMALL, memory
        with watched_memory() as memory:
            found = FSDP.optim_state_dict_to_load(model, optimizer, state)
        assert memory.left <= STATE // 4 + SMALL
        assert memory.peak <= STATE // 4 + UNIT + STAGING + SHARD + SMALL, memory
    assert found["state"]


@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(4)
def test_scattering_sends_each_rank_its_share_alone(use_orig_params: bool) -> None:
    model, optimizer = stepped(use_orig_params)
    full = FSDP.full_optim_state_dict(model, optimizer)
    FSDP.scatter_full_optim_state_dict(full, model, optim=optimizer)
    with watched_memory() as memory:
        FSDP.scatter_full_optim_state_dict(full, model, optim=optimizer)
    # What a rank receives, and then its pieces of it.
    whole = UNIT if dist.get_rank() == 0 else 0
    assert memory.peak <= STATE // 4 + whole + STAGING + 2 * SHARD + SMALL, memory
