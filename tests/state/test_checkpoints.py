"""``fullshard.save`` and ``fullshard.load``: what was saved comes back, on any ranks."""

from __future__ import annotations

import math
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.original.training import Net, build
from tests.state.models import LONG, STRATEGIES, Odd, copied, other, wrapped
from tests.state.optimizers import (
    adam,
    adamw,
    assert_same_optim_state,
    full_state,
    next_loss_and_step,
    trained,
)
from torch import nn

import fullshard
from fullshard import CheckpointError, ShardingStrategy
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.testing import device, ranks, run_on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
FULL_SHARD = ShardingStrategy.FULL_SHARD
SOME = (FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
EXTRA = {
    "schedule": {"last_epoch": 3, "betas": (0.9, 0.999), "best": math.inf},
    "by number": {3: "three", (1, 2): None},
    "noise": torch.arange(5, dtype=torch.int16),
    "raw": b"\x00\xff",
    "dtype": torch.bfloat16,
    "$odd": [True, 1j],
}


def shared_folder(folder: Path) -> Path:
    """The first rank's folder, on every rank."""
    name = [str(folder)]
    dist.broadcast_object_list(name, src=0)
    return Path(name[0])


def train_and_save(
    folder: Path, strategy: ShardingStrategy, wrapping: str, use_orig_params: bool
) -> tuple[Any, Any, tuple[float, float]]:
    """What a model and its optimizer hold when they are saved, and how they go on."""
    model = wrapped(build(Net), strategy, wrapping, use_orig_params=use_orig_params)
    optimizer = adam(model)
    trained(model, optimizer, range(2))
    fullshard.save(folder, model, optimizer, step=2, extra=EXTRA)
    weights = {k: v.cpu() for k, v in copied(model.state_dict()).items()}
    state = full_state(model, optimizer)
    return weights, state, next_loss_and_step(model, optimizer, 2)


def load_and_check(
    folder: Path,
    strategy: ShardingStrategy,
    wrapping: str,
    use_orig_params: bool,
    saved: list[tuple[Any, Any, tuple[float, float]]],
) -> None:
    weights, state, _ = saved[0]
    model = wrapped(other(Net), strategy, wrapping, use_orig_params=use_orig_params)
    optimizer = adam(model)

    found = fullshard.load(folder, model, optimizer)

    assert found.step == 2
    for name, value in model.state_dict().items():
        assert torch.equal(value.cpu(), weights[name]), name
    assert_same_optim_state(full_state(model, optimizer), state)
    if dist.get_world_size() == len(saved):
        losses = next_loss_and_step(model, optimizer, 2)
        torch.testing.assert_close(losses, saved[dist.get_rank()][2])


@pytest.mark.parametrize(
    ("use_orig_params", "strategy"),
    [(True, strategy) for strategy in STRATEGIES]
    + [(False, strategy) for strategy in (STRATEGIES if LONG else SOME)],
)
def test_any_ranks_strategy_and_wrapping_find_their_parts(
    use_orig_params: bool, strategy: ShardingStrategy, tmp_path: Path
) -> None:
    saved = run_on_ranks(2, train_and_save, tmp_path, FULL_SHARD, "blocks", not use_orig_params)

    for size, wrapping in ((1, "blocks"), (2, "one unit"), (4, "linears")):
        run_on_ranks(size, load_and_check, tmp_path, strategy, wrapping, use_orig_params, saved)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_saves_what_four_ranks_have_for_two_and_three(
    strategy: ShardingStrategy, tmp_path: Path
) -> None:
    saved = run_on_ranks(4, train_and_save, tmp_path, strategy, "blocks", True)

    for size in (2, 3, 4):
        run_on_ranks(size, load_and_check, tmp_path, FULL_SHARD, "blocks", True, saved)


@ranks(2)
def test_several_optimizers_parameter_groups_and_odd_parameters_come_back(tmp_path: Path) -> None:
    folder = shared_folder(tmp_path)
    model = wrapped(build(Odd), FULL_SHARD, "one unit", use_orig_params=True)
    named = dict(model.named_parameters())
    makes = (
        lambda: torch.optim.SGD([named["gain"], named["embed.weight"]], momentum=0.9),
        lambda: torch.optim.AdamW(
            [{"params": [named["block.scale"]], "lr": 0.1}, {"params": [named["conv.weight"]]}],
            amsgrad=True,
        ),
    )
    optimizers = [make() for make in makes]
    for step in range(2):
        torch.manual_seed(step)
        model(torch.randn(4, 5, device=device())).square().mean().backward()
        for each in optimizers:
            each.step()
    before = [full_state(model, each) for each in optimizers]
    weights = copied(model.state_dict())

    fullshard.save(folder, model, optimizers, step=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3)
    loaded = [make() for make in makes]
    fullshard.load(folder, model, loaded)

    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    for each, state in zip(loaded, before, strict=True):
        assert_same_optim_state(full_state(model, each), state)
    with pytest.raises(CheckpointError, match="saved with 2 optimizers, but 1 are to be loaded"):
        fullshard.load(folder, model, loaded[0])


@ranks(2)
def test_extra_data_comes_back_as_it_was_on_every_rank(tmp_path: Path) -> None:
    folder = shared_folder(tmp_path)
    model = wrapped(build(Net), FULL_SHARD, "blocks")
    given = EXTRA if dist.get_rank() == 0 else {"only the first rank's": "counts"}

    fullshard.save(folder, model, step=7, extra=given)

    for found in (fullshard.load(folder, model), fullshard.latest(folder)):
        assert found is not None
        assert (found.step, found.path) == (7, folder / "step-00000007")
        assert torch.equal(found.extra.pop("noise"), EXTRA["noise"])
        assert found.extra == {k: v for k, v in EXTRA.items() if k != "noise"}


@ranks(2)
def test_data_that_would_need_code_to_read_is_refused_on_every_rank(tmp_path: Path) -> None:
    folder = shared_folder(tmp_path)
    model = wrapped(build(Net), FULL_SHARD, "blocks")

    with pytest.raises(TypeError, match="/extra/things/0 is a PosixPath, which a"):
        fullshard.save(folder, model, extra={"things": [Path("x")]})

    assert fullshard.latest(folder) is None


@ranks(2)
def test_the_last_saved_counts_and_old_ones_go(tmp_path: Path) -> None:
    folder = shared_folder(tmp_path)
    model = wrapped(build(Net), FULL_SHARD, "blocks")
    for step in (10, 20, 30):
        fullshard.save(folder, model, step=step)
    assert fullshard.load(folder, model).step == 30
    assert fullshard.load(folder / "step-00000010", model).step == 10

    # Going back to step 10, training goes on from there.
    fullshard.save(folder, model, step=15, keep_last=3)

    assert fullshard.load(folder, model).step == 15
    dist.barrier()
    names = {entry.name for entry in folder.iterdir()}
    assert names == {"step-00000020", "step-00000030", "step-00000015", "checkpoints.json"}


@ranks(2)
def test_a_step_saved_again_replaces_the_first(tmp_path: Path) -> None:
    folder = shared_folder(tmp_path)
    model = wrapped(build(Net), FULL_SHARD, "blocks")

    for turn in range(3):
        fullshard.save(folder, model, step=5, extra={"turn": turn})

    assert fullshard.load(folder, model).extra == {"turn": 2}
    dist.barrier()
    assert len(list(folder.glob("step-*"))) == 1


@ranks(2)
def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    folder = shared_folder(tmp_path)
    model = wrapped(build(Net), FULL_SHARD, "blocks", use_orig_params=True)
    optimizer = adamw(model)
    trained(model, optimizer, range(2))
    weights = copied(model.state_dict())
    state = full_state(model, optimizer)

    first = fullshard.save(folder, model, optimizer, step=2, asynchronous=True)
    trained(model, optimizer, range(2, 4))
    second = fullshard.save(folder, model, optimizer, step=4, asynchronous=True)
    trained(model, optimizer, range(4, 5))

    assert first.done()
    assert second.wait() == folder / "step-00000004"
    assert fullshard.load(first.wait(), model, optimizer).step == 2
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    assert_same_optim_state(full_state(model, optimizer), state)


@ranks(2)
def test_a_save_that_fails_in_the_background_is_told_by_the_next(tmp_path: Path) -> None:
    folder = shared_folder(tmp_path)
    (folder / "file").touch()
    model = wrapped(build(Net), FULL_SHARD, "blocks")

    with warnings.catch_warnings(record=True):
        handle = fullshard.save(folder / "file", model, asynchronous=True)
        with pytest.raises(CheckpointError, match="file"):
            handle.wait()
    with pytest.raises(CheckpointError, match="file"):
        fullshard.save(folder, model)

    fullshard.save(folder, model, step=1)
    assert fullshard.load(folder, model).step == 1


def damaged_copies(checkpoint: Path) -> Any:
    """Every file of a checkpoint, with one byte after another turned, at several places."""
    for path in sorted(checkpoint.iterdir()):
        good = path.read_bytes()
        for position in {0, 1, len(good) // 3, len(good) // 2, len(good) - 2, len(good) - 1}:
            bad = bytearray(good)
            bad[position] ^= 1 << (position % 8)
            path.write_bytes(bad)
            yield path, position
        path.write_bytes(good)


@ranks(2)
def test_one_turned_bit_in_any_file_is_found_and_the_file_named(tmp_path: Path) -> None:
    folder = shared_folder(tmp_path)
    model = wrapped(build(Net), FULL_SHARD, "blocks")
    optimizer = adam(model)
    trained(model, optimizer, range(1))
    fullshard.save(folder, model, optimizer, step=1)
    before = copied(model.state_dict())
    assert len(list((folder / "step-00000001").iterdir())) == 3
    dist.barrier()

    damages = damaged_copies(folder / "step-00000001") if dist.get_rank() == 0 else None
    while True:
        told = [next(damages, None) if damages else None]
        dist.broadcast_object_list(told, src=0)
        if told[0] is None:
            break
        path, position = told[0]
        with pytest.raises(CheckpointError) as caught:
            fullshard.load(folder, model, optimizer)
        assert str(path) in str(caught.value), position

    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    fullshard.load(folder, model, optimizer)


@ranks(2)
def test_a_file_cut_short_missing_or_an_index_turned_is_named(tmp_path: Path) -> None:
    folder = shared_folder(tmp_path)
    model = wrapped(build(Net), FULL_SHARD, "blocks")
    fullshard.save(folder, model, step=1)
    data = folder / "step-00000001" / "rank-00001.bin"
    for damage in ("short", "missing", "index"):
        dist.barrier()
        if dist.get_rank() == 0:
            if damage == "short":
                data.write_bytes(data.read_bytes()[:-1])
            elif damage == "missing":
                data.unlink()
            else:
                index = folder / "checkpoints.json"
                index.write_text(index.read_text().replace("step-00000001", "step-00000002"))
        dist.barrier()
        name = "checkpoints.json" if damage == "index" else "rank-00001.bin"
        with pytest.raises(CheckpointError, match=name):
            fullshard.load(folder, model)


@ranks(2)
def test_a_checkpoint_of_another_model_is_refused_with_the_names_that_differ(
    tmp_path: Path,
) -> None:
    folder = shared_folder(tmp_path)
    fullshard.save(folder, wrapped(build(Net), FULL_SHARD, "blocks"), step=1)

    renamed = build(Net)
    renamed.tail = renamed.head
    del renamed.head
    with pytest.raises(CheckpointError, match=r"it has no tail.weight, tail.bias; the model has"):
        fullshard.load(folder, FSDP(renamed))
    reshaped = build(Net)
    reshaped.head = nn.Linear(7, 4, device=device())
    message = r"another model: shapes differ: head.weight \(\(3, 7\) in the ch.*, \(4, 7\) in the m"
    with pytest.raises(CheckpointError, match=message):
        fullshard.load(folder, FSDP(reshaped))


@ranks(2)
def test_where_there_is_no_checkpoint_every_rank_is_told(tmp_path: Path) -> None:
    folder = shared_folder(tmp_path)

    with pytest.raises(FileNotFoundError, match="There is no checkpoint in"):
        fullshard.load(folder / "nowhere", wrapped(build(Net), FULL_SHARD, "blocks"))

    assert fullshard.latest(folder / "nowhere") is None


def test_one_process_reads_what_ranks_saved_and_runs_no_code(tmp_path: Path) -> None:
    (expected, *_) = run_on_ranks(2, train_and_save, tmp_path, FULL_SHARD, "blocks", True)
    bare = build(Net)
    optimizer = adam(bare)
    classes = _classes_unpickled()

    found = fullshard.load(tmp_path, bare, optimizer)

    assert classes == []
    assert found.step == 2
    assert all(torch.equal(v.cpu(), expected[0][k]) for k, v in bare.state_dict().items())
    momentum = optimizer.state[bare.head.weight]["exp_avg"].cpu()
    assert torch.equal(momentum, expected[1]["state"]["head.weight"]["exp_avg"].cpu())


def _classes_unpickled() -> list[Any]:
    """From now on, every class or function that this process looks up to unpickle something."""
    found: list[Any] = []
    sys.addaudithook(
        lambda event, args: found.append(args) if event == "pickle.find_class" else None
    )
    return found
