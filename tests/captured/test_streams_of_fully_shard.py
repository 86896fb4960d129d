"""``fully_shard`` over streams that follow CUDA's rules of capture and memory: no GPU is needed."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.captured.capture_rules import Machine, Raced, Ranks
from tests.captured.test_stream_rules import CPU, Block, machine, take_turns
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fullshard import Communication, MixedPrecisionPolicy, fully_shard
from fullshard.engine.comm.collectives import group_for
from fullshard.engine.comm.streams import AcceleratorStreams

__all__ = ["machine"]


@pytest.fixture
def four_ranks() -> Generator[None, None, None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def chain(machine: Machine, reshards: bool | int, communication: Any = None) -> Any:
    """A model whose collectives run on streams of the machine."""
    mesh = init_device_mesh("cpu", (4,))
    options: Any = {
        "mesh": mesh,
        "reshard_after_forward": reshards,
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        "communication": communication,
    }
    model = nn.Sequential(*[Block() for _ in range(3)])
    for module in (*model, model):
        fully_shard(module, **options)
        unit: Any = module._fullshard_module_unit
        unit.unit.shards = group_for(Ranks(machine, 4), CPU)
        if unit.unit.parts is not None:
            unit.unit.parts.group = group_for(Ranks(machine, 2), CPU)
    return model


def step(model: Any) -> None:
    model(torch.ones(2, 3)).float().sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter._local_tensor.sub_(parameter.grad._local_tensor)
    model.zero_grad()


@pytest.mark.parametrize("reshards", [True, False, 2])
def test_streams_wait_for_each_other(
    machine: Machine, four_ranks: None, reshards: bool | int
) -> None:
    take_turns(machine, chain(machine, reshards), step)


def test_streams_wait_for_each_other_where_fewer_bytes_are_sent(
    machine: Machine, four_ranks: None
) -> None:
    encoded = Communication(all_gather_dtype=torch.int8, reduce_dtype=torch.int8)
    take_turns(machine, chain(machine, True, encoded), step)


@pytest.mark.parametrize(
    "wait", ["gather_may_write", "gather_after_compute", "compute_after_gather"]
)
def test_none_of_the_waits_could_be_left_out(
    machine: Machine, four_ranks: None, monkeypatch: pytest.MonkeyPatch, wait: str
) -> None:
    model = chain(machine, True)
    monkeypatch.setattr(AcceleratorStreams, wait, lambda _: None)
    with pytest.raises(Raced):
        take_turns(machine, model, step)
