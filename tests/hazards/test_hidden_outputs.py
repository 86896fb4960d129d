"""Tensors that leave a unit beside its outputs: in objects, arguments, hooks and attributes."""

from __future__ import annotations

import collections
import copy
import dataclasses
from typing import Any

import pytest
import torch
from tests.original.training import IN_PLACE, STRATEGIES, InPlace, Net, compare, inputs
from torch import nn

from fullshard import ShardingStrategy
from fullshard.testing import ranks
from fullshard.wrap import ModuleWrapPolicy

SHARDING = pytest.mark.parametrize("strategy", [*STRATEGIES[:2], *IN_PLACE])


@dataclasses.dataclass(slots=True)
class Auxiliary:
    loss: torch.Tensor


HIDDEN: dict[str, tuple[Any, Any]] = {
    "slots": (Auxiliary, lambda hidden: hidden.loss),
    "deque": (lambda loss: collections.deque([loss]), lambda hidden: hidden[0]),
}


class Branch(nn.Module):
    """A loss that is computed last, so that autograd begins with it, beside the main output."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.main, self.side = nn.Linear(5, 5), nn.Linear(5, 5)
        self.kind = kind

    def forward(self, x: torch.Tensor, losses: list[torch.Tensor]) -> Any:
        hidden = torch.tanh(self.main(x))
        loss = torch.tanh(self.side(hidden)).square().mean()
        if self.kind == "argument":
            losses.append(loss)
            return hidden, None
        return hidden, HIDDEN[self.kind][0](loss)


class Branches(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Branch(kind) for _ in range(3))
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        for layer in self.layers:
            x, hidden = layer(x, losses)
            if hidden is not None:
                losses.append(HIDDEN[self.kind][1](hidden))
        return x.square().mean() + sum(losses)


@pytest.mark.parametrize("kind", [*HIDDEN, "argument"])
@ranks(2)
def test_what_is_hidden_beside_other_outputs_leads_gradients_back(kind: str) -> None:
    compare(
        lambda: Branches(kind), auto_wrap_policy=ModuleWrapPolicy({Branch}), use_orig_params=False
    )


@pytest.mark.parametrize("of", ["inputs", "outputs"])
@SHARDING
@ranks(2)
def test_features_that_hooks_keep_lead_gradients_back_when_nothing_else_does(
    strategy: ShardingStrategy, of: str
) -> None:
    features: dict[int, torch.Tensor] = {}

    def with_hooks() -> Net:
        net = Net()
        for index, block in enumerate(net.blocks):
            if of == "outputs":
                block.up.register_forward_hook(
                    lambda _, args, output, index=index: features.update({index: output})
                )
            else:
                block.down.register_forward_pre_hook(
                    lambda _, args, index=index: features.update({index: args[0]})
                )
        return net

    def step_of(model: nn.Module, step: int) -> torch.Tensor:
        model(inputs(step))
        loss = sum(feature.square().mean() for feature in features.values())
        features.clear()
        loss.backward()
        return loss.detach()

    model = compare(with_hooks, step_of, sharding_strategy=strategy)
    if isinstance(strategy, InPlace):
        return
    # The copy finds what was put on the model's modules.
    twin = copy.deepcopy(model)
    torch.testing.assert_close(step_of(twin, 5), step_of(model, 5))


@ranks(2)
def test_what_a_unit_puts_aside_leads_gradients_back_through_the_units_around_it() -> None:
    class Storing(nn.Linear):
        loss: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output = torch.tanh(super().forward(x))
            self.loss = output.square().mean()
            return output

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.inner = nn.Linear(5, 5), Storing(5, 5)
            self.after = nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.after(self.inner(torch.tanh(self.before(x))))

    def step_of(model: nn.Module, step: int) -> torch.Tensor:
        model(inputs(step))
        loss = sum(m.loss for m in model.modules() if isinstance(m, Storing))  # type: ignore[misc]
        loss.backward()  # type: ignore[attr-defined]
        return loss.detach()  # type: ignore[attr-defined]

    compare(
        lambda: nn.Sequential(Around(), Around()),
        step_of,
        auto_wrap_policy=ModuleWrapPolicy({Around, Storing}),
    )
