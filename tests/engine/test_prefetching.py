"""When the next unit is gathered, seen from inside the one that computes."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from tests.original.training import build, inputs
from torch import nn

from fullshard import BackwardPrefetch, ShardingStrategy
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.engine.runtime import policy as policies
from fullshard.engine.runtime.policy import Policy
from fullshard.engine.runtime.unit import State
from fullshard.testing import device, ranks
from fullshard.wrap import ModuleWrapPolicy

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
    return {m: {layer.seen[m] for layer in layers if m in layer.seen} for m in moments}  # type: ignore[misc]


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("backward", [None, PRE, POST])
@ranks(2)
def test_in_backward_the_next_unit_is_gathered_before_or_after_the_gradients_or_never_ahead(
    backward: BackwardPrefetch | None, use_orig_params: bool
) -> None:
    seen = noted(backward, False, use_orig_params)

    assert seen["backward"] == {backward is PRE}
    assert seen["gradients"] == {backward is not None}


class Observer(nn.Linear):
    """Notes, when backward has come to it, which of the units are unsharded."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(x)
        hidden.register_hook(lambda _: self.note())
        return torch.tanh(hidden)

    def note(self) -> None:
        units: list[FSDP] = vars(self)["units"]
        self.seen = [unit._unit.state is not State.SHARDED for unit in units]


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
@ranks(2)
def test_as_many_units_are_gathered_ahead_in_backward_as_the_policy_says(ahead: int) -> None:
    runs_ahead = device().type != "cpu"
    policy = Policy(runs_ahead, units_ahead_in_backward=ahead)
    with mock.patch.object(policies, "_ACCELERATOR" if runs_ahead else "_HOST", policy):
        units = [FSDP(nn.Linear(5, 5, device=device())) for _ in range(4)]
        observer = Observer(5, 5, device=device())
        vars(observer)["units"] = units
        after = [FSDP(nn.Linear(5, 5, device=device())) for _ in range(3)]
        model = FSDP(nn.Sequential(*units, FSDP(observer), *after))
        for _ in range(2):
            model(inputs(0)).sum().backward()

    assert observer.seen == [False] * (4 - ahead) + [True] * ahead


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("forward", [False, True])
@ranks(2)
def test_in_forward_the_next_unit_is_gathered_before_the_current_one_computes_if_asked_for(
    forward: bool, use_orig_params: bool
) -> None:
    seen = noted(None, forward, use_orig_params)

    assert seen["forward"] == {forward}


class Chain(nn.Module):
    """Layers in whose forward, half-way, something happens to the last one's parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(LAYERS))
        self.change: Callable[[nn.Parameter], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index == 2 and self.change is not None:
                for parameter in self.layers[-1].parameters():
                    self.change(parameter)
            x = torch.tanh(layer(x))
        return x


def shrink(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.mul_(0.5)


def shrink_data(parameter: nn.Parameter) -> None:
    parameter.data.mul_(0.5)


def replace(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data * 0.5


def skip_accelerators() -> None:
    if device().type != "cpu":
        pytest.skip("an accelerator gathers ahead only if asked, and then does not look")


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("change", [shrink, replace])
@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "FULL_SHARD"])
@ranks(2)
def test_a_unit_that_forward_changes_after_it_was_gathered_computes_with_the_change(
    strategy: str, change: Any, use_orig_params: bool
) -> None:
    skip_accelerators()
    options = {
        "sharding_strategy": ShardingStrategy[strategy],
        "use_orig_params": use_orig_params,
    }
    bare = build(Chain)
    model = copy.deepcopy(bare)
    model.layers = nn.ModuleList(FSDP(layer, **options) for layer in model.layers)
    wrapped = FSDP(model, **options)

    for step in range(6):
        bare.change = model.change = change if step >= 2 else None
        expected, found = bare(inputs(step)), wrapped(inputs(step))
        torch.testing.assert_close(found, expected)
        # What a backward leaves gathered for the next micro-batch is no excuse.
        with wrapped.no_sync() if step in (2, 3) else contextlib.nullcontext():
            found.sum().backward()


class Teacher(nn.Module):
    """A student, and a teacher that is the average of what the student has been."""

    def __init__(self, updates_first: bool) -> None:
        super().__init__()
        self.updates_first = updates_first
        self.student = nn.Sequential(*(nn.Linear(5, 5) for _ in range(LAYERS)))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def update(self) -> None:
        # What is on its way arrives, with what it was sent as.
        time.sleep(0.02)
        pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
        for average, parameter in pairs:
            average.data.mul_(0.5).add_(parameter.data, alpha=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.updates_first:
            self.update()
        guess = self.student(x)
        if not self.updates_first:
            self.update()
        with torch.no_grad():
            wanted = self.teacher(x)
        return (guess - wanted).square().sum()


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "FULL_SHARD"])
@ranks(2)
def test_an_average_that_forward_updates_is_never_a_step_behind(strategy: str) -> None:
    skip_accelerators()
    # A student that stays gathered after its forward has other shapes than its teacher's pieces.
    bare = build(lambda: Teacher(updates_first=strategy == "SHARD_GRAD_OP"))
    with torch.no_grad():
        for parameter in bare.student.parameters():
            parameter.add_(0.1)
    wrapped = FSDP(
        copy.deepcopy(bare),
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=True,
    )
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (bare, wrapped)]

    for step in range(5):
        # The same on all ranks, so that the mean of their gradients is the bare model's.
        losses = [model(torch.full((3, 5), 0.1 * step)) for model in (bare, wrapped)]
        torch.testing.assert_close(losses[1], losses[0])
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


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
    assert first == [State.UNSHARDED] + [State.SHARDED] * (LAYERS - 1)
    if device().type == "cpu":
        assert State.SHARDED not in second
        # Nothing stays after a forward that no backward follows: no more than the next one.
        assert evaluation.count(State.SHARDED) == LAYERS - 2


def chain(use_orig_params: bool) -> tuple[nn.Sequential, list[FSDP], FSDP]:
    """A bare model, and its copy with a unit for each of its four layers."""
    bare = build(lambda: nn.Sequential(*(nn.Linear(5, 5) for _ in range(4))))
    units = [FSDP(copy.deepcopy(linear), use_orig_params=use_orig_params) for linear in bare]  # type: ignore[attr-defined]
    return bare, units, FSDP(nn.Sequential(*units), use_orig_params=use_orig_params)  # type: ignore[return-value]


def change_all(change: Callable[[nn.Parameter], None], *models: nn.Module) -> None:
    for model in models:
        for parameter in model.parameters():
            change(parameter)


def states_before_backward(model: FSDP) -> list[State]:
    loss = model(inputs(0)).sum()
    found = [unit._unit.state for unit in model.module]  # type: ignore[attr-defined]
    loss.backward()
    return found


@pytest.mark.parametrize("backward", [None, PRE, POST])
@ranks(2)
def test_a_host_frees_no_units_that_its_backward_begins_with(
    backward: BackwardPrefetch | None,
) -> None:
    units = [FSDP(build(lambda: nn.Linear(5, 5)), backward_prefetch=backward) for _ in range(4)]
    model = FSDP(nn.Sequential(*units), backward_prefetch=backward)

    # The first one learns the order.
    first, second = states_before_backward(model), states_before_backward(model)

    assert first == [State.SHARDED] * 4
    kept = 2 if backward is PRE and device().type == "cpu" else 0
    assert second == [State.SHARDED] * (4 - kept) + [State.UNSHARDED] * kept
    assert all(unit._unit.state is State.SHARDED for unit in units)
    assert not any(unit._unit.shows_full for unit in units)


@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_units_that_are_kept_for_a_backward_that_does_not_come_are_gathered_anew(
    use_orig_params: bool,
) -> None:
    bare, _, model = chain(use_orig_params)

    for _ in range(3):
        # Nobody can see it.
        change_all(shrink_data, bare, model)
        for _ in range(2):
            torch.testing.assert_close(model(inputs(0)), bare(inputs(0)))


@ranks(2)
def test_a_unit_that_runs_once_more_than_before_sees_what_the_model_did_to_it() -> None:
    skip_accelerators()

    class Twice(nn.Module):
        again = False

        def __init__(self, *layers: nn.Module) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layers)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            if self.again:
                change_all(shrink, self.layers[-1])
                x = self.layers[-1](x)
            return x

    bare = build(lambda: Twice(*(nn.Linear(5, 5) for _ in range(3))))
    units = [FSDP(copy.deepcopy(layer), use_orig_params=True) for layer in bare.layers]
    model = FSDP(Twice(*units), use_orig_params=True)

    for again in (False, False, True):
        bare.again = model.module.again = again
        torch.testing.assert_close(model(inputs(0)), bare(inputs(0)))


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("change", [shrink, shrink_data, replace])
@ranks(2)
def test_unsharding_a_unit_that_is_kept_for_backward_shows_what_it_is_now(
    change: Any, use_orig_params: bool
) -> None:
    bare, units, model = chain(use_orig_params)
    for _ in range(2):
        model(inputs(0))

    change_all(change, bare, model)
    units[3].unshard()
    torch.testing.assert_close(units[3].module.weight.detach(), bare[3].weight.detach())
    with torch.no_grad():
        for each in (units[3].module, bare[3]):
            each.weight.add_(1.0)
    units[3].reshard()

    torch.testing.assert_close(model(inputs(0)), bare(inputs(0)))


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("how", ["in place", "optimizer"])
@ranks(2)
def test_a_change_in_place_between_forward_and_backward_is_seen_by_all_units(
    how: str, use_orig_params: bool
) -> None:
    bare, _, model = chain(use_orig_params)
    for _ in range(2):
        model(inputs(0)).sum().backward()
        model.zero_grad()
    expected, found = inputs(0).requires_grad_(), inputs(0).requires_grad_()
    losses = [bare(expected).square().sum(), model(found).square().sum()]

    # The bare model's by way of .data, of which autograd does not take notice.
    change_all(shrink_data, bare)
    if how == "in place":
        change_all(shrink, model)
    else:
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        model.zero_grad()
    for loss in losses:
        loss.backward()

    torch.testing.assert_close(found.grad, expected.grad)
