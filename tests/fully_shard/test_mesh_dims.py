"""Data-parallel dimensions of a mesh on which parameters are DTensors already, as torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from tests.fully_shard.side_by_side import OURS, THEIRS, assert_same, told
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fullshard
from fullshard.testing import ranks

pytestmark = pytest.mark.skipif(
    not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"),
    reason="this version of torch has no dp_mesh_dims to compare with",
)


def build() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 12, bias=False), nn.ReLU(), nn.Linear(12, 8, bias=False))


def distribute(model: nn.Module, mesh: DeviceMesh, placements: dict[str, Any]) -> nn.Module:
    for path, parameter in list(model.named_parameters()):
        owner = model.get_submodule(path.rpartition(".")[0])
        placed = distribute_tensor(parameter.detach(), mesh, placements[path])
        owner.weight = nn.Parameter(placed)
    return model


def train(
    api: Any, dims: Any, mesh: DeviceMesh, placements: dict[str, Any], of_inputs: Any
) -> list[Any]:
    """What users see of two steps with inputs that are DTensors, too."""
    model: Any = distribute(build(), mesh, placements)
    options = {"mesh": mesh, "dp_mesh_dims": api.DataParallelMeshDims(**dims)}
    api.fully_shard(model[0], **options)
    api.fully_shard(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen: list[Any] = [[told(p) for p in model.parameters()]]
    names = [p.device_mesh.mesh_dim_names for p in model.parameters()]
    for step in range(2):
        torch.manual_seed(step)
        batch = distribute_tensor(torch.randn(8, 8), mesh, of_inputs)
        inside: list[Any] = []
        hook = model[0].register_forward_pre_hook(
            lambda module, _, inside=inside: inside.append(str(module.weight.placements))
        )
        loss = model(batch).square().mean()
        hook.remove()
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        loss.backward()
        seen += [[told(p.grad) for p in model.parameters()], loss.item(), inside]
        optimizer.step()
        optimizer.zero_grad()
        seen.append([told(p) for p in model.parameters()])
    return [names, *seen]


def assert_alike(found: Any, expected: Any, case: str) -> None:
    if isinstance(expected, list):
        for index, pair in enumerate(zip(found, expected, strict=True)):
            assert_alike(*pair, f"{case}, {index}")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected), case
    elif isinstance(expected, tuple) and isinstance(expected[-1], torch.Tensor):
        assert_same(found, expected, case)
    else:
        assert found == expected, case


R, TWO = Replicate(), ("a", "b")
COLUMN_ROW = {"0.weight": [R, Shard(0)], "2.weight": [R, Shard(1)]}
WHOLE = {"0.weight": [R, R], "2.weight": [R, R]}
CASES: list[tuple[dict[str, Any], dict[str, Any], Any]] = [
    ({"shard": "a"}, COLUMN_ROW, [Shard(0), R]),
    ({"shard": "a"}, WHOLE, [R, R]),
    ({"shard": TWO}, WHOLE, [Shard(0), Shard(0)]),
    ({"shard": "b", "replicate": "a"}, WHOLE, [Shard(0), Shard(0)]),
    ({"replicate": "a"}, COLUMN_ROW, [Shard(0), R]),
]


@pytest.mark.filterwarnings("ignore")
@ranks(4)
def test_training_is_torchs() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=TWO)
    for dims, placements, of_inputs in CASES:
        theirs, ours = (train(api, dims, mesh, placements, of_inputs) for api in (THEIRS, OURS))
        assert_alike(ours, theirs, str(dims))


@pytest.mark.filterwarnings("ignore")
@ranks(4)
def test_several_dimensions_of_shards_become_one_beside_others() -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))
    placements = {"0.weight": [R, R, Shard(0)], "2.weight": [R, R, Shard(1)]}
    for dims in ({"shard": ("a", "b")}, {"shard": "b", "replicate": "a"}):
        theirs, ours = (
            train(api, dims, mesh, placements, [Shard(0), R, R]) for api in (THEIRS, OURS)
        )
        assert_alike(ours, theirs, str(dims))


REFUSED: list[tuple[str, Callable[[Any, DeviceMesh], Any]]] = [
    ("no name", lambda api, mesh: {"mesh": None}),
    ("unnamed", lambda api, mesh: {"mesh": init_device_mesh("cpu", (1, 2))}),
    ("unknown", lambda api, mesh: {"dp_mesh_dims": api.DataParallelMeshDims(shard="x")}),
    ("plain", lambda api, mesh: {"module": nn.Linear(4, 4)}),
    ("sharded", lambda api, mesh: {"placements": [Shard(0), R]}),
]


@ranks(2)
def test_what_torch_refuses_is_refused_with_its_words() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=TWO)
    for name, options_of in REFUSED:
        errors: list[Exception] = []
        for api in (THEIRS, OURS):
            options: dict[str, Any] = {
                "mesh": mesh,
                "dp_mesh_dims": api.DataParallelMeshDims(shard="a"),
                **options_of(api, mesh),
            }
            placements = options.pop("placements", [R, R])
            module = options.pop("module", None)
            if module is None:
                module = nn.Linear(4, 4, bias=False)
                module.weight = nn.Parameter(
                    distribute_tensor(module.weight.detach(), mesh, placements)
                )
            with pytest.raises(Exception) as caught:
                api.fully_shard(module, **options)
            errors.append(caught.value)
        assert type(errors[1]) is type(errors[0]), name
        assert str(errors[0]).rstrip(".") in str(errors[1]).replace(" ('weight')", ""), errors


@ranks(2)
def test_a_dimension_cannot_be_both_of_shards_and_of_copies() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=TWO)
    dims = fullshard.DataParallelMeshDims(shard="a", replicate="a")

    with pytest.raises(ValueError, match=r"different dimensions of \('a', 'b'\)"):
        fullshard.fully_shard(nn.Linear(4, 4), mesh=mesh, dp_mesh_dims=dims)
    with pytest.raises(ValueError, match="At least one of shard or replicate"):
        fullshard.DataParallelMeshDims()
