"""fully_shard (FSDP2) is torch's before and after install(), and fullshard's in between."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from tests.compat.installed import installed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fullshard
from fullshard import compat
from fullshard.testing import device, ranks


def build() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).to(device())


def inputs() -> torch.Tensor:
    torch.manual_seed(torch.distributed.get_rank())
    return torch.rand(5, 4, device=device())


def train(model: nn.Module) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, eps=1e-3)
    losses = []
    for _ in range(3):
        loss = model(inputs()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_with_fully_shard() -> list[float]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import FSDPModule, fully_shard

    model = build()
    fully_shard(model[0])
    fully_shard(model)
    losses = train(model)
    assert isinstance(model, FSDPModule)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert state["0.weight"].shape == (8, 4)
    return losses


@ranks(2)
def test_fully_shard_trains_before_while_and_after_fullshard_is_installed() -> None:
    expected = train(DistributedDataParallel(build()))

    before = train_with_fully_shard()
    with installed():
        assert torch.distributed.fsdp.fully_shard is fullshard.fully_shard
        assert torch.distributed.fsdp.FSDPModule is fullshard.FSDPModule
        during = train_with_fully_shard()
    assert torch.distributed.fsdp.fully_shard is not fullshard.fully_shard
    after = train_with_fully_shard()

    for losses in (before, during, after):
        torch.testing.assert_close(losses, expected)


#: Where libraries import names of torch's fully_shard from, beside ``torch.distributed.fsdp``.
PLACES = {
    "torch.distributed.fsdp._fully_shard": ("FSDPModule", "fully_shard", "MixedPrecisionPolicy"),
    "torch.distributed.fsdp._fully_shard._fully_shard": (
        "FSDPModule",
        "UnshardHandle",
        "fully_shard",
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_api": ("CPUOffloadPolicy", "MixedPrecisionPolicy"),
    "torch.distributed._composable.fsdp": ("FSDPModule", "fully_shard", "CPUOffloadPolicy"),
    "torch.distributed._composable.fsdp.fully_shard": ("fully_shard",),
    "torch.distributed._composable.replicate_with_fsdp": ("ReplicateModule", "replicate"),
    "torch.distributed.pipelining.stage": ("FSDPModule", "fully_shard"),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_name_is_fullshards_wherever_it_is_imported_from(place: str) -> None:
    module = importlib.import_module(place)
    theirs = {name: getattr(module, name) for name in PLACES[place] if hasattr(module, name)}
    assert theirs

    with installed():
        # As ``from place import name`` does.
        ours = {name: getattr(importlib.import_module(place), name) for name in theirs}

    assert ours == {name: getattr(fullshard, name) for name in theirs}
    assert {name: getattr(module, name) for name in theirs} == theirs


def test_a_name_that_a_program_replaces_for_a_while_is_torchs_again_afterwards() -> None:
    module: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fully_shard")
    theirs = module.FSDPModule
    other = type("Other", (theirs,), {})

    with installed():
        before = module.FSDPModule
        module.FSDPModule = other
        assert module.FSDPModule is other
        module.FSDPModule = before
        assert module.FSDPModule is fullshard.FSDPModule
    assert module.FSDPModule is theirs


@ranks(2)
def test_the_state_of_a_module_is_found_for_models_of_either() -> None:
    from torch.distributed.fsdp import fully_shard

    theirs = fully_shard(build())
    with installed():
        from torch.distributed.fsdp._fully_shard._fsdp_state import (
            FSDPState,
            _get_module_fsdp_state,
        )

        ours = fullshard.fully_shard(build())
        assert _get_module_fsdp_state(ours) is ours._get_fsdp_state()
        assert isinstance(_get_module_fsdp_state(theirs), FSDPState)
        assert _get_module_fsdp_state(nn.Linear(2, 2)) is None
        # Torch's own goes on reading its own names.
        train(theirs)


class WithMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(4, 4, device=device())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.linear(x))


@ranks(2)
def test_a_registered_method_gathers_under_either_generation() -> None:
    expected = WithMethod().twice(inputs())

    with installed():
        from torch.distributed.fsdp import (
            FullyShardedDataParallel,
            fully_shard,
            register_fsdp_forward_method,
        )

        assert FullyShardedDataParallel is fullshard.FullyShardedDataParallel
        for model in (fully_shard(WithMethod()), FullyShardedDataParallel(WithMethod())):
            register_fsdp_forward_method(model, "twice")
            torch.testing.assert_close(model.twice(inputs()), expected)
        bare = WithMethod()
        register_fsdp_forward_method(bare, "twice")  # neither: nothing happens
        torch.testing.assert_close(bare.twice(inputs()), expected)
    assert not compat.is_installed()


@pytest.mark.parametrize("name", torch.distributed.fsdp.__all__)
def test_every_public_name_of_torchs_package_is_in_fullshard(name: str) -> None:
    ours, torchs = getattr(fullshard, name), getattr(torch.distributed.fsdp, name)

    assert name in dir(fullshard)
    assert ours.__name__ == torchs.__name__
    # What is not ours is the very same object.
    assert ours.__module__.startswith("fullshard.") or ours is torchs
