"""When the next unit is gathered, seen from inside the one that computes."""

from __future__ import annotations

import pytest
import torch
from tests.original.training import build, inputs
from torch import nn

from fullshard import BackwardPrefetch
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.engine.unit import State
from fullshard.testing import ranks

LAYERS = 4
PRE, POST = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST


class Layer(nn.Module):
    """Notes, at three moments of a step, whether its neighbours are being gathered."""

    before: FSDP | None
    after: FSDP | None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.seen: dict[str, bool] = {}

    def note(self, moment: str, neighbour: FSDP | None) -> None:
        if neighbour is not None:
            self.seen[moment] = neighbour._unit.state is not State.SHARDED

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.note("forward", self.after)
        hidden = self.linear(x)
        if x.requires_grad:
            hidden.register_hook(lambda _: self.note("backward", self.before))
            x.register_hook(lambda _: self.note("gradients", self.before))
        return torch.tanh(hidden)


def noted(
    backward: BackwardPrefetch | None, forward: bool, use_orig_params: bool
) -> dict[str, set[bool]]:
    """What layers saw in the second step: the first one learns the order."""
    options = {
        "backward_prefetch": backward,
        "forward_prefetch": forward,
        "use_orig_params": use_orig_params,
    }
    units = [FSDP(build(Layer), **options) for _ in range(LAYERS)]
    layers = [unit.module for unit in units]
    # Past nn.Module, which would take a neighbour for a part of the layer.
    for index, layer in enumerate(layers):
        vars(layer)["before"] = units[index - 1] if index > 0 else None
        vars(layer)["after"] = units[index + 1] if index + 1 < LAYERS else None
    model = FSDP(nn.Sequential(*units), **options)
    for _ in range(2):
        for layer in layers:
            layer.seen.clear()
        model(inputs(0).requires_grad_()).sum().backward()
    moments = ("forward", "backward", "gradients")
    return {m: {layer.seen[m] for layer in layers if m in layer.seen} for m in moments}


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("backward", [None, PRE, POST])
@ranks(2)
def test_in_backward_the_next_unit_is_gathered_before_or_after_the_gradients_or_never_ahead(
    backward: BackwardPrefetch | None, use_orig_params: bool
) -> None:
    seen = noted(backward, False, use_orig_params)

    assert seen["backward"] == {backward is PRE}
    assert seen["gradients"] == {backward is not None}


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("forward", [False, True])
@ranks(2)
def test_in_forward_the_next_unit_is_gathered_before_the_current_one_computes_if_asked_for(
    forward: bool, use_orig_params: bool
) -> None:
    seen = noted(None, forward, use_orig_params)

    assert seen["forward"] == {forward}
