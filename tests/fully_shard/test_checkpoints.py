"""Checkpoints of models of both APIs: fullshard's own, and torch's of distributed state."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.compat.installed import installed
from tests.fully_shard.side_by_side import (
    OURS,
    THEIRS,
    Block,
    Model,
    adamw,
    build,
    by_block,
    told,
    train,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import fullshard
from fullshard import FullyShardedDataParallel
from fullshard.testing import device, ranks, run_on_ranks
from fullshard.wrap import ModuleWrapPolicy


def wrapped(model: nn.Module) -> Any:
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True
    )


def in_place(model: nn.Module) -> Any:
    by_block()(OURS, model)
    return model


def under_torchs(model: nn.Module) -> Any:
    by_block()(THEIRS, model)
    return model


KINDS = {"wrapper": wrapped, "fully_shard": in_place, "torch": under_torchs}


def steps(model: Any, optimizer: Any, first: int, count: int) -> list[float]:
    """Losses of steps in which all ranks have the same batch: as many as one likes."""
    losses = []
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(11, (4, 6), generator=generator).to(device())
        loss = model(tokens).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def made(kind: str, seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = KINDS[kind](Model().to(device()))
    return model, adamw(model.parameters())


def save_ours(kind: str, folder: str) -> list[float]:
    model, optimizer = made(kind, 1)
    steps(model, optimizer, 0, 2)
    fullshard.save(folder, model, optimizer, step=2, extra={"seen": 2})
    return steps(model, optimizer, 2, 2)


def resume_ours(kind: str, folder: str) -> list[float]:
    model, optimizer = made(kind, 2)
    found = fullshard.resume(folder, model, optimizer)
    assert found is not None
    assert (found.step, found.extra["seen"]) == (2, 2)
    return steps(model, optimizer, 2, 2)


#: Who saves, on how many ranks, and who goes on, on how many.
MOVES = [
    ("fully_shard", 3, "wrapper", 2),
    ("wrapper", 2, "fully_shard", 3),
    ("fully_shard", 2, "fully_shard", 1),
    ("fully_shard", 1, "fully_shard", 4),
]


@pytest.mark.parametrize(("source", "ranks_before", "target", "ranks_after"), MOVES)
def test_a_training_goes_on_in_the_other_api_and_on_other_ranks(
    source: str, ranks_before: int, target: str, ranks_after: int, tmp_path: Path
) -> None:
    (expected, *_) = run_on_ranks(ranks_before, save_ours, source, str(tmp_path))
    (found, *_) = run_on_ranks(ranks_after, resume_ours, target, str(tmp_path))
    assert found == pytest.approx(expected, rel=1e-4)


def save_distributed(kind: str, folder: str) -> list[float]:
    model, optimizer = made(kind, 1)
    steps(model, optimizer, 0, 2)
    with compat_of(kind):
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=folder)
    return steps(model, optimizer, 2, 2)


def load_distributed(kind: str, folder: str) -> list[float]:
    model, optimizer = made(kind, 2)
    with compat_of(kind):
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(states, checkpoint_id=folder)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=states["model"],
            optim_state_dict=states["optimizer"],
        )
    return steps(model, optimizer, 2, 2)


def compat_of(kind: str) -> Any:
    """Torch's functions for distributed state know the wrapper where it is in torch's place."""
    return installed() if kind == "wrapper" else contextlib.nullcontext()


DISTRIBUTED = [
    ("torch", 3, "fully_shard", 2),
    ("fully_shard", 2, "torch", 3),
    ("wrapper", 2, "fully_shard", 2),
]


@pytest.mark.parametrize(("source", "ranks_before", "target", "ranks_after"), DISTRIBUTED)
def test_torchs_distributed_checkpoint_moves_a_training(
    source: str, ranks_before: int, target: str, ranks_after: int, tmp_path: Path
) -> None:
    if device().type != "cpu":
        pytest.skip("DTensor's own collectives of GPU tensors over gloo end the process")
    (expected, *_) = run_on_ranks(ranks_before, save_distributed, source, str(tmp_path))
    (found, *_) = run_on_ranks(ranks_after, load_distributed, target, str(tmp_path))
    assert found == pytest.approx(expected, rel=1e-4)


OPTIONS = [
    dict(zip(("full_state_dict", "cpu_offload", "ignore_frozen_params"), flags, strict=True))
    for flags in itertools.product([False, True], repeat=3)
]


def freeze_one(api: Any, model: Any) -> None:
    model.blocks[1].requires_grad_(False)
    by_block()(api, model)


def flattened(state: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(state, dict):
        found: dict[str, Any] = {}
        for name, value in state.items():
            found.update(flattened(value, f"{prefix}/{name}"))
        return found
    if isinstance(state, list):
        return flattened(dict(enumerate(state)), prefix)
    return {prefix: told(state) if isinstance(state, torch.Tensor) else state}


def assert_same_state(ours: Any, theirs: Any) -> None:
    found, expected = flattened(ours), flattened(theirs)
    assert list(found) == list(expected)
    for name, value in expected.items():
        if isinstance(value, tuple) and value and isinstance(value[-1], torch.Tensor):
            assert found[name][:-1] == value[:-1], name
            torch.testing.assert_close(found[name][-1], value[-1], msg=name)
        elif isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[name], value, msg=name)
        else:
            assert found[name] == value, name


@ranks(2)
def test_states_are_torchs_for_all_options() -> None:
    if device().type != "cpu":
        pytest.skip("DTensor's own collectives of GPU tensors over gloo end the process")
    theirs, ours = (train(api, freeze_one, steps=2) for api in (THEIRS, OURS))
    for given in OPTIONS:
        options = StateDictOptions(**given)
        assert_same_state(
            get_model_state_dict(ours.model, options=options),
            get_model_state_dict(theirs.model, options=options),
        )
        states = []
        for each in (ours, theirs):
            states.append(get_optimizer_state_dict(each.model, each.optimizer, options=options))
        assert_same_state(*states)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    assert_same_state(
        *(get_optimizer_state_dict(e.model, e.optimizer, options=flat) for e in (ours, theirs))
    )
    part = {ours.model.blocks[0]}, {theirs.model.blocks[0]}  # type: ignore[index, union-attr]
    assert_same_state(
        get_model_state_dict(ours.model, submodules=part[0]),
        get_model_state_dict(theirs.model, submodules=part[1]),
    )


@pytest.mark.parametrize("from_first", [False, True])
@pytest.mark.parametrize("full", [False, True])
@ranks(2)
def test_states_are_set_as_under_torchs(full: bool, from_first: bool) -> None:
    if from_first and not full:
        pytest.skip("torch broadcasts whole states only")
    if device().type != "cpu":
        pytest.skip("DTensor's own collectives of GPU tensors over gloo end the process")
    get = StateDictOptions(full_state_dict=full)
    put = StateDictOptions(full_state_dict=full, broadcast_from_rank0=from_first, strict=False)
    after = []
    for api in (THEIRS, OURS):
        trained = train(api, by_block(), steps=2)
        model_state = get_model_state_dict(trained.model, options=get)
        optimizer_state = get_optimizer_state_dict(trained.model, trained.optimizer, options=get)
        if from_first and dist.get_rank() != 0:
            model_state, optimizer_state = {}, {}
        # One that is missing stays as it is.
        model_state.pop("head.bias", None)
        model: Any = build()
        by_block()(api, model)
        optimizer = adamw(model.parameters())
        missing = set_model_state_dict(model, model_state, options=put).missing_keys
        set_optimizer_state_dict(model, optimizer, optimizer_state, options=put)
        state = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
        after.append((*state, steps(model, optimizer, 5, 2), missing))
    assert_same_state(list(after[1][:2]), list(after[0][:2]))
    assert after[1][2] == pytest.approx(after[0][2], rel=1e-4)
    assert after[1][3] == after[0][3]


@ranks(2)
def test_a_checkpoint_keeps_what_a_background_save_was_given(tmp_path: Path) -> None:
    model, optimizer = made("fully_shard", 1)
    steps(model, optimizer, 0, 2)
    handle = fullshard.save(str(tmp_path), model, optimizer, step=2, asynchronous=True)
    expected = steps(model, optimizer, 2, 2)
    handle.wait()

    other, other_optimizer = made("fully_shard", 2)
    fullshard.load(str(tmp_path), other, other_optimizer)
    assert steps(other, other_optimizer, 2, 2) == pytest.approx(expected, rel=1e-5)


@ranks(2)
def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = made("fully_shard", 1)
    fullshard.save(str(tmp_path), model, optimizer, step=1)
    torch.manual_seed(5)
    other: Any = in_place(Model(width=7).to(device()))
    before = [p.to_local().clone() for p in other.parameters()]
    with pytest.raises(fullshard.CheckpointError, match="another model"):
        fullshard.load(str(tmp_path), other)
    for parameter, value in zip(other.parameters(), before, strict=True):
        assert torch.equal(parameter.to_local(), value)
