"""Stages of torch's pipelines that fully_shard or replicate was applied to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.compat.installed import installed
from tests.fully_shard.side_by_side import Block
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

import fullshard
from fullshard.testing import device, ranks

MICROBATCHES, STEPS = 4, 2


def blocks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block(5).to(device()) for _ in range(4)]


def data(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs, targets = torch.randn(2, 8, 5, generator=generator).to(device())
    return inputs, targets


def train_bare(ranks: int) -> tuple[list[nn.Module], list[float]]:
    model = nn.Sequential(*blocks())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        pairs = (data(step, rank) for rank in range(ranks))
        parts = [
            nn.functional.mse_loss(model(x), y)
            for inputs, targets in pairs
            for x, y in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True)
        ]
        loss = torch.stack(parts).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return list(model), losses


def train_pipeline(
    apply: Any, schedule: Any, stages_per_rank: int, **options: Any
) -> tuple[dict[int, nn.Module], list[float]]:
    """The blocks of this rank's stages, by number, and the losses that the last rank has."""
    mesh = init_device_mesh(
        device().type, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "pp")
    )
    dp, pp = mesh["dp"], mesh["pp"]
    everything, length = blocks(), 2 // stages_per_rank
    numbers = range(pp.get_local_rank(), 2 * stages_per_rank, 2)
    mine = {n: everything[n] for at in numbers for n in range(at * length, (at + 1) * length)}
    stages = []
    for at in numbers:
        module = nn.Sequential(*everything[at * length : (at + 1) * length])
        for part in (*module, module):
            apply(part, mesh=dp, **options)
        stages.append(PipelineStage(module, at, len(numbers) * 2, device(), group=pp.get_group()))
    pipeline = schedule(
        stages if stages_per_rank > 1 else stages[0],
        MICROBATCHES,
        loss_fn=nn.functional.mse_loss,
    )
    optimizer = torch.optim.SGD([p for block in mine.values() for p in block.parameters()], lr=0.1)
    losses = []
    for step in range(STEPS):
        inputs, targets = data(step, dp.get_local_rank())
        found: list[torch.Tensor] = []
        last = {"target": targets, "losses": found} if stages[-1].is_last else {}
        pipeline.step(*((inputs,) if stages[0].is_first else ()), **last)
        optimizer.step()
        optimizer.zero_grad()
        if found:
            mean = torch.stack(found).mean()
            dist.all_reduce(mean, group=dp.get_group())
            losses.append(mean.item() / dp.size())
    return mine, losses


@pytest.mark.filterwarnings("ignore")
@ranks(4)
@pytest.mark.parametrize(
    ("schedule", "stages_per_rank", "kept"),
    [
        (ScheduleGPipe, 1, True),
        (Schedule1F1B, 1, False),
        (Schedule1F1B, 1, None),
        (ScheduleInterleaved1F1B, 2, True),
        (ScheduleInterleaved1F1B, 2, None),
    ],
)
def test_a_pipeline_trains_as_the_bare_model(
    schedule: Any, stages_per_rank: int, kept: bool | None
) -> None:
    """``kept`` are the full parameters after forward; ``None`` stands for ``replicate``."""
    bare, expected = train_bare(dist.get_world_size() // 2)

    with installed():
        if kept is None:
            mine, losses = train_pipeline(fullshard.replicate, schedule, stages_per_rank)
        else:
            mine, losses = train_pipeline(
                fullshard.fully_shard, schedule, stages_per_rank, reshard_after_forward=not kept
            )

    if losses:
        torch.testing.assert_close(losses, expected)
    with torch.no_grad():
        for number, block in mine.items():
            with fullshard.summon_full_params(block):
                pairs = zip(block.parameters(), bare[number].parameters(), strict=True)
                for ours, reference in pairs:
                    torch.testing.assert_close(ours, reference)


@ranks(2)
def test_gradients_that_were_kept_are_reduced_when_that_is_asked_for() -> None:
    found: list[list[Any]] = []
    for by_backward in (True, False):
        model: Any = nn.Sequential(*blocks())
        for block in model[:2]:
            fullshard.fully_shard(block)
        fullshard.fully_shard(model)
        state: Any = fullshard.fully_shard.state(model)  # type: ignore[attr-defined]
        model.set_requires_gradient_sync(by_backward)
        model(data(0, dist.get_rank())[0]).sum().backward()
        if not by_backward:
            assert all(p.grad is None for p in model.parameters())
            state._fsdp_param_group.post_backward()
            assert all(p.grad is None for p in model.parameters())  # still not asked for
            model.set_requires_gradient_sync(True)
            for other in state._state_ctx.all_states:
                for group in other._fsdp_param_groups:
                    group.post_backward()
            state._root_post_backward_final_callback()
        found.append([p.grad.to_local() for p in model.parameters()])
        model(data(1, dist.get_rank())[0]).sum().backward()
    torch.testing.assert_close(found[1], found[0])


@ranks(2)
def test_a_state_is_that_of_the_module_and_of_no_other() -> None:
    model = fullshard.fully_shard(nn.Sequential(nn.ReLU(), fullshard.fully_shard(nn.Linear(2, 2))))
    state_of: Any = fullshard.fully_shard.state  # type: ignore[attr-defined]

    assert state_of(model) is model._get_fsdp_state()
    assert state_of(model)._fsdp_param_group is None
    assert state_of(model[1])._fsdp_param_group is not None
    assert state_of(model[0]) is None
