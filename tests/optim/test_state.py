"""State that owners hold is saved as any optimizer's, and loaded by other owners."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.optim.training import (
    Shampoo,
    WideNet,
    adamw,
    adamw8bit,
    adamw8bit_of_torchao,
    everything,
    full_values,
    is_hidden_matrix,
    muon,
    reference,
    whole,
    wrapped,
)
from tests.original.training import InPlace, Net, build, train_step
from tests.state.models import hybrid_groups
from tests.state.optimizers import (
    OPTIM_KINDS,
    assert_same_optim_state,
    full_state,
    optim_kind,
    state_by_names,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import fullshard
from fullshard import CheckpointError, OptimStateKeyType, ShardingStrategy, optim_state_template
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.testing import device, ranks, run_on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
FULL_SHARD, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD
HYBRID_SHARD = ShardingStrategy.HYBRID_SHARD
STEPS = range(3)


def other_owners(name: str, parameter: torch.Tensor) -> float:
    """A cost by which others own parameters than by their sizes."""
    return float(sum(map(ord, name)) % 97)


def trained(model: Any, optimizer: Any, expected: Any, steps: range = STEPS) -> None:
    for step in steps:
        optimizer.zero_grad()
        train_step(model, step)
        expected.take_gradients()
        optimizer.step()
        expected.step()


def expected_state(expected: Any) -> dict[str, Any]:
    """The state of the unmodified optimizers, by names, of both together."""
    found: dict[str, Any] = {"state": {}, "param_groups": []}
    for optimizer in expected.optimizers:
        state = state_by_names(expected.bare, optimizer)
        found["state"].update(state["state"])
        found["param_groups"] += state["param_groups"]
    return found


@pytest.mark.parametrize("make", [muon, Shampoo])
@pytest.mark.parametrize(
    ("size", "strategy"),
    [(2, FULL_SHARD), (2, NO_SHARD), (3, FULL_SHARD), (1, FULL_SHARD), (4, HYBRID_SHARD)],
)
def test_every_type_of_state_dict_is_that_of_the_unwrapped_model_and_loads_again(
    size: int, strategy: ShardingStrategy, make: Any
) -> None:
    run_on_ranks(size, round_trips, strategy, make)


def round_trips(strategy: ShardingStrategy, make: Any) -> None:
    options = {"process_group": hybrid_groups()} if strategy is HYBRID_SHARD else {}
    model = wrapped(how=strategy, **options)
    optimizer = whole(make, model)
    expected = reference(model, make)
    trained(model, optimizer, expected)

    found = full_state(model, optimizer)
    if dist.get_rank() == 0:
        assert_same_optim_state(found, expected_state(expected))
    for name in OPTIM_KINDS:
        with optim_kind(model, name):
            saved = FSDP.optim_state_dict(model, optimizer)
            # State that this rank's pieces are of can only be loaded by the same ranks.
            loaded = whole(make, model, cost=other_owners)
            loaded.load_state_dict(FSDP.optim_state_dict_to_load(model, loaded, saved))
        assert_same_optim_state(full_state(model, loaded), found)


@ranks(2)
def test_full_state_goes_to_the_unmodified_optimizers_and_back() -> None:
    model = wrapped()
    optimizer = whole(Shampoo, model, None, select=everything)
    expected = reference(model, Shampoo, None, everything)
    trained(model, optimizer, expected)
    full = full_state(model, optimizer)

    bare = build(Net)
    bare.load_state_dict({name: value for name, (value, _) in full_values(model).items()})
    plain = Shampoo(bare.parameters())
    by_id = FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, bare, optim=plain)
    plain.load_state_dict(by_id)
    resumed = whole(Shampoo, model, None, select=everything, cost=other_owners)
    by_name = FSDP.rekey_optim_state_dict(plain.state_dict(), OptimStateKeyType.PARAM_NAME, bare)
    resumed.load_state_dict(FSDP.optim_state_dict_to_load(model, resumed, by_name))
    after = reference(model, lambda _: plain, None, everything, bare=bare)
    trained(model, resumed, after, range(3, 5))

    after.assert_same()


@ranks(2)
def test_8_bit_state_goes_to_the_unmodified_optimizer_and_back() -> None:
    pytest.importorskip("bitsandbytes")
    model = wrapped()
    optimizer = whole(adamw8bit, model, None, select=everything)
    expected = reference(model, adamw8bit, None, everything)
    trained(model, optimizer, expected)
    full = full_state(model, optimizer)

    bare = build(Net)
    bare.load_state_dict({name: value for name, (value, _) in full_values(model).items()})
    plain = adamw8bit(bare.parameters())
    by_id = FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, bare, optim=plain)
    plain.load_state_dict(by_id)
    resumed = whole(adamw8bit, model, None, select=everything, cost=other_owners)
    resumed.load_state_dict(FSDP.optim_state_dict_to_load(model, resumed, full))
    after = reference(model, lambda _: plain, None, everything, bare=bare)
    trained(model, resumed, after, range(3, 5))

    after.assert_same()


@pytest.mark.parametrize("how", [FULL_SHARD, InPlace.RESHARD])
@ranks(2)
def test_tensors_of_a_librarys_own_class_are_saved_and_loaded(how: Any, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    folders = [str(tmp_path)]
    dist.broadcast_object_list(folders)
    model = wrapped(build(WideNet), how)
    optimizer = whole(adamw8bit_of_torchao, model)
    expected = reference(model, adamw8bit_of_torchao, bare=build(WideNet))
    trained(model, optimizer, expected)

    names = {key for state in optimizer.state_dict()["state"].values() for key in state}
    told: list[Any] = [None, None]
    dist.all_gather_object(told, names)
    assert told[0] | told[1] >= {"step", "exp_avg.codes", "exp_avg.scale"}
    fullshard.save(folders[0], model, optimizer)
    resumed = whole(adamw8bit_of_torchao, model, cost=other_owners)
    fullshard.load(folders[0], model, resumed)
    trained(model, resumed, expected, range(3, 5))

    expected.assert_same()


# -- checkpoints ----------------------------------------------------------------------------------


def save(how: Any, make: Any, folder: Path) -> dict[str, Any]:
    """Returns the parameters after two more steps."""
    model = wrapped(how=how)
    optimizer = whole(make, model)
    for step in STEPS:
        optimizer.zero_grad()
        train_step(model, step)
        optimizer.step()
    fullshard.save(folder, model, optimizer, step=3)
    return {name: value for name, (value, _) in full_values(model).items()}


def load(how: Any, make: Any, folder: Path, weights: dict[str, Any], state: Any) -> Any:
    bare = build(Net)
    with torch.no_grad():
        for parameter in bare.parameters():
            parameter.add_(1)
    model = wrapped(bare, how=how)
    optimizer = whole(make, model)
    fullshard.load(folder, model, optimizer)
    found = full_values(model)
    for name, value in weights.items():
        assert torch.equal(found[name][0], value), name
    if not isinstance(how, InPlace):
        loaded = full_state(model, optimizer)
        if state is not None:
            assert_same_optim_state(loaded, state)
        state = loaded
    optimizer.zero_grad()
    train_step(model, 3)
    optimizer.step()
    return state


@pytest.mark.parametrize("make", [muon, Shampoo])
def test_a_checkpoint_of_three_ranks_is_loaded_by_one_two_and_four(
    make: Any, tmp_path: Path
) -> None:
    weights = run_on_ranks(3, save, FULL_SHARD, make, tmp_path)[0]
    state = run_on_ranks(3, load, FULL_SHARD, make, tmp_path, weights, None)[0]
    assert {"blocks.0.up.weight", "embed.weight"} <= set(state["state"])
    for size in (1, 2, 4):
        run_on_ranks(size, load, FULL_SHARD, make, tmp_path, weights, state)
    run_on_ranks(2, load, InPlace.RESHARD, make, tmp_path, weights, None)


def to_the_bare_model(folder: Path, back: Path) -> dict[str, Any]:
    """Load into the unwrapped model and its two optimizers, and save again what they have."""
    bare = build(Net)
    named = dict(bare.named_parameters())
    matrices = [p for name, p in named.items() if is_hidden_matrix(name, p)]
    optimizers = [muon(matrices), adamw(p for n, p in named.items() if not is_hidden_matrix(n, p))]
    fullshard.load(folder, bare, optimizers)
    fullshard.save(back, bare, optimizers, step=3)
    states = [state_by_names(bare, each)["state"] for each in optimizers]
    with pytest.raises(CheckpointError, match=r"1 optimizers, but 2 are .*other parameters"):
        fullshard.load(folder, bare, [muon(matrices), adamw(matrices)])
    return {**states[0], **states[1]}


@pytest.mark.parametrize("how", [FULL_SHARD, InPlace.RESHARD])
def test_a_checkpoint_goes_to_the_unwrapped_models_two_optimizers_and_back(
    how: Any, tmp_path: Path
) -> None:
    weights = run_on_ranks(2, save, how, muon, tmp_path)[0]
    state = run_on_ranks(2, load, FULL_SHARD, muon, tmp_path, weights, None)[0]
    found = run_on_ranks(1, to_the_bare_model, tmp_path, tmp_path / "back")[0]
    assert_same_optim_state({**state, "state": found}, state)
    run_on_ranks(3, load, FULL_SHARD, muon, tmp_path / "back", weights, state)
    run_on_ranks(3, load, how, muon, tmp_path / "back", weights, None)


def test_a_checkpoint_of_fully_shard_is_loaded_by_the_wrapper_and_by_other_ranks(
    tmp_path: Path,
) -> None:
    weights = run_on_ranks(2, save, InPlace.RESHARD, muon, tmp_path)[0]
    state = run_on_ranks(2, load, FULL_SHARD, muon, tmp_path, weights, None)[0]
    assert state["state"]["blocks.0.up.weight"]["momentum_buffer"].abs().sum() > 0
    run_on_ranks(3, load, FULL_SHARD, muon, tmp_path, weights, state)
    run_on_ranks(3, load, InPlace.RESHARD, muon, tmp_path, weights, None)


@ranks(2)
def test_torchs_functions_for_state_dicts_save_and_load_fully_shards_state() -> None:
    model = wrapped(how=InPlace.RESHARD)
    optimizer = whole(muon, model)
    expected = reference(model, muon)
    trained(model, optimizer, expected)

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_optimizer_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        theirs = expected_state(expected)["state"]
        assert full["state"].keys() == theirs.keys()
        for name, entries in theirs.items():
            for key, value in entries.items():
                found: Any = full["state"][name][key]
                assert torch.equal(found, value.cpu()), (name, key)
    sharded = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    resumed = whole(muon, model, cost=other_owners)
    set_optimizer_state_dict(model, resumed, sharded)
    trained(model, resumed, expected, range(3, 5))

    expected.assert_same()


@ranks(2)
def test_torchs_distributed_checkpoint_carries_the_wrappers_state(tmp_path: Path) -> None:
    model = wrapped()
    optimizer = whole(muon, model)
    expected = reference(model, muon)
    trained(model, optimizer, expected)
    with optim_kind(model, "sharded"):
        dcp.save({"optim": FSDP.optim_state_dict(model, optimizer)}, checkpoint_id=tmp_path)
        resumed = whole(muon, model, cost=other_owners)
        reader = dcp.FileSystemReader(tmp_path)
        state = {"optim": optim_state_template(model, resumed, reader.read_metadata())}
        dcp.load(state, storage_reader=reader)
        resumed.load_state_dict(FSDP.optim_state_dict_to_load(model, resumed, state["optim"]))
    trained(model, resumed, expected, range(3, 5))

    expected.assert_same()


@ranks(2)
def test_state_of_another_selection_is_refused() -> None:
    model = wrapped()
    optimizer = whole(muon, model)
    other = whole(adamw, model, None, select=everything)
    with pytest.raises(ValueError, match=r"groups of \[6, 10\] parameters, .* groups of \[16\]"):
        other.load_state_dict(optimizer.state_dict())


@ranks(3)
def test_owners_alone_have_the_state_of_their_parameters() -> None:
    model = wrapped()
    optimizer = whole(muon, model)
    assert not optimizer.state
    trained(model, optimizer, reference(model, muon), range(1))

    chosen = optimizer.param_groups[0]["params"]
    held = torch.tensor([len(optimizer.state[p]) for p in chosen], device=device())
    dist.all_reduce(held)
    assert held.tolist() == [1] * 6
    whole_shapes = {tuple(p.shape) for n, p in build(Net).named_parameters() if p.dim() == 2}
    for parameter in chosen:
        for value in optimizer.state[parameter].values():
            assert tuple(value.shape) in whole_shapes
    assert is_hidden_matrix("blocks.0.up.weight", torch.empty(9, 7))
