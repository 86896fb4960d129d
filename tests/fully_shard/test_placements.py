"""Some of a module's parameters, such as experts, shared over a mesh of their own, as torch's."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.fully_shard.side_by_side import (
    OURS,
    THEIRS,
    Training,
    assert_same_training,
    sgd,
    skip_without_collectives_of_dtensors,
    told,
    train,
    whole,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fullshard
from fullshard.testing import device, ranks

COMMON: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_common")

pytestmark = pytest.mark.skipif(
    not hasattr(COMMON, "ShardPlacementResult"),
    reason="this version of torch has no ShardPlacementResult to compare with",
)


class Experts(nn.Module):
    """A gate, and experts in two parameters; ``mine`` are those that this rank computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)
        self.up = nn.Parameter(torch.randn(4, 4, 6) * 0.3)
        self.down = nn.Parameter(torch.randn(4, 6, 4) * 0.3)
        self.mine = slice(0, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        weights = self.gate(x).softmax(-1)[:, self.mine]
        hidden = torch.relu(torch.einsum("bi,eij->ebj", x, up))
        return x + torch.einsum("ebj,ejk,be->bk", hidden, down, weights)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Experts(), Experts()).to(device())


def mesh_of(*names: str) -> DeviceMesh:
    shape = (2, dist.get_world_size() // 2) if len(names) == 2 else (dist.get_world_size(),)
    return init_device_mesh(device().type, shape, mesh_dim_names=names)


def over(kind: str) -> Any:
    """Torch's description of the experts' mesh: two dimensions, the inner or the outer one."""
    mesh = mesh_of("outer", "inner")
    if kind == "both":
        return COMMON.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    return COMMON.FSDPMeshInfo(mesh[kind], shard_mesh_dim=0)


def shard_experts(api: Any, model: Any, info: Any, dim: int | None = 0, **options: Any) -> None:
    for module in model:
        experts = {module.up, module.down}

        def place(parameter: nn.Parameter, experts: set[nn.Parameter] = experts) -> Any:
            asked = None if dim is None else Shard(dim)
            return COMMON.ShardPlacementResult(asked, info) if parameter in experts else None

        api.fully_shard(module, shard_placement_fn=place, **options)
    api.fully_shard(model)


def one_step(_: Any, model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    batch = torch.randn(3, 4, generator=generator).to(device())
    loss = model(batch).float().square().mean()
    loss.backward()
    return loss


def both(kind: str, step_with: Any = one_step, **options: Any) -> tuple[Training, Training]:
    def shard(api: Any, model: Any) -> None:
        shard_experts(api, model, over(kind), **options)

    theirs = train(THEIRS, shard, sgd, make=build, step_with=step_with)
    ours = train(OURS, shard, sgd, make=build, step_with=step_with)
    assert_same_training(ours, theirs)
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert mine.device_mesh == other.device_mesh  # type: ignore[attr-defined]
    return ours, theirs


@ranks(4)
def test_training_is_torchs_over_a_part_of_the_ranks_and_over_copies() -> None:
    both("inner")
    both("outer", dim=1)
    both("inner", dim=None)
    ours, _ = both("both", reshard_after_forward=False)
    placements = [p.placements for p in ours.model[0].parameters()]  # type: ignore[index]
    assert len({str(p) for p in placements}) == 2


@ranks(4)
def test_gradients_accumulate_and_few_ranks_keep_parts_as_under_torchs() -> None:
    def accumulate(api: Any, model: Any, step: int) -> torch.Tensor:
        model.set_requires_gradient_sync(False)
        one_step(api, model, 50 + step)
        model.set_requires_gradient_sync(True)
        model[0].set_modules_to_forward_prefetch([model[1]])
        model[1].set_modules_to_backward_prefetch([model[0]])
        return one_step(api, model, step)

    both("both", accumulate)
    both("inner", reshard_after_forward=2)


@ranks(4)
def test_experts_that_are_distributed_already_train_as_torchs() -> None:
    """As torchtitan does: every parameter names a mesh, and experts are DTensors on another one."""

    def shard(api: Any, model: Any) -> None:
        meshes, everyone = mesh_of("outer", "inner"), mesh_of("dp")
        part, all_of = (
            COMMON.FSDPMeshInfo(meshes["outer"], shard_mesh_dim=0),
            COMMON.FSDPMeshInfo(everyone, shard_mesh_dim=0),
        )
        for module in model:
            for name in ("up", "down"):
                found = distribute_tensor(
                    getattr(module, name).detach(), meshes["inner"], [Shard(0)]
                )
                setattr(module, name, nn.Parameter(found))
            first = 2 * meshes["inner"].get_local_rank()
            module.mine = slice(first, first + 2)
            experts = {module.up, module.down}

            def place(parameter: nn.Parameter, experts: set[nn.Parameter] = experts) -> Any:
                info = part if parameter in experts else all_of
                return COMMON.ShardPlacementResult(Shard(0), info)

            api.fully_shard(module, mesh=everyone, shard_placement_fn=place)
        api.fully_shard(model, mesh=everyone)

    theirs = train(THEIRS, shard, make=build, step_with=one_step)
    ours = train(OURS, shard, make=build, step_with=one_step)
    assert_same_training(ours, theirs)


@ranks(4)
def test_units_of_one_module_are_unsharded_and_resharded_together() -> None:
    model: Any = build()
    shard_experts(OURS, model, over("inner"))
    model(torch.ones(2, 4, device=device())).sum().backward()
    sharded = [told(p) for p in model[0].parameters()]

    handle = model[0].unshard(async_op=True)
    handle.wait()
    assert [tuple(p.shape) for p in model[0].parameters()] == [(4, 4, 6), (4, 6, 4), (4, 4), (4,)]
    assert not any(isinstance(p, DTensor) for p in model[0].parameters())
    model[0].reshard()

    assert [str(told(p)) for p in model[0].parameters()] == list(map(str, sharded))


@ranks(4)
def test_the_norm_of_gradients_is_that_of_all_meshes() -> None:
    """Torch refuses to clip them (2.13): they are on different meshes."""
    skip_without_collectives_of_dtensors()
    model: Any = build()
    shard_experts(OURS, model, over("both"))
    one_step(OURS, model, 0)
    expected = torch.stack([whole(p.grad).norm() for p in model.parameters()]).norm()

    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    torch.testing.assert_close(norm.full_tensor(), expected)
    clipped = torch.stack([whole(p.grad).norm() for p in model.parameters()]).norm()
    torch.testing.assert_close(clipped, torch.tensor(0.01), rtol=1e-3, atol=0)


@ranks(4)
def test_a_training_goes_on_with_and_without_meshes_of_their_own(tmp_path: Path) -> None:
    def make(*, experts: bool) -> tuple[Any, torch.optim.Optimizer]:
        model: Any = build()
        if experts:
            shard_experts(OURS, model, over("both"))
        else:
            fullshard.fully_shard(model)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        one_step(OURS, model, number)
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = make(experts=True)
    step(model, optimizer, 0)
    fullshard.save(tmp_path / "ours", model, optimizer, step=1)
    states = dict(zip("mo", get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=tmp_path / "torchs")
    step(model, optimizer, 1)
    with fullshard.summon_full_params(model):
        expected = {name: p.detach().clone() for name, p in model.named_parameters()}

    plain, plains = make(experts=False)
    fullshard.resume(tmp_path / "ours", plain, plains)
    again, agains = make(experts=True)
    states = dict(zip("mo", get_state_dict(again, agains), strict=True))
    dcp.load(states, checkpoint_id=tmp_path / "torchs")
    set_state_dict(again, agains, model_state_dict=states["m"], optim_state_dict=states["o"])
    for other, others in ((plain, plains), (again, agains)):
        step(other, others, 1)
        with fullshard.summon_full_params(other):
            for name, parameter in other.named_parameters():
                torch.testing.assert_close(parameter, expected[name])


@ranks(2)
def test_what_a_placement_cannot_be_is_refused() -> None:
    mesh = mesh_of("dp")
    info = COMMON.FSDPMeshInfo(mesh, shard_mesh_dim=0)
    cases: list[tuple[Any, type[Exception], str]] = [
        (Shard(2), AssertionError, "Shard dim 2 is invalid for 2D tensor"),
        ((Shard(0), mesh), ValueError, "Invalid shard_placement_fn result"),
        (COMMON.ShardPlacementResult("rows", info), ValueError, "Invalid shard_placement_fn"),
        (COMMON.ShardPlacementResult(Shard(1), info), NotImplementedError, "uneven sharding"),
    ]
    for placement, kind, words in cases:
        module = nn.Linear(3, 4, bias=False)
        with pytest.raises(kind, match=words):
            fullshard.fully_shard(module, shard_placement_fn={module.weight: placement}.get)
    wrong = COMMON.FSDPMeshInfo(mesh_of("outer", "inner"), shard_mesh_dim=1)
    with pytest.raises(NotImplementedError, match=r"'weight'.*pass FSDPMeshInfo\(mesh"):
        fullshard.fully_shard(
            nn.Linear(4, 4),
            shard_placement_fn=lambda _: COMMON.ShardPlacementResult(Shard(0), wrong),
        )
