"""However many steps a model has taken, nothing is left of them.

What each step leaves, all later ones look at, call or keep: a program gets slower and larger.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.original.training import STRATEGIES, WIDTH, Block, Net, build, inputs
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import MixedPrecision, ShardingStrategy
from fullshard.engine.comm.agreements import SWITCH
from fullshard.testing import device, ranks
from fullshard.wrap import ModuleWrapPolicy

STEPS = 5


class Giving(Block):
    """Returns a parameter, and keeps aside what leads into it."""

    def __init__(self) -> None:
        super().__init__()
        self.aside: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> Any:
        self.aside = self.scale.sum()
        return super().forward(x), self.scale


class Taking(Block):
    """Is given a parameter of another unit, and hands it on."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> Any:
        return super().forward(x) * scale, scale


class Hiding(Block):
    """Returns a parameter in an object of its own kind."""

    def forward(self, x: torch.Tensor) -> Any:
        return types.SimpleNamespace(x=super().forward(x), scale=self.scale)


class Exchanging(nn.Module):
    """Parameters leave their units: returned, kept aside, given to others, handed on by them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.embed, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.giving, self.taking, self.hiding = Giving(), Taking(), Hiding()
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> Any:
        x, scale = self.giving(self.embed(x))
        # Where full parameters stay after a forward, this is one.
        self.kept[:] = [self.giving.scale]
        x, _ = self.taking(x, scale)
        x, scale = self.taking(x, self.scale)
        x, _ = self.taking(x, scale)
        return self.head(self.hiding(x).x) + self.giving.aside


class Checkpointed(Net):
    """Blocks that are computed again in backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


def with_frozen_parts(make: Callable[[], nn.Module]) -> nn.Module:
    """Blocks whose inputs tell when their backward is over: the last gradient may be a frozen's."""
    module = make()
    for block in filter(lambda each: isinstance(each, Block), module.modules()):
        block.up.requires_grad_(False)
    return module


def step(model: FSDP, number: int) -> None:
    """Everything that programs do in a step."""
    with model.no_sync():
        model(inputs(number)).square().mean().backward()
    (model(inputs(number)) + model(inputs(number + 1))).square().mean().backward()
    with torch.no_grad():
        model(inputs(number))
    # A forward that no backward follows.
    model(inputs(number))
    model.clip_grad_norm_(1.0)
    model.zero_grad()


def objects() -> Counter[str]:
    """How many objects of each type there are."""
    gc.collect()
    return Counter(
        f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects()
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Net,
    "exchanging": Exchanging,
    "checkpointed": functools.partial(Checkpointed, use_reentrant=False),
    "reentrant": functools.partial(Checkpointed, use_reentrant=True),
}
#: Strategy, original parameters, frozen parts (which need the former), low precision.
MODES = [(s, orig, False, False) for s, orig in itertools.product(STRATEGIES, [False, True])]
MODES += [(s, True, True, False) for s in STRATEGIES]
MODES += [(s, True, False, True) for s in STRATEGIES]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("strategy", "use_orig_params", "frozen_parts", "low_precision"), MODES)
@ranks(2)
def test_steps_leave_nothing_behind(
    strategy: ShardingStrategy,
    use_orig_params: bool,
    frozen_parts: bool,
    low_precision: bool,
    kind: str,
) -> None:
    os.environ[SWITCH] = "0"  # What ranks remember to compare themselves by is bounded, but large.
    make = MODELS[kind]
    model = FSDP(
        build(functools.partial(with_frozen_parts, make) if frozen_parts else make),
        process_group=dist.new_group(),
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(torch.bfloat16) if low_precision else None,
        device_id=device() if device().type == "cuda" else None,
    )
    for number in range(3):
        step(model, number)
    objects()  # Leaves something itself, once.
    before = objects()

    for number in range(STEPS):
        step(model, number)

    grown = objects() - before
    if kind == "exchanging":
        # What it keeps for the user to use holds the graph, and so the model.
        model.giving.module.aside = None
        model.kept.clear()
    assert not {kind: count for kind, count in grown.items() if count >= STEPS}


@ranks(2)
def test_a_unit_whose_layers_are_frozen_in_turn_remembers_few_of_the_patterns() -> None:
    layers = nn.Sequential(*(nn.Linear(5, 5) for _ in range(6)))
    model = FSDP(build(lambda: layers), use_orig_params=True)
    for number, pattern in enumerate(itertools.product([False, True], repeat=6)):
        for layer, trains in zip(layers, pattern, strict=True):
            layer.requires_grad_(trains)
        if any(pattern):
            model(inputs(number)).square().mean().backward()
            with FSDP.summon_full_params(model, with_grads=True, writeback=False):
                assert tuple(layer.bias.grad is not None for layer in layers) == pattern
            model.zero_grad()
    assert len(model._unit._nodes) < 10
