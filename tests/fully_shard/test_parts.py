"""Full parameters that a forward leaves to a few ranks, as reshard_after_forward=int asks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.fully_shard.side_by_side import (
    OURS,
    THEIRS,
    both,
    build,
    by_block,
    forward_loss,
    told,
)
from tests.fully_shard.test_communication import AllGather
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard.testing import ranks


def shown(model: Any) -> dict[str, Any]:
    found = {}
    for name, parameter in model.named_parameters():
        mesh = parameter.device_mesh
        found[name] = (told(parameter), mesh.shape, mesh.mesh.tolist(), parameter.requires_grad)
    return found


@ranks(4)
def test_training_and_what_is_shown_after_forward_are_torchs() -> None:
    between: dict[Any, Any] = {}

    def step_with(api: Any, model: Any, step: int) -> torch.Tensor:
        loss = forward_loss(model, step)
        between[api] = shown(model)
        loss.backward()
        return loss

    both(by_block(reshard_after_forward=2), step_with=step_with)

    theirs, ours = between[THEIRS], between[OURS]
    assert list(ours) == list(theirs)
    for name, (values, *facts) in theirs.items():
        assert ours[name][1:] == tuple(facts), name
        assert ours[name][0][:-1] == values[:-1], name
        if values[0][0] % 2 == 0:
            # Where rows are uneven, what torch shows is not what it computes with.
            torch.testing.assert_close(ours[name][0][-1], values[-1])


@ranks(4)
def test_uneven_parts_show_what_they_hold() -> None:
    model: Any = build()
    with torch.no_grad():
        model.blocks[0].norm.weight.copy_(torch.arange(5.0))
    by_block(reshard_after_forward=2)(OURS, model)

    forward_loss(model, 0)

    rows = torch.arange(5.0).chunk(2)[dist.get_rank() % 2]
    torch.testing.assert_close(model.blocks[0].norm.weight.to_local().detach(), rows)


@ranks(4)
def test_mixed_precision_copies_and_accumulation_go_with_parts() -> None:
    def accumulate(api: Any, model: Any, step: int) -> torch.Tensor:
        model.set_requires_gradient_sync(False)
        forward_loss(model, step + 5).backward()
        model.set_requires_gradient_sync(True)
        loss = forward_loss(model, step)
        loss.backward()
        return loss

    both(by_block(reshard_after_forward=2), step_with=accumulate)

    def lowered(api: Any, model: Any) -> None:
        policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        by_block(reshard_after_forward=2, mp_policy=policy)(api, model)

    both(lowered, tolerance=2e-2)


@ranks(4)
def test_backward_gathers_over_the_few_ranks() -> None:
    sizes: dict[Any, list[int]] = {}
    for api in (THEIRS, OURS):
        model: Any = build()
        by_block(reshard_after_forward=2)(api, model)
        gather = AllGather()
        model.blocks[1].set_custom_all_gather(gather)
        for step in range(2):
            forward_loss(model, step).backward()
        sizes[api] = [group.size() for *_, group in gather.calls]

    assert sizes[OURS] == sizes[THEIRS] == [4, 2, 4, 2]


@ranks(4)
def test_a_rank_keeps_its_part_of_the_memory_between_forward_and_backward() -> None:
    for few in (2, 4):
        model: Any = build()
        by_block(reshard_after_forward=few)(OURS, model)
        loss = forward_loss(model, 0)
        unit = model.blocks[0]._fullshard_module_unit.unit
        kept = (
            0
            if unit.parts is None
            else sum(p.gather_input.untyped_storage().nbytes() for p in unit.parts.held)
        )
        full = [handle.allocated_buffer() for handle in unit.handles]
        assert full == [None]
        numel = sum(parameter.numel() for parameter in build().blocks[0].parameters())  # type: ignore[union-attr,index]
        if few == 4:
            assert kept == 0
        else:
            # Half of the elements, and padding of less than a row for each parameter.
            assert numel * 4 / 2 <= kept < numel * 4 * 0.75
        loss.backward()
        assert not (unit.parts is not None and unit.parts.held)


@ranks(4)
def test_parts_go_when_they_are_not_wanted_any_more() -> None:
    model: Any = build()
    by_block(reshard_after_forward=2)(OURS, model)
    whole = [p.shape for p in build().parameters()]

    forward_loss(model, 0)
    model.blocks[0].reshard()
    assert model.blocks[0].up.weight.device_mesh.ndim == 1
    assert model.blocks[1].up.weight.device_mesh.ndim == 2
    assert all(
        v.device_mesh.ndim == 1 for v in model.state_dict().values() if isinstance(v, DTensor)
    )

    # A second forward begins with what optimizers changed, not with what the first left.
    loss = forward_loss(model, 0)
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    doubled = forward_loss(model, 0)
    model.set_reshard_after_forward(True)
    assert [p.shape for p in model.parameters()] == whole
    other: Any = build()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2.0)
    torch.testing.assert_close(doubled.item(), forward_loss(other, 0).item())
    with pytest.raises(IndexError):
        model(torch.full((2, 2), 99))
    assert all(p.device_mesh.ndim == 1 for p in model.parameters())


@ranks(4)
def test_recomputation_uses_the_parts() -> None:
    def step_with(api: Any, model: Any, step: int) -> torch.Tensor:
        hidden = torch.ones(2, 5, requires_grad=True)
        for block in model.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        loss = hidden.square().mean()
        loss.backward()
        return loss

    def shard(api: Any, model: Any) -> None:
        for block in model.blocks:
            api.fully_shard(block, reshard_after_forward=2)

    both(shard, step_with=step_with)


@ranks(4)
def test_parts_of_shards_with_copies_are_those_of_the_shards() -> None:
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("replicate", "shard"))

    both(by_block(mesh=mesh, reshard_after_forward=2))


@ranks(2)
def test_one_rank_to_reshard_to_keeps_parameters_with_a_warning() -> None:
    model: Any = build()
    with pytest.warns(UserWarning, match="reshard_after_forward=1"):
        fullshard.fully_shard(model, reshard_after_forward=1)

    forward_loss(model, 0)
    assert not isinstance(model.head.weight, DTensor)
