"""What local and sharded state dicts hold on each rank."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.original.training import Net, build
from tests.state.models import SHARDED_KINDS, Odd, assert_same_state, kind, wipe, wrapped
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import LocalStateDictConfig, ShardingStrategy, StateDictType
from fullshard.testing import device, ranks

FULL_SHARD = ShardingStrategy.FULL_SHARD


def whole(value: DTensor) -> torch.Tensor:
    """All rows of a value whose rows are shared by a line of ranks."""
    if device().type == "cpu":
        return value.full_tensor()
    # DTensor's own gather of GPU tensors over gloo ends the process.
    rows: list[torch.Tensor] = [torch.empty(0)] * value.device_mesh.size(-1)
    dist.all_gather_object(rows, value.to_local().cpu(), value.device_mesh.get_group(-1))
    return torch.cat(rows).to(device())


@ranks(3)
def test_a_local_state_dict_has_this_ranks_shard_of_every_unit() -> None:
    model = wrapped(build(Net), FULL_SHARD, "blocks")
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        state = model.state_dict()
        with pytest.raises(RuntimeError, match="whole units"):
            model.module.head.state_dict()
    assert list(state) == ["_flat_param", *(f"blocks.{i}._flat_param" for i in range(3))]
    flat = state["blocks.1._flat_param"]
    (shard,) = flat.local_shards()
    start = shard.metadata.shard_offsets[0]
    with FSDP.summon_full_params(model):
        whole = torch.cat([p.detach().flatten() for p in model.blocks[1].parameters()])
    assert flat.metadata().size == whole.shape
    assert torch.equal(shard.tensor, whole[start : start + len(shard.tensor)])
    many = wrapped(build(Odd), FULL_SHARD, "one unit", use_orig_params=True)
    with FSDP.state_dict_type(many, StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig()):
        names = [n for n in many.state_dict() if "flat" in n]
    assert names == ["_flat_param", "_flat_param_1"]


@ranks(4)
def test_sharded_parameters_are_chunks_of_rows() -> None:
    bare = build(Net)
    model = wrapped(bare, FULL_SHARD, "blocks")
    for name in SHARDED_KINDS:
        with kind(model, name):
            value = model.state_dict()["embed.weight"]
        rows = bare.embed.weight.chunk(4)[dist.get_rank()]
        if name == "sharded":
            assert isinstance(value, ShardedTensor)
            assert torch.equal(value.local_shards()[0].tensor, rows)
        else:
            assert isinstance(value, DTensor)
            assert value.placements == (Shard(0),)
            assert torch.equal(value.to_local(), rows)
            assert torch.equal(whole(value), bare.embed.weight)


@ranks(4)
def test_with_a_device_mesh_parameters_are_dtensors_over_it() -> None:
    bare = build(Net)
    line = init_device_mesh(device().type, (4,))
    grid = init_device_mesh(device().type, (2, 2), mesh_dim_names=("copies", "shards"))
    for mesh, strategy in ((line, FULL_SHARD), (grid, ShardingStrategy.HYBRID_SHARD)):
        model = copy.deepcopy(wrapped(bare, strategy, "blocks", device_mesh=mesh))
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = model.state_dict()
            wipe(model)
            model.load_state_dict(state)
        for name, value in state.items():
            assert isinstance(value, DTensor), name
            assert value.device_mesh is mesh
            assert value.placements == ((Replicate(), Shard(0)) if mesh is grid else (Shard(0),))
        assert_same_state(model.state_dict(), dict(bare.state_dict()))
    model = wrapped(bare, ShardingStrategy.HYBRID_SHARD, "blocks")
    with kind(model, "dtensor"):
        value = model.state_dict()["head.weight"]
    assert value.device_mesh.mesh.tolist() == [[0, 1], [2, 3]]
    assert torch.equal(whole(value), bare.head.weight)


@ranks(4)
def test_values_that_are_cut_in_another_way_are_refused_by_all_ranks() -> None:
    bare = nn.Linear(4, 3, bias=False)
    model = wrapped(bare, FULL_SHARD, "one unit")
    line, grid = (init_device_mesh(device().type, shape) for shape in ((4,), (2, 2)))
    cuts = [
        (line, [Replicate()]),
        (line, [Shard(1)]),
        (grid, [Replicate(), Shard(0)]),  # Some ranks have as many rows of it as they expect.
        (grid, [Shard(0), Shard(0)]),
        (DeviceMesh(device().type, [3, 1, 2, 0]), [Shard(0)]),
    ]
    for mesh, placements in cuts:
        value = distribute_tensor(torch.ones(3, 4, device=device()), mesh, placements)
        with pytest.raises(
            RuntimeError, match=r"parameter weight: ranks \[0, 1, 2, 3\] share the parameter"
        ):
            model.load_state_dict({"weight": value})
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = halves[dist.get_rank() // 2]
    half = wrapped(bare, FULL_SHARD, "one unit", process_group=group)
    with kind(half, "sharded"):
        value = half.state_dict()["weight"]
    message = r"expect \(first row, rows\) \[\(0, 1\), .* has \[\(0, 2\), \(2, 1\)\]"
    with pytest.raises(RuntimeError, match=message):
        model.load_state_dict({"weight": value})


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(1)
def test_one_rank_saves_full_tensors_that_the_bare_model_loads(
    tmp_path: Path, use_orig_params: bool
) -> None:
    bare = build(Net)
    model = wrapped(copy.deepcopy(bare), FULL_SHARD, "blocks", use_orig_params=use_orig_params)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with kind(model, "sharded"):
        found = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
        torch.save(found, tmp_path / "state.pt")
        loaded = torch.load(tmp_path / "state.pt")
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(
            FSDP.optim_state_dict_to_load(model, optimizer, loaded["optimizer"])
        )
    bare.load_state_dict(loaded["model"])
    with FSDP.summon_full_params(model):
        for expected, parameter in zip(bare.parameters(), model.parameters(), strict=True):
            assert torch.equal(expected, parameter)
