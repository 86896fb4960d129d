"""When the next unit is gathered, seen from inside the one that computes."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.original.training import build, inputs
from torch import nn

from fullshard import BackwardPrefetch, ShardingStrategy
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.engine.unit import State
from fullshard.testing import device, ranks

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


class Chain(nn.Module):
    """Layers of which the first ones' forward changes the last one's parameters."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.shrinks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layers[1](torch.tanh(self.layers[0](x))))
        if self.shrinks:
            with torch.no_grad():
                for parameter in self.layers[-1].parameters():
                    parameter.mul_(0.5)
        for layer in self.layers[2:]:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "FULL_SHARD"])
@ranks(2)
def test_a_unit_that_is_changed_while_it_is_gathered_ahead_computes_with_the_change(
    strategy: str, use_orig_params: bool
) -> None:
    if device().type != "cpu":
        pytest.skip("an accelerator gathers beside what it computes: see docs/engine.md")
    options = {
        "sharding_strategy": ShardingStrategy[strategy],
        "forward_prefetch": True,
        "use_orig_params": use_orig_params,
    }
    bare = build(lambda: Chain([nn.Linear(5, 5) for _ in range(LAYERS)]))
    model = copy.deepcopy(bare)
    model.layers = nn.ModuleList(FSDP(layer, **options) for layer in model.layers)
    wrapped = FSDP(model, **options)

    for step in range(4):
        bare.shrinks = model.shrinks = step >= 2
        expected, found = bare(inputs(step)), wrapped(inputs(step))
        torch.testing.assert_close(found, expected)
        expected.sum().backward()
        found.sum().backward()


@ranks(2)
def test_a_host_that_frees_nothing_before_backward_gathers_everything_at_the_beginning() -> None:
    options = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
    units = [FSDP(build(lambda: nn.Linear(5, 5)), **options) for _ in range(LAYERS)]
    model = FSDP(nn.Sequential(*units), **options)
    states: list[list[State]] = []
    units[0].module.register_forward_pre_hook(
        lambda *_: states.append([unit._unit.state for unit in units])
    )

    for _ in range(2):
        model(inputs(0)).sum().backward()
    with torch.no_grad():
        model(inputs(0))

    first, second, evaluation = states
    assert first == [State.GATHERED] + [State.SHARDED] * (LAYERS - 1)
    if device().type == "cpu":
        assert State.SHARDED not in second
        # Nothing stays after a forward that no backward follows: no more than the next one.
        assert evaluation.count(State.SHARDED) == LAYERS - 2
