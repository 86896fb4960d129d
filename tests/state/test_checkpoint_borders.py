"""What checkpoints hold at the borders: odd data, ranks that differ, damage, several calls."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.original.training import Net, build
from tests.state.models import SHARDED_KINDS, Odd, copied, kind, wrapped
from tests.state.optimizers import adam, assert_same_optim_state, full_state, trained
from tests.state.test_checkpoints import shared_folder
from torch import nn

import fullshard
from fullshard import CheckpointError, ShardingStrategy
from fullshard.state.checkpoint.checksummed import read_checksummed, write_checksummed
from fullshard.state.checkpoint.content import Targets
from fullshard.state.model.sharded_tensors import is_sharded
from fullshard.testing import device, ranks

FULL_SHARD = ShardingStrategy.FULL_SHARD


class FloatOfALibrary(float):
    """A number that shows itself otherwise than a float does, as numpy's do."""

    def __repr__(self) -> str:
        return f"library.float({float(self)})"


def extra_after_saving(folder: Path, extra: dict[Any, Any]) -> dict[Any, Any]:
    fullshard.save(folder, nn.Linear(1, 1), extra=extra)
    found = fullshard.latest(folder)
    assert found is not None
    return found.extra


def test_keys_that_look_alike_keep_their_own_tensors(tmp_path: Path) -> None:
    zeros, ones = torch.zeros(2), torch.ones(2)

    found = extra_after_saving(tmp_path, {"a/b": zeros, "a": {"b": ones}, 1: zeros, "1": ones})

    assert torch.equal(found["a/b"], zeros)
    assert torch.equal(found["a"]["b"], ones)
    assert torch.equal(found[1], zeros)
    assert torch.equal(found["1"], ones)


def test_numbers_of_other_libraries_come_back_as_numbers(tmp_path: Path) -> None:
    given = {"best": FloatOfALibrary("inf"), "last": FloatOfALibrary(2.5)}

    assert extra_after_saving(tmp_path, given) == {"best": float("inf"), "last": 2.5}


def test_numbers_of_numpy_come_back_as_numbers(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    given = {
        "seen": numpy.int64(2**62),
        "best": numpy.float32(0.1),
        "worst": numpy.float32("inf"),
        "done": numpy.bool_(True),
        numpy.uint8(3): numpy.complex64(1 + 2j),
    }

    found = extra_after_saving(tmp_path, given)

    assert found == {**{str(k): v.item() for k, v in given.items() if k != 3}, 3: 1 + 2j}  # type: ignore[misc]
    assert [type(value) for value in found.values()] == [int, float, float, bool, complex]
    for other in (numpy.timedelta64(5, "ns"), numpy.longdouble(1) / 3, numpy.zeros(2)):
        with pytest.raises(TypeError, match=f"/extra/x is a {type(other).__name__}, which"):
            extra_after_saving(tmp_path, {"x": other})


def test_tensors_that_are_conjugated_lazily_are_written_as_they_are_seen(tmp_path: Path) -> None:
    seen = torch.tensor([1 + 2j]).conj()
    model = nn.Linear(1, 1)
    model.register_buffer("phase", seen)

    fullshard.save(tmp_path, model, extra={"negative": seen.imag})
    model.phase = torch.zeros(1, dtype=seen.dtype)
    found = fullshard.load(tmp_path, model)

    assert model.phase.tolist() == [1 - 2j]
    assert found.extra["negative"].tolist() == [-2]


def test_modules_may_have_any_name_that_torch_allows(tmp_path: Path) -> None:
    model = nn.ModuleDict({"$tensor": nn.Linear(2, 1)})
    optimizer = adam(model)
    model["$tensor"](torch.ones(2)).backward()
    optimizer.step()
    before = copied(model.state_dict())

    fullshard.save(tmp_path, model, optimizer)
    nn.init.zeros_(model["$tensor"].weight)
    fullshard.load(tmp_path, model, optimizer)

    assert torch.equal(model["$tensor"].weight, before["$tensor.weight"])


class Counting(nn.Module):
    """Its extra state grows."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.seen = torch.arange(count)

    def get_extra_state(self) -> torch.Tensor:
        return self.seen

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.seen = state


def test_extra_state_of_a_module_may_have_another_shape(tmp_path: Path) -> None:
    fullshard.save(tmp_path, Counting(5))
    model = Counting(0)

    fullshard.load(tmp_path, model)

    assert model.seen.tolist() == [0, 1, 2, 3, 4]


def test_a_step_is_any_whole_number_and_nothing_else(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)

    fullshard.save(tmp_path, model, step=torch.tensor(3))  # type: ignore[arg-type]

    assert fullshard.load(tmp_path, model).step == 3
    with pytest.raises(TypeError, match=r"step expects a whole number, but got 3\.5 of type float"):
        fullshard.save(tmp_path, model, step=3.5)  # type: ignore[arg-type]


def test_optimizers_may_be_given_by_an_iterator(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    saved, loaded = adam(model), adam(model)
    model(torch.ones(1)).backward()
    saved.step()

    fullshard.save(tmp_path, model, iter([saved]))  # type: ignore[arg-type]
    fullshard.load(tmp_path, model, iter([loaded]))

    assert torch.equal(loaded.state[model.weight]["exp_avg"], saved.state[model.weight]["exp_avg"])


@ranks(2)
def test_extra_data_that_is_no_dict_is_refused_on_every_rank(tmp_path: Path) -> None:
    folder = shared_folder(tmp_path)
    model = wrapped(build(Net), FULL_SHARD, "blocks")

    with pytest.raises(TypeError, match=r"extra expects a dict, but got \[1\]"):
        fullshard.save(folder, model, extra=[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SHARDED_KINDS)
@ranks(2)
def test_extra_data_of_which_ranks_have_parts_is_refused_on_every_rank(
    tmp_path: Path, name: str
) -> None:
    model = wrapped(build(Net), FULL_SHARD, "blocks")
    with kind(model, name):
        best = model.state_dict()

    with pytest.raises(TypeError, match=r"/extra/best/0/embed\.weight is a \w+, of which .* whole"):
        fullshard.save(shared_folder(tmp_path), model, extra={"best": [best]})


@ranks(2)
def test_of_what_ranks_have_each_for_itself_the_first_ranks_is_saved(tmp_path: Path) -> None:
    folder = shared_folder(tmp_path)
    model = wrapped(build(Odd), FULL_SHARD, "blocks", use_orig_params=True)
    rank = dist.get_rank()
    for buffer in model.buffers():
        buffer.fill_(rank + 1)

    fullshard.save(folder, model)
    for buffer in model.buffers():
        buffer.fill_(7)
    fullshard.load(folder, model)

    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "table"):
        assert model.module.get_buffer(name).unique().tolist() == [1], name


@ranks(2)
def test_a_rank_that_cannot_reach_the_folder_is_named_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shared_folder(tmp_path)
    model = wrapped(build(Net), FULL_SHARD, "blocks")
    fullshard.save(folder / "here", model, step=1)
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    monkeypatch.chdir(folder if dist.get_rank() == 0 else elsewhere)

    with pytest.raises(CheckpointError, match=r"manifest\.json is there .* not on rank 1"):
        fullshard.load("here", model)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a folder in which none can be made")
@ranks(2)
def test_a_folder_that_cannot_be_made_is_a_checkpoint_that_cannot_be_written(
    tmp_path: Path,
) -> None:
    """Not a FileNotFoundError: that says, of a load, that there is no checkpoint."""
    model, file = wrapped(build(Net), FULL_SHARD, "blocks"), shared_folder(tmp_path) / "file"
    file.touch()
    for folder in (Path("/proc/nowhere/run"), file, file / "run"):
        with pytest.raises(CheckpointError, match=r"The checkpoint .* could not be written"):
            fullshard.save(folder, model, step=1)
    fullshard.save(file.with_name("run"), model, step=1)
    assert fullshard.latest(file.with_name("run")) is not None


@ranks(2)
def test_a_save_in_the_background_goes_where_its_path_led_when_it_was_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shared_folder(tmp_path)
    model = wrapped(build(Net), FULL_SHARD, "blocks")
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)

    saving = fullshard.save("here", model, step=1, asynchronous=True)
    monkeypatch.chdir(elsewhere)

    assert saving.wait() == folder / "here" / "step-00000001"
    assert fullshard.latest(folder / "here") is not None


@ranks(2)
def test_damaged_extra_data_or_another_optimizer_leaves_the_model_as_it_was(
    tmp_path: Path,
) -> None:
    folder = shared_folder(tmp_path)
    model = wrapped(build(Net), FULL_SHARD, "blocks", use_orig_params=True)
    extra = {"noise": torch.full((64,), 3, dtype=torch.uint8)}
    optimizer = torch.optim.SGD([model.module.head.weight])
    fullshard.save(folder, model, optimizer, extra=extra)
    trained(model, adam(model), range(1))
    before = copied(model.state_dict())

    with pytest.raises(CheckpointError, match="is in none of the saved parameter groups"):
        fullshard.load(folder, model, adam(model))
    dist.barrier()
    if dist.get_rank() == 0:
        for file in (folder / "step-00000000").glob("*.bin"):
            file.write_bytes(file.read_bytes().replace(b"\x03" * 64, b"\x03" * 63 + b"\x02"))
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"rank-00000\.bin is damaged.*extra/noise"):
        fullshard.load(folder, model)

    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_newest_checkpoint_without_its_manifest_is_not_passed_over(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    for step in (1, 2):
        fullshard.save(tmp_path, model, step=step)
    newest = tmp_path / "step-00000002"
    os.remove(newest / "manifest.json")

    with pytest.raises(CheckpointError, match=r"step-00000002/manifest\.json is missing"):
        fullshard.load(tmp_path, model)

    for left in newest.iterdir():
        left.unlink()
    newest.rmdir()
    assert fullshard.load(tmp_path, model).step == 1


def test_a_save_beside_a_damaged_index_writes_nothing_and_says_what_to_do(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    fullshard.save(tmp_path, model, step=1)
    index = tmp_path / "checkpoints.json"
    index.write_text(index.read_text()[:-3])

    with pytest.raises(CheckpointError, match=r"checkpoints\.json is damaged.* remove the index"):
        fullshard.save(tmp_path, model, step=2)

    assert {entry.name for entry in tmp_path.iterdir()} == {"step-00000001", "checkpoints.json"}
    index.unlink()
    fullshard.save(tmp_path, model, step=2)
    assert fullshard.load(tmp_path, model).step == 2


def test_a_manifest_made_to_mislead_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    fullshard.save(tmp_path, model, extra={"noise": torch.ones(4)})
    path = tmp_path / "step-00000000" / "manifest.json"
    good = read_checksummed(path)
    table = good["tensors"]["/extra/noise"]
    ((starts, sizes, *extent),) = table["chunks"]
    for change, file in (
        ({"chunks": []}, "manifest.json"),
        ({"chunks": [[[2], sizes, *extent]]}, "manifest.json"),
        ({"dtype": "load"}, "manifest.json"),
        ({"shape": [10**13]}, "manifest.json"),
        ({"chunks": [[starts, sizes, "../../outside", *extent[1:]]]}, "outside"),
    ):
        misleading = {**good["tensors"], "/extra/noise": {**table, **change}}
        write_checksummed(path, {**good, "tensors": misleading})

        for read in (fullshard.latest, lambda folder: fullshard.load(folder, model)):
            with pytest.raises(CheckpointError, match=file):
                read(tmp_path)


@ranks(2)
def test_loading_waits_for_a_save_in_the_background(tmp_path: Path) -> None:
    folder = shared_folder(tmp_path)
    model = wrapped(build(Net), FULL_SHARD, "blocks")

    for step in range(1, 9):
        handle = fullshard.save(folder, model, step=step, asynchronous=True)
        found = fullshard.load(folder, model)
        assert (found.step, handle.done()) == (step, True)


@ranks(2)
def test_what_is_in_the_background_is_not_changed_by_training_on_the_host(tmp_path: Path) -> None:
    folder = shared_folder(tmp_path)
    for strategy in (FULL_SHARD, ShardingStrategy.NO_SHARD):
        model = wrapped(build(Odd), strategy, "blocks", use_orig_params=True)
        optimizer = adam(model)
        model(torch.randn(4, 5, device=device())).square().mean().backward()
        optimizer.step()
        before = copied(model.state_dict())
        handle = fullshard.save(folder, model, optimizer, asynchronous=True)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.fill_(5)
            for state in optimizer.state.values():
                for entry in state.values():
                    entry.fill_(5)
        handle.wait()
        fullshard.load(folder, model, optimizer)
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name
        assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}


def group_of(*groups: list[int]) -> Any:
    """The process group, of these lists of ranks, that has this rank."""
    made = [(dist.new_group(members), members) for members in groups]
    return next(group for group, members in made if dist.get_rank() in members)


@ranks(4)
def test_copies_may_lie_on_any_ranks(tmp_path: Path) -> None:
    folder = shared_folder(tmp_path)
    for shards, copies in (
        (([0, 2], [1, 3]), ([0, 1], [2, 3])),
        (([0, 3], [1, 2]), ([0, 1], [2, 3])),
    ):
        model = wrapped(
            build(Net),
            ShardingStrategy.HYBRID_SHARD,
            "blocks",
            process_group=(group_of(*shards), group_of(*copies)),
        )
        optimizer = adam(model)
        trained(model, optimizer, range(1))
        before, state = copied(model.state_dict()), full_state(model, optimizer)

        fullshard.save(folder, model, optimizer)
        trained(model, optimizer, range(1, 2))
        fullshard.load(folder, model, optimizer)

        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name
        assert_same_optim_state(full_state(model, optimizer), state)


@ranks(2)
def test_every_rank_reads_its_part_of_the_optimizer_state_of_a_compiled_module(
    tmp_path: Path,
) -> None:
    folder = shared_folder(tmp_path)
    bare = build(Net)
    bare.head = torch.compile(bare.head, backend="eager")
    model = wrapped(bare, FULL_SHARD, "blocks", use_orig_params=True)
    optimizer = adam(model)
    trained(model, optimizer, range(2))
    expected = full_state(model, optimizer)
    fullshard.save(folder, model, optimizer)
    read: dict[str, Any] = {}
    find = Targets.tensor

    def note(targets: Targets, name: str) -> Any:
        return read.setdefault(name, find(targets, name))

    loaded = adam(model)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Targets, "tensor", note)
        fullshard.load(folder, model, loaded)

    assert "/optimizers/0/state/head.weight/exp_avg" in read
    assert [name for name, value in read.items() if value.dim() and not is_sharded(value)] == []
    assert_same_optim_state(full_state(model, loaded), expected)
