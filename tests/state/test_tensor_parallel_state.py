"""Tensor-parallel parameters that are sharded: full parameters, state dicts, checkpoints, norms."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.engine.models import make
from tests.engine.parity import assert_same, full_parameters
from tests.engine.tensor_parallel import Tokens, mesh_of, parallelized, sharded, uneven
from tests.original.training import MODES
from tests.state.models import KINDS, assert_same_state, copied, kind, wipe
from tests.state.test_checkpoints import shared_folder
from torch import nn
from torch.distributed.tensor import DTensor

import fullshard
from fullshard import FullStateDictConfig, ShardingStrategy, StateDictType
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.testing import ranks, run_on_ranks

NORMS = (2.0, 1.0, 2.5, math.inf)


# -- full parameters -----------------------------------------------------------------------------


@ranks(4)
def test_summoned_parameters_are_dtensors_to_compute_with_and_to_change() -> None:
    mesh = mesh_of(2, 2)
    for strategy, use_orig_params in MODES:
        bare, model = make(Tokens), sharded(mesh, strategy, use_orig_params=use_orig_params)
        inputs = bare.get_input(0)
        before = list(model.parameters())

        with FSDP.summon_full_params(model), torch.no_grad():
            weight = model.first.up.weight
            assert isinstance(weight, DTensor)
            assert isinstance(weight, nn.Parameter)
            assert weight.to_local().shape == (5, 6)
            torch.testing.assert_close(model(*inputs), bare(*inputs))
            weight.mul_(2)

        with torch.no_grad():
            bare.first.up.weight.mul_(2)
        assert_same(full_parameters(model), full_parameters(bare), (strategy, use_orig_params))
        assert all(map(lambda a, b: a is b, before, model.parameters()))


@ranks(4)
def test_summoned_gradients_are_those_of_the_bare_model() -> None:
    mesh = mesh_of(2, 2)
    bare, model = make(Tokens), sharded(mesh, kind="sequence")
    for each in (bare, model):
        each(*bare.get_input(0)).square().mean().backward()
    kept = [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    with FSDP.summon_full_params(model, with_grads=True):
        for name, parameter in model.named_parameters():
            found, expected = parameter.grad, bare.get_parameter(name).grad
            found = found.full_tensor() if isinstance(found, DTensor) else found
            torch.testing.assert_close(found, expected)

    for parameter, gradient in zip(model.parameters(), kept, strict=True):
        assert gradient is None or torch.equal(parameter.grad, gradient)


# -- norms -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["tensor", "sequence"])
@ranks(4)
def test_norm_and_clipped_gradients_are_those_of_the_bare_model(plan: str) -> None:
    mesh = mesh_of(2, 2)
    rank = mesh["dp"].get_local_rank()
    for strategy, use_orig_params in [*MODES, (ShardingStrategy.NO_SHARD, False)]:
        bare = make(Tokens)
        model = sharded(mesh, strategy, plan, use_orig_params=use_orig_params)
        for norm_type in NORMS:
            for each in (bare, model):
                each.zero_grad()
            sum(bare(*bare.get_input(r)).square().mean() / 2 for r in range(2)).backward()
            model(*bare.get_input(rank)).square().mean().backward()
            expected = nn.utils.clip_grad_norm_(bare.parameters(), 0.01, norm_type)
            torch.testing.assert_close(model.clip_grad_norm_(0.01, norm_type), expected)
            again = model.clip_grad_norm_(math.inf, norm_type)
            torch.testing.assert_close(again, torch.full_like(again, 0.01), rtol=1e-3, atol=0)


@ranks(4)
def test_ignored_dtensors_count_in_the_norm() -> None:
    mesh = mesh_of(2, 2)
    bare, module = make(Tokens), parallelized(mesh, "sequence")
    ignored = [module.second.norm, module.head]
    model = sharded(mesh, model=module, blocks=False, ignored_modules=ignored)
    for each in (bare, model):
        each(*bare.get_input(0)).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(bare.parameters(), 0.01)
    torch.testing.assert_close(model.clip_grad_norm_(0.01), expected)
    torch.testing.assert_close(module.head.weight.grad.full_tensor(), bare.head.weight.grad)


# -- state dicts -----------------------------------------------------------------------------------


@ranks(4)
def test_a_full_state_dict_is_the_bare_models_and_loads_into_either() -> None:
    mesh = mesh_of(2, 2)
    expected = dict(make(Tokens).state_dict())
    for strategy, use_orig_params in MODES:
        model = sharded(mesh, strategy, use_orig_params=use_orig_params)
        saved = model.state_dict()
        assert_same_state(saved, expected)
        wipe(model)
        model.load_state_dict(saved)
        assert_same_state(model.state_dict(), expected)
        with FSDP.summon_full_params(model):
            assert_same_state(model.state_dict(), expected)
            wipe(model)
            model.load_state_dict(saved)
        assert_same_state(model.state_dict(), expected)


@ranks(4)
def test_a_full_state_dict_for_one_rank_is_on_no_other() -> None:
    model = sharded(mesh_of(2, 2))
    config = FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        saved = model.state_dict()
        with FSDP.summon_full_params(model):
            assert list(model.state_dict()) == list(saved)
    if dist.get_rank() == 0:
        assert_same_state(saved, {k: v.cpu() for k, v in make(Tokens).state_dict().items()})
    else:
        assert saved == {}


@pytest.mark.parametrize("name", KINDS)
@ranks(4)
def test_every_type_of_state_dict_loads_into_what_it_came_from(name: str) -> None:
    mesh = mesh_of(2, 2)
    for strategy, use_orig_params in MODES:
        model = sharded(mesh, strategy, use_orig_params=use_orig_params)
        expected = full_parameters(model)
        with kind(model, name):
            saved = copied(model.state_dict())
            wipe(model)
            model.load_state_dict(saved)
        assert_same(full_parameters(model), expected, (name, strategy, use_orig_params))


@ranks(8)
def test_sharded_state_goes_round_where_shards_have_copies() -> None:
    model = sharded(mesh_of(2, 2, 2), ShardingStrategy.HYBRID_SHARD)
    expected = full_parameters(model)
    with kind(model, "dtensor"):
        saved = model.state_dict()
        assert torch.equal(saved["head.weight"].full_tensor().cpu(), expected["head.weight"])
        wipe(model)
        model.load_state_dict(saved)
    assert_same(full_parameters(model), expected, "hybrid")


@ranks(4)
def test_sharded_state_is_one_dtensor_over_parts_and_shards() -> None:
    bare, model = uneven(), uneven((2, 2))
    with kind(model, "dtensor"):
        saved = model.state_dict()
    for name, expected in bare.state_dict().items():
        assert isinstance(saved[name], DTensor)
        assert saved[name].shape == expected.shape
        assert torch.equal(saved[name].full_tensor(), expected), name
    assert saved["rows"].to_local().numel() <= 6


@ranks(4)
def test_the_state_of_the_model_before_wrapping_loads_after_it() -> None:
    mesh = mesh_of(2, 2)
    before = copied(parallelized(mesh).state_dict())
    model = sharded(mesh)
    wipe(model)
    model.load_state_dict(before)
    assert_same(full_parameters(model), full_parameters(make(Tokens)), "unwrapped")


@ranks(4)
def test_a_value_of_another_shape_is_reported_by_the_whole_shapes() -> None:
    model = uneven((2, 2))
    state = {**model.state_dict(), "rows": torch.zeros(4, 3)}
    with pytest.raises(RuntimeError, match=r"rows.*\[4, 3\].*\[7, 3\]"):
        model.load_state_dict(state)


# -- checkpoints -----------------------------------------------------------------------------------


def save(path: Path, name: str, shape: tuple[int, int]) -> None:
    model = uneven(shape)
    with kind(model, name):
        dcp.save(model.state_dict(), storage_writer=dcp.FileSystemWriter(path))


def load(path: Path, name: str, shape: tuple[int, int], use_orig_params: bool) -> None:
    model = uneven(shape, use_orig_params=use_orig_params)
    wipe(model)
    with kind(model, name):
        state = model.state_dict()
        dcp.load(state, storage_reader=dcp.FileSystemReader(path))
        model.load_state_dict(state)
    assert_same_state(model.state_dict(), dict(uneven().state_dict()))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ["sharded", "dtensor"])
def test_a_checkpoint_is_loaded_by_other_numbers_of_parts_and_shards(
    tmp_path: Path, name: str
) -> None:
    run_on_ranks(4, save, tmp_path, name, (2, 2))
    run_on_ranks(4, load, tmp_path, name, (2, 2), True)
    run_on_ranks(4, load, tmp_path, name, (4, 1), False)
    run_on_ranks(2, load, tmp_path, name, (2, 1), True)
    run_on_ranks(3, load, tmp_path, name, (1, 3), True)
    bare = uneven()
    state = {key: torch.zeros_like(value).cpu() for key, value in bare.state_dict().items()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert_same_state(state, dict(bare.cpu().state_dict()))


@ranks(4)
def test_a_save_in_the_background_holds_ignored_parts_as_they_were(tmp_path: Path) -> None:
    folder = shared_folder(tmp_path)
    mesh = mesh_of(2, 2)
    module = parallelized(mesh)
    model = sharded(mesh, model=module, ignored_modules=[module.head])
    expected = full_parameters(make(Tokens))

    saving = fullshard.save(folder, model, asynchronous=True)
    wipe(model)
    saving.wait()
    fullshard.load(folder, model)

    assert_same(full_parameters(model), expected, "ignored parts")


@ranks(4)
def test_a_copy_of_a_sharded_model_has_parts_of_its_own() -> None:
    mesh = mesh_of(2, 2)
    model = sharded(mesh)
    other = copy.deepcopy(model)
    with FSDP.summon_full_params(other), torch.no_grad():
        other.first.up.weight.zero_()
    assert_same(full_parameters(model), full_parameters(make(Tokens)), "original")
    assert not full_parameters(other)["first.up.weight"].any()


@ranks(4)
def test_a_model_whose_mesh_another_process_would_not_know_is_not_pickled() -> None:
    handle = sharded(mesh_of(2, 2))._unit.handles[0]
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(handle.distributions)
