"""Copies of what fully_shard made, and parameters and modules that users replace between steps."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.fully_shard.side_by_side import (
    OURS,
    THEIRS,
    adamw,
    assert_same_training,
    build,
    by_block,
    forward_loss,
    sgd,
    train,
)
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.testing import device, ranks


def sharded(api: Any = OURS) -> Any:
    model = build().to(device())
    by_block()(api, model)
    return model


@ranks(2)
def test_a_module_is_neither_copied_nor_pickled_as_under_torchs() -> None:
    for api in (THEIRS, OURS):
        model = sharded(api)
        with pytest.raises(AssertionError, match="FSDP does not support deepcopy"):
            copy.deepcopy(model)
        with pytest.raises((TypeError, pickle.PicklingError)):
            pickle.dumps(model)


@ranks(2)
def test_what_a_module_and_an_optimizer_hold_is_copied() -> None:
    model = sharded()
    optimizer = adamw(model.parameters())
    forward_loss(model, 0).backward()
    optimizer.step()
    states = model.state_dict(), optimizer.state_dict()

    copies = copy.deepcopy(states)
    gradients = copy.deepcopy([p.grad for p in model.parameters()])
    another = copy.deepcopy(optimizer)

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
            parameter.grad.zero_()
    for name, value in copies[0].items():
        if isinstance(value, DTensor) and value.to_local().numel():
            assert value.to_local().data_ptr() != states[0][name].to_local().data_ptr()
    assert any(bool(g.to_local().any()) for g in gradients)
    assert len(another.state) == len(optimizer.state)
    model.load_state_dict(copies[0])
    assert any(bool(p.to_local().any()) for p in model.parameters())


def write_data(model: Any) -> None:
    model.head.weight.data.mul_(2)


def set_data(model: Any) -> None:
    model.head.weight.data = model.head.weight.data * 2


def write_local_part(model: Any) -> None:
    with torch.no_grad():
        model.head.weight.to_local().mul_(2)


def assign_state(model: Any) -> None:
    state = {name: value * 2 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def load_state(model: Any) -> None:
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


def move_modules(model: Any) -> None:
    model.blocks = nn.ModuleList([model.blocks[2], model.blocks[0], model.blocks[1]])


def repeat_a_module(model: Any) -> None:
    model.blocks[1] = model.blocks[0]


def freeze(model: Any) -> None:
    model.head.requires_grad_(False)


CHANGES = [write_data, set_data, write_local_part, assign_state, load_state]
CHANGES += [move_modules, repeat_a_module, freeze]


@pytest.mark.parametrize("change", CHANGES)
@ranks(2)
def test_what_is_changed_between_steps_is_taken_up_as_under_torchs(
    change: Callable[[Any], None],
) -> None:
    def step_with(api: Any, model: Any, step: int) -> torch.Tensor:
        if step == 1:
            change(model)
        loss = forward_loss(model, step)
        loss.backward()
        return loss

    theirs = train(THEIRS, by_block(), sgd, steps=2, step_with=step_with)
    ours = train(OURS, by_block(), sgd, steps=2, step_with=step_with)
    assert_same_training(ours, theirs)


def by_a_whole_one(model: Any) -> None:
    model.head.weight = nn.Parameter(2 * model.head.weight.full_tensor().detach())


def by_a_distributed_one(model: Any) -> None:
    model.head.weight = nn.Parameter(2 * model.head.weight.detach())


def by_doubling(model: Any) -> None:
    with torch.no_grad():
        model.head.weight.mul_(2)


@pytest.mark.parametrize("replace", [by_a_whole_one, by_a_distributed_one])
@ranks(2)
def test_a_parameter_that_is_replaced_trains_as_one_that_was_written_to(
    replace: Callable[[Any], None],
) -> None:
    losses = []
    for change in (by_doubling, replace):
        model = sharded()
        forward_loss(model, 0).backward()
        model.zero_grad()
        change(model)
        with torch.no_grad():
            # Takes up what was replaced; an optimizer made before would hold what was put there.
            forward_loss(model, 0)
        optimizer = sgd(model.parameters())
        found = []
        for step in range(2):
            loss = forward_loss(model, step)
            loss.backward()
            assert isinstance(model.head.weight, DTensor)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append(found)
    assert losses[0] == losses[1]


@ranks(2)
def test_a_module_that_is_put_in_anothers_place_is_not_sharded_as_under_torchs() -> None:
    for api in (THEIRS, OURS):
        model = sharded(api)
        forward_loss(model, 0).backward()
        model.zero_grad()
        torch.manual_seed(3)
        model.head = nn.Linear(5, 3, device=device())
        loss = forward_loss(model, 1)
        loss.backward()
        assert type(model.head.weight.grad) is torch.Tensor
        assert isinstance(model.embed.weight.grad, DTensor)


@ranks(2)
def test_a_model_that_is_converted_trains_in_its_new_dtype() -> None:
    model = sharded().to(torch.float64)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    expected = build().to(device()).to(torch.float64)
    torch.testing.assert_close(forward_loss(model, 0), forward_loss(expected, 0))
    forward_loss(model, 0).backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float64}


class HasNamesOfOurs(nn.Module):
    """Attributes that a class of the library might have, too."""

    def __init__(self) -> None:
        super().__init__()
        self._unit = nn.Linear(4, 4)
        self.unit = nn.Linear(4, 4)
        self.schedule = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.unit(self._unit(x)) * self.schedule


@ranks(2)
def test_the_modules_own_attributes_stay_its_own() -> None:
    torch.manual_seed(0)
    plain = HasNamesOfOurs().to(device())
    model: Any = OURS.fully_shard(copy.deepcopy(plain))
    x = torch.ones(2, 4, device=device())
    torch.testing.assert_close(model(x), plain(x))


@ranks(2)
def test_a_gradient_that_is_no_dtensor_is_refused_by_name() -> None:
    model: Any = sharded()
    model.head.weight.grad = torch.zeros(model.head.weight.shape, device=device())

    with pytest.raises(RuntimeError, match=r"gradient of parameter 'head.weight' is a plain"):
        forward_loss(model, 0).backward()
