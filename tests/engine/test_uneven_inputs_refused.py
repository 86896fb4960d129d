"""What Join refuses of a wrapped model, and what its options do."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.engine.test_uneven_inputs import loss_of, own_steps, wrap
from tests.original.training import full_parameters
from torch.distributed.algorithms.join import Join, Joinable

from fullshard import FullyShardedDataParallel as FSDP
from fullshard.grad.scaler import ShardedGradScaler
from fullshard.testing import ranks

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "original-parameters.md"


@ranks(2)
def test_forgotten_optimizers_and_schedulers_are_asked_for() -> None:
    model, optimizer = wrap(use_orig_params=True)
    assert isinstance(model, Joinable)
    with pytest.raises(ValueError, match=r"Pass Join\(\[model\], optimizer=optimizer\)"):
        Join([model])
    with pytest.raises(TypeError, match="Join expects optimizer=Optimizer"):
        Join([model], optimizer=[model])
    half = torch.optim.SGD([*model.parameters()][:2], lr=0.1)
    with pytest.raises(
        ValueError, match="do not hold 14 trainable parameters of the model, in 'head"
    ):
        Join([model], optimizer=half)
    with pytest.raises(ValueError, match="outermost wrapped model"):
        Join([model.module.blocks[0]], optimizer=optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(ValueError, match=r"lr_scheduler=scheduler"):
        Join([model], optimizer=optimizer)
    Join([model], optimizer=optimizer, lr_scheduler=None)


@ranks(2)
def test_a_model_that_was_said_not_to_be_trained_has_no_backward() -> None:
    model, _ = wrap(use_orig_params=True)
    with (
        pytest.raises(RuntimeError, match="ranks without data would not step them"),
        Join([model], optimizer=None),
    ):
        loss_of(model, dist.get_rank(), 0).backward()
    loss_of(model, dist.get_rank(), 0).backward()
    model.requires_grad_(False)
    with Join([model], optimizer=None):
        x = torch.ones(2, 5, requires_grad=True)
        for _ in own_steps([1, 3]):
            model(x).sum().backward()
    assert (x.grad is not None) == (len([*own_steps([1, 3])]) > 0)


def save(model: FSDP, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    model.state_dict()


def summon(model: FSDP, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    full_parameters(model)


def scale(model: FSDP, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    scaler = ShardedGradScaler("cpu")
    scaler.scale(loss).backward()
    scaler.step(optimizer)


def run_another_model(model: FSDP, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    other, _ = wrap(use_orig_params=True)
    loss_of(other, 0, 0)


@pytest.mark.parametrize("operation", [save, summon, scale, run_another_model])
@ranks(3)
def test_what_ranks_without_data_cannot_follow_raises_on_all_of_them(
    operation: Callable[..., None],
) -> None:
    model, optimizer = wrap(use_orig_params=True)
    batches = [3, 1, 2]
    with pytest.raises(RuntimeError, match="inside Join, while some ranks have run out of data"):
        run_and_then(model, optimizer, batches, operation)

    # Nothing is left of the context: other models of the same ranks train and are saved.
    del model, optimizer
    other, its_optimizer = wrap(use_orig_params=True)
    loss_of(other, dist.get_rank(), 0).backward()
    its_optimizer.step()
    assert other.state_dict()


@ranks(2)
def test_nothing_is_left_of_a_join_whose_block_raises() -> None:
    model, optimizer = wrap(use_orig_params=True)

    def train() -> None:
        with Join([model], optimizer=optimizer):
            loss_of(model, dist.get_rank(), 0).backward()
            raise ArithmeticError("the program's own")

    with pytest.raises(ArithmeticError):
        train()

    assert model._unit.joining is None
    assert not optimizer._optimizer_step_pre_hooks
    loss_of(model, dist.get_rank(), 1).backward()
    assert model.state_dict()


def run_and_then(
    model: FSDP, optimizer: torch.optim.Optimizer, batches: list[int], operation: Any
) -> None:
    with Join([model], optimizer=optimizer):
        for step in own_steps(batches):
            loss = loss_of(model, dist.get_rank(), step)
            if step == 1:
                operation(model, optimizer, loss)
            else:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@ranks(2)
def test_all_ranks_can_be_made_to_raise_when_one_runs_out_of_data() -> None:
    model, optimizer = wrap(use_orig_params=True)
    batches = [2, 5]
    done: list[int] = []

    def train() -> None:
        with Join([model], optimizer=optimizer, throw_on_early_termination=True):
            for step in own_steps(batches):
                loss_of(model, dist.get_rank(), step).backward()
                optimizer.step()
                model.state_dict()
                done.append(step)

    with pytest.raises(RuntimeError, match="exhausted"):
        train()
    assert done == [0, 1]
    assert model._unit.joining is None
    loss_of(model, dist.get_rank(), 2).backward()


@ranks(2)
def test_the_example_of_the_documents_runs() -> None:
    text = DOCUMENT.read_text(encoding="utf-8").split("## Uneven numbers of batches")[1]
    block = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert block is not None
    names: dict[str, Any] = {}

    dist.destroy_process_group()  # the example makes its own, as on a rank that was just launched
    exec(block.group(1), names)

    assert names["scheduler"].last_epoch == 5
    assert names["optimizer"].param_groups[0]["lr"] == pytest.approx(1e-2)
    states = names["optimizer"].state.values()
    assert [state["step"].item() for state in states] == [5]


@ranks(2)
def test_a_join_that_is_not_enabled_is_as_none() -> None:
    model, optimizer = wrap(use_orig_params=True)
    with Join([model], optimizer=optimizer, enable=False):
        for step in range(2):
            loss_of(model, dist.get_rank(), step).backward()
            optimizer.step()
            assert model._unit.joining is None


@ranks(2)
def test_nothing_is_left_of_a_join_and_a_model_in_one_can_be_copied() -> None:
    model, optimizer = wrap(use_orig_params=True)
    with Join([model], optimizer=optimizer):
        loss_of(model, dist.get_rank(), 0).backward()
        copied = copy.deepcopy(model)
        optimizer.step()
    assert copied._unit.joining is None
    assert model._unit.joining is None
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    for each in (model, copied):
        loss_of(each, dist.get_rank(), 1).backward()
