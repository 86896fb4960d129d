"""fully_shard trains as torch's own does: losses, gradients, parameters, placements, shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.fully_shard.side_by_side import (
    OURS,
    THEIRS,
    Model,
    adamw,
    assert_same,
    assert_same_training,
    both,
    build,
    by_block,
    forward_loss,
    inputs,
    sgd,
    told,
    train,
    whole,
)
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import fullshard
from fullshard.testing import ranks


@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
@ranks(2)
def test_training_is_torchs_on_two_ranks(reshard_after_forward: bool | None) -> None:
    both(by_block(reshard_after_forward=reshard_after_forward))


@ranks(4)
def test_training_is_torchs_on_four_ranks_some_of_which_have_no_rows() -> None:
    both(by_block(), sgd)


@ranks(2)
def test_training_is_that_of_distributed_data_parallel() -> None:
    reference = DistributedDataParallel(build())
    optimizer = adamw(reference.parameters())
    losses = []
    for step in range(3):
        loss = forward_loss(reference, step)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()

    ours = train(OURS, by_block())

    torch.testing.assert_close(ours.losses, losses)
    for name, parameter in reference.module.named_parameters():
        found = whole(ours.model.get_parameter(name))
        torch.testing.assert_close(found, parameter.detach(), rtol=1e-5, atol=1e-5)


@ranks(1)
def test_a_single_rank_trains_as_torchs_does() -> None:
    both(by_block())


@ranks(2)
def test_the_module_stays_and_its_class_gains_methods() -> None:
    model: Any = Model()
    block: Any = model.blocks[0]

    returned = fullshard.fully_shard(block)

    assert returned is block is model.blocks[0]
    assert fullshard.FSDPModule in type(block).__mro__
    assert type(block).__name__ == "FSDPBlock"
    assert [name for name, _ in block.named_parameters()] == [
        "norm.weight",
        "norm.bias",
        "up.weight",
        "up.bias",
        "down.weight",
    ]
    assert not isinstance(model, fullshard.FSDPModule)
    assert isinstance(block.up.weight, nn.Parameter)
    assert isinstance(block.up.weight, DTensor)
    assert block.up.weight.placements == (Shard(0),)
    assert not isinstance(model.head.weight, DTensor)


def freeze_some(api: Any, model: Any) -> None:
    for parameter in model.blocks[1].parameters():
        parameter.requires_grad_(False)
    model.blocks[0].norm.weight.requires_grad_(False)
    by_block()(api, model)


@ranks(2)
def test_frozen_parameters_stay_as_they_are() -> None:
    both(freeze_some)


class Tied(Model):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(5, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.out(hidden)


def build_tied() -> nn.Module:
    torch.manual_seed(1)
    return Tied()


@ranks(2)
def test_parameters_that_two_modules_share_are_one_parameter() -> None:
    ours, _ = both(by_block(), make=build_tied)

    assert ours.model.out.weight is ours.model.embed.weight


def shard_lists(api: Any, model: Any) -> None:
    api.fully_shard([model.blocks[0], model.blocks[1]])
    api.fully_shard([model.embed, model.head])
    api.fully_shard(model)


@ranks(2)
def test_a_parameter_that_another_call_has_taken_is_refused_as_under_torchs() -> None:
    for api in (THEIRS, OURS):
        model = Tied()
        api.fully_shard(model.embed)
        api.fully_shard(model)
        with pytest.raises(ValueError, match="already managed by another FSDP group"):
            model(inputs(0))


@ranks(2)
def test_modules_in_a_list_are_one_unit() -> None:
    both(shard_lists)


def ignore_some(api: Any, model: Any) -> None:
    ignored = {model.head.weight, *model.blocks[0].norm.parameters()}
    for block in model.blocks:
        api.fully_shard(block, ignored_params=ignored)
    api.fully_shard(model, ignored_params=ignored)


@ranks(2)
def test_ignored_parameters_stay_whole_and_their_gradients_unreduced() -> None:
    ours, _ = both(ignore_some)

    assert not isinstance(ours.model.head.weight, DTensor)


class Even(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6)) for _ in "ab")
        self.last = nn.Conv1d(6, 4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden.mT)


def build_even() -> nn.Module:
    torch.manual_seed(2)
    return Even()


def any_even_dim(parameter: nn.Parameter) -> Shard | None:
    return Shard(parameter.dim() - 1) if parameter.shape[-1] % 2 == 0 else None


@ranks(2)
def test_parameters_are_cut_along_the_dimension_that_is_asked_for() -> None:
    ours, _ = both(by_block(shard_placement_fn=any_even_dim), make=build_even)

    assert ours.model.embed.weight.placements == (Shard(1),)
    assert ours.model.last.weight.placements == (Shard(2),)


@ranks(2)
def test_a_parameter_that_no_rank_used_has_no_gradient() -> None:
    class Skips(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.blocks[0](self.embed(x)))

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Skips()

    ours, theirs = both(by_block(), make=make)

    assert ours.gradients[0]["blocks.1.up.weight"] is None
    assert theirs.gradients[0]["blocks.1.up.weight"] is None


@ranks(3)
def test_a_parameter_that_one_rank_used_has_a_gradient_on_all_also_without_rows() -> None:
    class Uneven(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.embed(x)
            # One unit, of which ranks use different parameters.
            return self.head(hidden) * (self.scale if dist.get_rank() == 1 else 1.0)

    torch.manual_seed(0)
    model: Any = Uneven()
    fullshard.fully_shard(model)

    forward_loss(model, 0).backward()

    assert model.scale.grad is not None
    assert model.scale.grad.to_local().numel() == (1 if dist.get_rank() == 0 else 0)
    assert model.blocks[0].up.weight.grad is None


@ranks(2)
def test_gradients_accumulate_over_backwards() -> None:
    def twice(api: Any, model: Any, step: int) -> torch.Tensor:
        forward_loss(model, step).backward()
        loss = forward_loss(model, step + 10)
        loss.backward()
        return loss

    both(by_block(), step_with=twice)


@ranks(2)
def test_gradients_stay_local_without_synchronization_and_are_reduced_later() -> None:
    def accumulate(api: Any, model: Any, step: int) -> torch.Tensor:
        model.set_requires_gradient_sync(False)
        forward_loss(model, step).backward()
        assert all(p.grad is None for p in model.parameters())
        model.set_requires_gradient_sync(True)
        loss = forward_loss(model, step + 10)
        loss.backward()
        return loss

    both(by_block(), step_with=accumulate)


@ranks(2)
def test_unreduced_gradients_of_low_precision_add_up_in_the_dtype_that_they_are_reduced_in() -> (
    None
):
    policy = fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model: Any = build()
    by_block(mp_policy=policy)(OURS, model)
    found: list[list[torch.Tensor]] = []
    for syncs in (True, False):
        for step in range(16):
            model.set_requires_gradient_sync(syncs or step == 15)
            forward_loss(model, step).backward()
        found.append([p.grad.to_local() for p in model.parameters()])
        model.zero_grad()

    torch.testing.assert_close(found[1], found[0])


@ranks(2)
def test_evaluation_gives_torchs_outputs_between_steps() -> None:
    theirs, ours = train(THEIRS, by_block(), steps=1), train(OURS, by_block(), steps=1)
    outputs = []
    for model in (theirs.model, ours.model):
        with torch.no_grad():
            outputs.append(model(torch.arange(11)))

    torch.testing.assert_close(outputs[1], outputs[0])
    assert isinstance(ours.model.head.weight, DTensor)


@ranks(2)
def test_parameters_after_forward_are_sharded_or_full_as_torchs_are() -> None:
    for options in ({"reshard_after_forward": True}, {"reshard_after_forward": False}, {}):
        kinds = []
        for api in (THEIRS, OURS):
            model: Any = build()
            by_block(**options)(api, model)
            loss = forward_loss(model, 0)
            kinds.append([(n, isinstance(p, DTensor)) for n, p in model.named_parameters()])
            loss.backward()
            kinds.append([(n, isinstance(p, DTensor)) for n, p in model.named_parameters()])
        assert kinds[0] == kinds[2], options
        assert kinds[1] == kinds[3], options


@ranks(2)
def test_an_exception_in_forward_leaves_nothing_behind() -> None:
    model: Any = build()
    by_block()(OURS, model)
    with pytest.raises(IndexError):
        model(torch.full((2, 2), 99))

    assert all(isinstance(p, DTensor) for p in model.parameters())
    after = train(OURS, by_block(), make=lambda: build(), steps=2)
    assert_same_training(after, train(THEIRS, by_block(), steps=2))
    loss = forward_loss(model, 0)
    loss.backward()
    torch.testing.assert_close(loss.item(), after.losses[0])
    assert_same(told(model.head.weight.grad), after.gradients[0]["head.weight"], "head")
