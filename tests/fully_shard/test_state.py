"""State dicts and checkpoints of models that fully_shard was applied to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from tests.fully_shard.side_by_side import (
    OURS,
    THEIRS,
    Block,
    Model,
    adamw,
    build,
    by_block,
    forward_loss,
    skip_without_collectives_of_dtensors,
    told,
    train,
    whole,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

import fullshard
from fullshard import FullyShardedDataParallel
from fullshard.testing import ranks
from fullshard.wrap import ModuleWrapPolicy


@ranks(2)
def test_a_state_dict_has_torchs_names_and_dtensors() -> None:
    states = [train(api, by_block(), steps=1).model.state_dict() for api in (THEIRS, OURS)]

    assert list(states[1]) == list(states[0])
    for name, expected in states[0].items():
        found = states[1][name]
        assert type(found) is type(expected), name
        if isinstance(expected, DTensor):
            assert told(found)[:-1] == told(expected)[:-1]
            torch.testing.assert_close(found.to_local(), expected.to_local())
            torch.testing.assert_close(whole(found), whole(expected))


@ranks(2)
def test_a_state_dict_between_forward_and_backward_is_sharded_and_harms_nothing() -> None:
    gradients = []
    for api in (THEIRS, OURS):
        model: Any = build()
        by_block(reshard_after_forward=False)(api, model)
        loss = forward_loss(model, 0)
        state = model.state_dict()
        assert all(isinstance(state[name], DTensor) for name, _ in model.named_parameters())
        assert isinstance(model.blocks[0].up.state_dict()["weight"], DTensor)
        loss.backward()
        gradients.append(told(model.blocks[0].up.weight.grad)[-1])

    torch.testing.assert_close(gradients[1], gradients[0])


@ranks(2)
def test_whole_values_are_loaded_as_distributed_ones_and_by_torchs_function() -> None:
    skip_without_collectives_of_dtensors()
    values = {name: 2 * value for name, value in build().state_dict().items()}
    expected: Any = build()
    expected.load_state_dict(values)
    for how in ("distribute_tensor", "set_model_state_dict"):
        model: Any = build()
        by_block()(OURS, model)
        if how == "distribute_tensor":
            state = {}
            for name, own in model.state_dict().items():
                value = values[name]
                if isinstance(own, DTensor):
                    value = distribute_tensor(value, own.device_mesh, own.placements)
                state[name] = value
            model.load_state_dict(state)
        else:
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            # A copy, which torch fills with DTensors.
            set_model_state_dict(model, dict(values), options=options)
        torch.testing.assert_close(forward_loss(model, 0), forward_loss(expected, 0))
        gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        for name, value in values.items():
            torch.testing.assert_close(gathered[name], value)


@ranks(2)
def test_a_distributed_checkpoint_moves_between_torchs_and_ours(tmp_path: Path) -> None:
    for source, target in ((OURS, THEIRS), (THEIRS, OURS), (OURS, OURS)):
        folder = str(tmp_path / f"{source.__name__}-{target.__name__}")
        trained = train(source, by_block(), steps=2)
        model_state, optimizer_state = get_state_dict(trained.model, trained.optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)

        model: Any = Model()
        by_block()(target, model)
        optimizer = adamw(model.parameters())
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(states, checkpoint_id=folder)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=states["model"],
            optim_state_dict=states["optimizer"],
        )
        for one, steps in ((trained.model, trained.optimizer), (model, optimizer)):
            forward_loss(one, 4).backward()
            steps.step()
        named: Any = trained.model.named_parameters()
        for name, parameter in named:
            other: Any = model.get_parameter(name)
            torch.testing.assert_close(whole(other), whole(parameter), rtol=1e-5, atol=1e-6)


def wrapped() -> tuple[Any, Any]:
    torch.manual_seed(7)
    model = FullyShardedDataParallel(
        Model(), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True
    )
    return model, adamw(model.parameters())


def in_place() -> tuple[Any, Any]:
    torch.manual_seed(8)
    model: Any = Model()
    by_block()(OURS, model)
    return model, adamw(model.parameters())


def steps(model: Any, optimizer: Any, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        loss = forward_loss(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@ranks(2)
def test_fullshards_checkpoints_move_between_the_wrapper_and_fully_shard(tmp_path: Path) -> None:
    for index, (make, make_again) in enumerate(
        ((in_place, in_place), (in_place, wrapped), (wrapped, in_place))
    ):
        folder = str(tmp_path / str(index))
        model, optimizer = make()
        steps(model, optimizer, 0, 2)
        fullshard.save(folder, model, optimizer, step=2)

        other, other_optimizer = make_again()
        found = fullshard.load(folder, other, other_optimizer)

        assert found.step == 2
        expected = steps(model, optimizer, 2, 3)
        torch.testing.assert_close(steps(other, other_optimizer, 2, 3), expected)
