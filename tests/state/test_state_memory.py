"""How much memory state dicts take, by what the allocator says."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.engine.memory import watched_memory
from torch import nn

from fullshard import FullStateDictConfig, StateDictType
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.testing import device, ranks
from fullshard.wrap import ModuleWrapPolicy

WIDTH, UNITS = 768, 6
UNIT = (WIDTH * WIDTH + WIDTH) * 4
#: What Python and the process group take beside.
SMALL = UNIT // 10
# Between GPUs gloo receives into device memory of its own before it fills a buffer.
STAGING = 0 if device().type == "cpu" else UNIT


def stack(use_orig_params: bool) -> FSDP:
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS))).to(device())
    return FSDP(
        layers, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=use_orig_params
    )


@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(4)
def test_rank0_only_holds_one_whole_unit_at_a_time_and_nothing_on_other_ranks(
    use_orig_params: bool,
) -> None:
    model = stack(use_orig_params)
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        model.state_dict()
        with watched_memory() as memory:
            state = model.state_dict()
        on_device = UNITS * UNIT if device().type == "cpu" else 0
        if dist.get_rank() == 0:
            assert len(state) == 2 * UNITS
            assert memory.peak <= on_device + UNIT + STAGING + SMALL, memory
        else:
            assert memory.peak <= SMALL
            assert memory.left <= SMALL


@ranks(4)
def test_a_full_state_dict_everywhere_adds_one_unit_to_what_it_returns() -> None:
    model = stack(True)
    model.state_dict()
    with watched_memory() as memory:
        state = model.state_dict()
    assert memory.peak <= UNITS * UNIT + UNIT + SMALL
    assert abs(memory.left - UNITS * UNIT) <= SMALL
    assert len(state) == 2 * UNITS


@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(4)
def test_loading_a_full_state_dict_takes_no_memory(use_orig_params: bool) -> None:
    model = stack(use_orig_params)
    state = model.state_dict()
    model.load_state_dict(state)
    with watched_memory() as memory:
        model.load_state_dict(state)
    assert memory.peak <= SMALL


@ranks(4)
def test_a_sharded_state_dict_returns_a_share_of_the_model() -> None:
    model = stack(True)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        model.state_dict()
        with watched_memory() as memory:
            state = model.state_dict()
        assert memory.left <= UNITS * UNIT // 4 + SMALL
        assert memory.peak <= UNITS * UNIT // 4 + UNIT + STAGING + SMALL, memory
        with watched_memory() as memory:
            model.load_state_dict(state)
        assert memory.peak <= UNIT + UNIT // 4 + STAGING + SMALL, memory
    assert torch.is_grad_enabled()
