"""State dicts and checkpoints of models with sharded quantised weights are the bare models'."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.quantized.models import (
    assert_same_bytes,
    assert_same_states,
    batch,
    bnb,
    both_ways,
    build,
    kinds,
    needs_torchao,
    shard,
    train,
)
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import fullshard
from fullshard import FullStateDictConfig, StateDictType
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.testing import ranks, run_on_ranks


@kinds()
@ranks(2)
def test_a_full_state_dict_is_the_bare_models_and_is_loaded_back(kind: str) -> None:
    bare, model = build(kind), shard(build(kind), "wrapper")
    train(bare, 1), train(model, 1)
    expected = bare.state_dict()
    assert_same_states(model.state_dict(), expected)
    other = shard(build(kind, seed=5), "wrapper")
    # What it computed before has nothing to do with what it computes then.
    other(batch(1))
    other.load_state_dict(expected)
    assert_same_states(other.state_dict(), expected)
    assert torch.equal(other(batch(3)), bare(batch(3)))


@pytest.mark.parametrize("name", ["SHARDED_STATE_DICT", "LOCAL_STATE_DICT"])
@kinds()
@ranks(2)
def test_other_state_dicts_are_loaded_back(kind: str, name: str) -> None:
    bare, model, other = build(kind), shard(build(kind), "wrapper"), build(kind, seed=5)
    other = shard(other, "wrapper")
    other(batch(1))
    for each in (model, other):
        FSDP.set_state_dict_type(each, StateDictType[name])
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(batch(3)), bare(batch(3)))


@kinds("nf4", "int8", "torchao int8")
@ranks(2)
def test_fully_shard_loads_its_own_state_dict(kind: str) -> None:
    bare, model = build(kind), shard(build(kind), "fully_shard")
    other = shard(build(kind, seed=5), "fully_shard")
    other(batch(1))
    for assign in (False, True):
        other.load_state_dict(copy.deepcopy(model.state_dict()), assign=assign)
        assert torch.equal(other(batch(3)), bare(batch(3)))
    assert list(other.state_dict()) == list(bare.state_dict())


@kinds("nf4", "int8", "torchao int8")
@ranks(2)
def test_the_first_rank_alone_gets_scales_too_in_host_memory(kind: str) -> None:
    bare, model = build(kind).cpu(), shard(build(kind), "wrapper")
    config = FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        state = model.state_dict()
    if torch.distributed.get_rank() == 0:
        assert_same_states(state, bare.state_dict())
    else:
        assert not state


@kinds()
@both_ways
@ranks(2)
def test_summoned_parameters_have_the_bare_models_state_dict(how: str, kind: str) -> None:
    bare, model = build(kind), shard(build(kind), how)
    with fullshard.summon_full_params(model):
        assert_same_states(model.state_dict(), bare.state_dict())
    assert torch.equal(model(batch(3)), bare(batch(3)))


@kinds("nf4", "int8", "torchao int8")
@both_ways
@ranks(2)
def test_weights_replaced_while_summoned_are_kept_with_their_scales(how: str, kind: str) -> None:
    new, model = build(kind, seed=5), shard(build(kind), how)
    model(batch(0))
    with fullshard.summon_full_params(model):
        wrapped = "_fsdp_wrapped_module."
        targets = {name.replace(wrapped, ""): m for name, m in model.named_modules()}
        for name, module in new.named_modules():
            if name.endswith("base"):
                targets[name].weight = module.weight
        with torch.no_grad():
            for name, value in new.named_parameters():
                if "base" not in name:
                    dict(model.named_parameters())[name].copy_(value)
    expected = build(kind, seed=5)(batch(3))
    assert torch.equal(model(batch(3)), expected)


@ranks(2)
def test_a_weight_without_its_scales_is_not_loaded_strictly() -> None:
    model = shard(build("nf4"), "wrapper")
    state = {k: v for k, v in model.state_dict().items() if "up.base.weight." not in k}
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.up\.base\.weight\.quant_state"):
        model.load_state_dict(state)


@ranks(2)
def test_states_of_other_weights_are_refused() -> None:
    model, state = shard(build("nf4"), "wrapper"), build("nf4").state_dict()
    names = {"up": "down", "down": "up"}
    swapped = {
        ".".join(names.get(part, part) for part in name.split(".")): value
        for name, value in state.items()
    }
    with pytest.raises(RuntimeError, match=r"0\.up\.base\.weight: its quant_state is of a weight"):
        model.load_state_dict(swapped)


@needs_torchao
@ranks(2)
def test_a_full_value_of_the_same_class_that_is_packed_otherwise_is_refused() -> None:
    model, state = shard(build("torchao int8"), "wrapper"), build("torchao int8").state_dict()
    names = {"0.up.base.weight": "0.down.base.weight", "0.down.base.weight": "0.up.base.weight"}
    swapped = {name: state[names.get(name, name)] for name in state}
    refused = r"cannot load 0\.up\.base\.weight: .* does not fit: .* shape \(64, 96\)"
    with pytest.raises(RuntimeError, match=refused):
        model.load_state_dict(swapped)


@needs_torchao
@ranks(2)
def test_a_full_value_of_another_class_is_refused() -> None:
    model = shard(build("torchao int8"), "wrapper")
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.up\.base\.weight"):
        model.load_state_dict(build("torchao float8").state_dict())


@kinds("nf4", "nf4 in float16, one state", "torchao int8")
@both_ways
@ranks(2)
def test_torchs_functions_for_state_dicts_of_any_model(how: str, kind: str) -> None:
    model, other = shard(build(kind), how), shard(build(kind, seed=5), how)
    other(batch(1))
    set_model_state_dict(other, get_model_state_dict(model))
    assert torch.equal(other(batch(3)), build(kind)(batch(3)))


# -- checkpoints --------------------------------------------------------------------------------


def save(folder: Path, kind: str, how: str) -> None:
    model = shard(build(kind), how)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model(batch(0)).square().mean().backward()
    optimizer.step()
    fullshard.save(folder, model, optimizer, step=1)


def resume(folder: Path, kind: str, how: str) -> None:
    bare, model = build(kind), shard(build(kind, seed=5), how)
    model(batch(1))
    optimizers = [
        torch.optim.Adam([p for p in each.parameters() if p.requires_grad], lr=1e-2)
        for each in (bare, model)
    ]
    bare(batch(0)).square().mean().backward()
    optimizers[0].step()
    optimizers[0].zero_grad()
    assert fullshard.resume(folder, model, optimizers[1])
    for each, optimizer in zip((bare, model), optimizers, strict=True):
        each(batch(2)).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(model(batch(3)), bare(batch(3)), rtol=1e-6, atol=1e-6)


@kinds("nf4", "nf4 in bfloat16", "int8", "torchao int8")
def test_training_goes_on_with_other_numbers_of_ranks_and_the_other_way(
    tmp_path: Path, kind: str
) -> None:
    run_on_ranks(2, save, tmp_path / "a", kind, "wrapper")
    run_on_ranks(3, resume, tmp_path / "a", kind, "wrapper")
    run_on_ranks(3, resume, tmp_path / "a", kind, "fully_shard")
    run_on_ranks(3, save, tmp_path / "b", kind, "fully_shard")
    run_on_ranks(2, resume, tmp_path / "b", kind, "fully_shard")
    run_on_ranks(1, resume, tmp_path / "b", kind, "wrapper")


def save_by_torch(folder: Path, kind: str) -> None:
    model = shard(build(kind), "wrapper")
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        dcp.save(model.state_dict(), storage_writer=dcp.FileSystemWriter(folder))


def test_a_checkpoint_is_read_into_bitsandbytes_own_modules(tmp_path: Path) -> None:
    run_on_ranks(2, save_by_torch, tmp_path, "nf4")
    expected, bare = build("nf4").cpu(), build("nf4").cpu()
    state: dict[str, Any] = {k: torch.zeros_like(v) for k, v in expected.state_dict().items()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert_same_states(state, expected.state_dict())
    load_into_bare(bare, state)
    assert torch.equal(bare(batch(3).cpu()), expected(batch(3).cpu()))


def load_into_bare(model: Any, state: dict[str, Any]) -> None:
    """As bitsandbytes has it: weights are made anew of packed elements and their states."""
    for name, module in model.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            start = f"{name}.weight."
            found = {key[len(start) :]: state.pop(key) for key in list(state) if start in key}
            packed = state.pop(f"{name}.weight")
            module.weight = bnb.nn.Params4bit.from_prequantized(
                packed, found, device=packed.device, module=module
            )
    model.load_state_dict(state, strict=False)


@kinds("nf4", "int8", "torchao int8")
@both_ways
@ranks(2)
def test_a_rank_keeps_its_share_of_the_packed_bytes(how: str, kind: str) -> None:
    model = shard(build(kind), how)
    train(model, 2)
    # By hand: six matrices of 64 x 96 elements, in half a byte or one each.
    packed = 6 * 64 * 96 // (2 if kind == "nf4" else 1)
    if kind == "torchao int8":
        # And a scale in float32 and a zero point in int8 per row, from multiples of 16 bytes.
        packed += 3 * ((96 * 5) + (64 * 5))
    units = [m._unit for m in FSDP.fsdp_modules(model)] if how == "wrapper" else []
    if how == "fully_shard":
        units = [block._fullshard_module_unit.unit for block in model]
    held = [h for unit in units for h in unit.handles if h.dtypes.shard not in (torch.float32,)]
    kept = sum(h.shard_tensor.untyped_storage().nbytes() for h in held)
    assert packed / 2 <= kept <= packed / 2 + 6 * 16
    between = sum(b.flat.untyped_storage().nbytes() for h in held for b in h.full_buffers.values())
    # What a CPU keeps unsharded between steps: nothing.
    assert between == 0


def save_bare(folder: Path, kind: str) -> None:
    fullshard.save(folder, build(kind, seed=3), step=1)


def load_bare(folder: Path, kind: str) -> None:
    expected, bare = build(kind), build(kind, seed=5)
    fullshard.load(folder, bare)
    assert_same_states(bare.state_dict(), expected.state_dict())
    assert torch.equal(bare(batch(3)), expected(batch(3)))


def load_of_bare(folder: Path, kind: str, how: str) -> None:
    model = shard(build(kind), how)
    fullshard.load(folder, model)
    assert torch.equal(model(batch(3)), build(kind, seed=3)(batch(3)))


@kinds("nf4", "nf4 in float16, one state", "int8", "torchao int8")
def test_a_checkpoint_is_loaded_into_the_bare_model_and_one_of_the_bare_model_into_shards(
    tmp_path: Path, kind: str
) -> None:
    run_on_ranks(2, save_untrained, tmp_path, kind)
    run_on_ranks(1, load_bare, tmp_path, kind)
    run_on_ranks(1, save_bare, tmp_path / "bare", kind)
    for how in ("wrapper", "fully_shard"):
        run_on_ranks(2, load_of_bare, tmp_path / "bare", kind, how)


def save_and_load_ignored(folder: Path, kind: str, how: str) -> None:
    def ignoring(seed: int) -> Any:
        model = build(kind, seed=seed)
        ignored = {p for name, p in model.named_parameters() if "base" in name}
        which = "ignored_states" if how == "wrapper" else "ignored_params"
        return shard(model, how, **{which: ignored})

    fullshard.save(folder, ignoring(0), step=1)
    other = ignoring(5)
    fullshard.load(folder, other)
    assert torch.equal(other(batch(3)), build(kind)(batch(3)))


@kinds("nf4", "int8", "torchao int8")
@both_ways
def test_checkpoints_have_weights_that_units_ignore(tmp_path: Path, how: str, kind: str) -> None:
    run_on_ranks(2, save_and_load_ignored, tmp_path, kind, how)


def save_untrained(folder: Path, kind: str) -> None:
    fullshard.save(folder, shard(build(kind), "wrapper"), step=1)


def export(folder: Path, kind: str) -> None:
    fullshard.export_safetensors(folder / "model.safetensors", shard(build(kind), "wrapper"))


@kinds("nf4", "nf4 in bfloat16", "int8")
def test_exported_safetensors_have_the_bare_models_tensors(tmp_path: Path, kind: str) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    run_on_ranks(2, export, tmp_path, kind)
    found = safetensors.load_file(tmp_path / "model.safetensors")
    expected = build(kind).cpu().state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_same_bytes(found[name], value)


@needs_torchao
@ranks(2)
def test_objects_that_wrap_others_are_not_exported(tmp_path: Path) -> None:
    pytest.importorskip("safetensors.torch")
    with pytest.raises(TypeError, match=r"0\.up\.base\.weight is of class Int8Tensor"):
        export(tmp_path, "torchao int8")
