"""What people do with autograd: in-place inputs, gradient penalties, auxiliary losses, hooks."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.original.training import (
    EITHER_API,
    EITHER_MODES,
    WIDTH,
    Block,
    Net,
    assert_at_rest,
    assert_same_parameters,
    blocks_policy,
    build,
    compare,
    inputs,
    loss_of,
    sharded,
    train_step,
)
from torch import nn

from fullshard import BackwardPrefetch, ShardingStrategy
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.engine.runtime.pytrees import tensors_in
from fullshard.testing import device, ranks
from fullshard.wrap import ModuleWrapPolicy

EACH_MODE = pytest.mark.parametrize(("strategy", "use_orig_params"), EITHER_MODES)
EACH_STRATEGY = pytest.mark.parametrize("strategy", EITHER_API)


def net_of(block: type[Block], count: int = 3) -> Net:
    """A net of blocks of another kind."""
    net = Net()
    net.blocks = nn.ModuleList(block() for _ in range(count))
    return net


def wrapped(strategy: ShardingStrategy, use_orig_params: bool = True) -> Any:
    return sharded(
        build(Net),
        sharding_strategy=strategy,
        auto_wrap_policy=blocks_policy(),
        use_orig_params=use_orig_params,
    )


@EACH_MODE
@ranks(2)
def test_a_unit_may_change_its_input_in_place(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    class InPlace(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))

    compare(
        lambda: nn.Sequential(nn.Linear(5, WIDTH), InPlace(), InPlace()),
        sharding_strategy=strategy,
        auto_wrap_policy=lambda module, recurse, **_: recurse or isinstance(module, InPlace),
        use_orig_params=use_orig_params,
    )


@EACH_STRATEGY
@ranks(2)
def test_a_units_output_may_be_changed_in_place(strategy: ShardingStrategy) -> None:
    class Changes(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for block in self.blocks:
                x = block(x)
                x += 1
                x[:, 0] *= 2
            return self.head(x)

    def step_of(model: nn.Module, step: int) -> torch.Tensor:
        output = model(inputs(step))
        output.mul_(2)
        loss = output.square().mean()
        loss.backward()
        return loss.detach()

    compare(Changes, step_of, sharding_strategy=strategy)


class Viewing(Block):
    """A block that returns a view of what it computed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).view(1, *x.shape)


@pytest.mark.parametrize("prefetch", [*BackwardPrefetch, None])
@EACH_MODE
@ranks(2)
def test_a_view_that_a_unit_returns_may_be_changed_in_place(
    strategy: ShardingStrategy, use_orig_params: bool, prefetch: BackwardPrefetch | None
) -> None:
    class Changes(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Viewing() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for block in self.blocks:
                x = block(x)
                x += 1
                x = x.squeeze(0)
                x *= 2
            return self.head(x).view(1, -1)

    def step_of(model: nn.Module, step: int) -> torch.Tensor:
        output = model(inputs(step))
        output.mul_(2)
        loss = output.square().mean()
        loss.backward()
        return loss.detach()

    compare(
        Changes,
        step_of,
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
        backward_prefetch=prefetch,
        auto_wrap_policy=ModuleWrapPolicy({Viewing}),
    )


@EACH_MODE
@ranks(2)
def test_gradients_of_inputs_alone_leave_the_parameters_without(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    bare, model = build(Net), wrapped(strategy, use_orig_params)
    found = []
    for each in (bare, model):
        x = inputs(0).requires_grad_()
        (gradient,) = torch.autograd.grad(each(x).square().mean(), x)
        found.append(gradient)
    torch.testing.assert_close(*found)
    assert all(p.grad is None for p in model.parameters())
    assert_at_rest(model)
    for each in (bare, model):
        train_step(each, 1)
    assert_same_parameters(bare, model)


@EACH_STRATEGY
@ranks(2)
def test_backward_with_inputs_chosen_leaves_the_parameters_without(
    strategy: ShardingStrategy,
) -> None:
    bare, model = build(Net), wrapped(strategy)
    found = []
    for each in (bare, model):
        x = inputs(0).requires_grad_()
        each(x).square().mean().backward(inputs=[x])
        found.append(x.grad)
    torch.testing.assert_close(*found)
    assert all(p.grad is None for p in model.parameters())
    assert_at_rest(model)


@EACH_STRATEGY
@ranks(2)
def test_inputs_get_the_gradients_they_get_without_sharding(strategy: ShardingStrategy) -> None:
    bare, model = build(Net), wrapped(strategy)
    found = []
    for each in (bare, model):
        x = inputs(0).requires_grad_()
        each(x).square().mean().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found)


def penalised(model: nn.Module, step: int, again: bool = False) -> torch.Tensor:
    """The WGAN-GP pattern: the norm of the inputs' gradient is a part of the loss."""
    x = inputs(step).requires_grad_()
    output = model(x)
    (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    loss = output.mean() + (gradient.norm(dim=1) - 1).square().mean()
    if again:
        loss.backward(retain_graph=True)
    loss.backward()
    return loss.detach()


@EACH_MODE
@ranks(2)
def test_a_gradient_penalty_trains_as_without_sharding(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    compare(step_of=penalised, sharding_strategy=strategy, use_orig_params=use_orig_params)


@EACH_MODE
@ranks(2)
def test_a_gradient_penalty_may_go_backward_twice(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    twice = functools.partial(penalised, again=True)
    compare(step_of=twice, sharding_strategy=strategy, use_orig_params=use_orig_params)


@EACH_STRATEGY
@ranks(2)
def test_a_gradient_penalty_over_one_unit_trains_as_without_sharding(
    strategy: ShardingStrategy,
) -> None:
    compare(step_of=penalised, sharding_strategy=strategy, auto_wrap_policy=lambda **_: False)


@pytest.mark.parametrize("prefetch", [BackwardPrefetch.BACKWARD_PRE, None])
@pytest.mark.parametrize("meanwhile", ["another loss", "gradients of inputs", "another penalty"])
@EACH_MODE
@ranks(2)
def test_a_gradient_penalty_may_wait_while_others_go_backward(
    strategy: ShardingStrategy,
    use_orig_params: bool,
    meanwhile: str,
    prefetch: BackwardPrefetch | None,
) -> None:
    def penalty_of(model: nn.Module, step: int) -> torch.Tensor:
        x = inputs(step).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return (gradient.norm(dim=1) - 1).square().mean()

    def step_of(model: nn.Module, step: int) -> torch.Tensor:
        other = loss_of(model, step)
        penalty = penalty_of(model, step)
        if meanwhile == "another loss":
            other.backward()
        elif meanwhile == "gradients of inputs":
            x = inputs(step).requires_grad_()
            torch.autograd.grad(model(x).sum(), x)
        else:
            penalty_of(model, step + 10).backward()
        penalty.backward()
        if isinstance(model, FSDP):
            assert_at_rest(model)
        return penalty.detach()

    compare(
        step_of=step_of,
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
        backward_prefetch=prefetch,
    )


@EACH_STRATEGY
@ranks(2)
def test_a_gradient_penalty_that_nobody_wants_is_not_waited_for(
    strategy: ShardingStrategy,
) -> None:
    model = wrapped(strategy)
    x = inputs(0).requires_grad_()
    gradient = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    del gradient
    train_step(model, 1)
    assert_at_rest(model)


@EACH_MODE
@ranks(2)
def test_data_that_is_changed_after_a_backward_that_made_a_graph_is_used_by_the_next_forward(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    def step_of(model: nn.Module, step: int) -> torch.Tensor:
        # As optimizers do that were written before parameters could be changed under no_grad.
        for parameter in model.parameters():
            parameter.data.mul_(0.9)
        loss = loss_of(model, step)
        loss.backward(create_graph=True)
        model.zero_grad()
        return loss.detach()

    reference, model = build(Net), wrapped(strategy, use_orig_params)
    for step in range(3):
        torch.testing.assert_close(step_of(model, step), step_of(reference, step))


class StoresLosses(Net):
    """Mixture-of-experts style: every block leaves an auxiliary loss on itself."""

    class Storing(Block):
        aux: torch.Tensor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.up(x))
            self.aux = hidden.square().mean() * self.scale.square().sum()
            return x + self.down(hidden)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Storing() for _ in range(3))


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("collected", ["in forward", "after forward"])
@EACH_STRATEGY
@ranks(2)
def test_auxiliary_losses_stored_on_modules_reach_their_parameters(
    strategy: ShardingStrategy, collected: str, alone: bool
) -> None:
    class Collects(StoresLosses):
        def forward(self, x: torch.Tensor) -> Any:
            output = super().forward(x)
            return output, sum(self.auxiliaries())

        def auxiliaries(self) -> list[torch.Tensor]:
            return [getattr(block, "module", block).aux for block in self.blocks]  # type: ignore[misc]

    def step_of(model: Any, step: int) -> torch.Tensor:
        output, auxiliary = model(inputs(step))
        if collected == "after forward":
            module = model.module if isinstance(model, FSDP) else model
            auxiliary = sum(module.auxiliaries())
        loss = auxiliary if alone else output.square().mean() + auxiliary
        loss.backward()
        return loss.detach()

    compare(
        Collects,
        step_of,
        sharding_strategy=strategy,
        auto_wrap_policy=lambda module, recurse, **_: recurse or isinstance(module, Block),
    )


@pytest.mark.parametrize(
    "before", ["not there", None, 0.0, torch.zeros(()), [None], {"aux": None}, {"aux": 0.0}]
)
@ranks(2)
def test_auxiliary_losses_that_begin_with_a_later_step_reach_their_parameters(
    before: torch.Tensor | float | str | list[Any] | dict[str, Any] | None,
) -> None:
    class Late(Block):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            if not isinstance(before, str):
                self.aux = copy.copy(before)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            output = super().forward(x)
            if self.calls > 1:
                # After the output, so that autograd comes to it first.
                loss = self.up(x).square().mean()
                if isinstance(before, list):
                    loss = [loss]
                elif isinstance(before, dict):
                    loss = {"aux": loss}
                self.aux = loss
            return output

    def step_of(model: Any, step: int) -> torch.Tensor:
        loss = model(inputs(step)).square().mean()
        if step > 0:
            loss = loss + sum(sum(tensors_in(block.aux)) for block in model.blocks)
        loss.backward()
        return loss.detach()

    # Without a gather ahead, which would have the parameters there by chance.
    compare(
        lambda: net_of(Late),
        step_of,
        auto_wrap_policy=ModuleWrapPolicy({Late}),
        backward_prefetch=None,
    )


@pytest.mark.parametrize("prefetch", [*BackwardPrefetch, None])
@pytest.mark.parametrize("place", ["_private", "_list", "buffer"])
@EACH_STRATEGY
@ranks(2)
def test_auxiliary_losses_are_found_under_any_name(
    strategy: ShardingStrategy, place: str, prefetch: BackwardPrefetch | None
) -> None:
    class Keeps(Block):
        def __init__(self) -> None:
            super().__init__()
            if place == "buffer":
                self.register_buffer("buffer", torch.zeros(()), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output = super().forward(x)
            # After the output, so that autograd comes to it first.
            loss = self.down(torch.tanh(self.up(output))).square().mean()
            setattr(self, place, [loss] if place == "_list" else loss)
            return output

    def kept_by(block: nn.Module) -> torch.Tensor:
        kept = getattr(block, place)
        return kept[0] if place == "_list" else kept

    compare_keeping(Keeps, kept_by, strategy, prefetch)


@ranks(2)
def test_private_attributes_of_modules_are_not_searched_for_losses() -> None:
    searched = []

    class LeadsAnywhere:
        def __getattribute__(self, name: str) -> Any:
            if name in ("__dict__", "__slots__"):
                searched.append(name)
            return super().__getattribute__(name)

    class Holds(Block):
        def __init__(self) -> None:
            super().__init__()
            self._one = LeadsAnywhere()
            self._several = [self._one]
            self._named = {"one": self._one}

    compare(lambda: net_of(Holds), auto_wrap_policy=ModuleWrapPolicy({Holds}))
    assert searched == []


@EACH_STRATEGY
@ranks(2)
def test_auxiliary_losses_kept_elsewhere_find_what_was_gathered_ahead(
    strategy: ShardingStrategy,
) -> None:
    if device().type != "cpu":
        pytest.skip("an accelerator does not wait for the unit that ran last")
    kept: dict[nn.Module, torch.Tensor] = {}

    class Keeps(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output = super().forward(x)
            kept[self] = self.down(torch.tanh(self.up(output))).square().mean()
            return output

    def kept_by(block: nn.Module) -> torch.Tensor:
        return kept[block.module if isinstance(block, FSDP) else block]

    compare_keeping(Keeps, kept_by, strategy, BackwardPrefetch.BACKWARD_PRE)


def compare_keeping(
    block: type[Block],
    kept_by: Callable[[Any], torch.Tensor],
    strategy: ShardingStrategy,
    prefetch: BackwardPrefetch | None,
) -> None:
    """Train a net of such blocks, each with a loss of its own that it does not return."""

    def step_of(model: Any, step: int) -> torch.Tensor:
        loss = model(inputs(step)).square().mean()
        loss = loss + sum(map(kept_by, model.blocks))
        loss.backward()
        return loss.detach()

    compare(
        lambda: net_of(block, 4),
        step_of,
        sharding_strategy=strategy,
        backward_prefetch=prefetch,
        auto_wrap_policy=ModuleWrapPolicy({block}),
    )


@EACH_STRATEGY
@pytest.mark.parametrize("nested", [False, True])
@ranks(2)
def test_a_backward_inside_of_a_forward_leaves_its_parameters_in_place(
    nested: bool, strategy: ShardingStrategy
) -> None:
    class Chunks(Net):
        """The head's loss goes backward chunk by chunk, to need less memory."""

        def forward(self, x: torch.Tensor) -> Any:
            hidden = self.embed(x)
            for block in self.blocks:
                hidden = block(hidden)
            leaf, total = hidden.detach().requires_grad_(), torch.zeros(())
            for chunk in leaf.chunk(2):
                loss = self.head(chunk).square().mean()
                loss.backward()
                total = total + loss.detach().cpu()
            return hidden, leaf.grad, total

    def step_of(model: Any, step: int) -> torch.Tensor:
        hidden, gradient, loss = model(inputs(step))
        hidden.backward(gradient)
        return loss

    classes = {Block, nn.Linear} if nested else {Block}
    compare(Chunks, step_of, sharding_strategy=strategy, auto_wrap_policy=ModuleWrapPolicy(classes))


@EACH_STRATEGY
@ranks(2)
def test_users_hooks_see_what_they_see_without_sharding(strategy: ShardingStrategy) -> None:
    bare, model = build(Net), wrapped(strategy)
    seen: list[list[torch.Tensor]] = []
    for each in (bare, model):
        record: list[torch.Tensor] = []
        module: Any = each.module if isinstance(each, FSDP) else each
        block = getattr(module.blocks[1], "module", module.blocks[1])
        block.register_forward_pre_hook(lambda m, args, r=record: r.append(args[0].detach()))
        block.register_forward_hook(lambda m, args, out, r=record: r.append(out.detach()))
        block.up.register_forward_hook(
            lambda m, args, out, r=record: r.append(m.weight.detach().clone())
        )
        block.register_full_backward_pre_hook(lambda m, grads, r=record: r.append(grads[0]))
        block.register_full_backward_hook(
            lambda m, grads_in, grads_out, r=record: r.extend((grads_in[0], grads_out[0]))
        )
        each.register_forward_hook(lambda m, args, out: out * 2)
        train_step(each, 0)
        seen.append(record)
    assert len(seen[0]) == 6
    torch.testing.assert_close(seen[1], seen[0])


@EACH_STRATEGY
@ranks(2)
def test_a_weight_reaches_the_module_through_a_hooked_tensor_derived_from_it(
    strategy: ShardingStrategy,
) -> None:
    """A user may hook what is computed from a full parameter: it scales the gradient."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.linear.weight * 1.0
            if weight.requires_grad:
                weight.register_hook(lambda gradient: gradient * 3)
            return nn.functional.linear(x, weight, self.linear.bias)

    compare(Scaled, sharding_strategy=strategy)


@EACH_STRATEGY
@ranks(2)
def test_gradients_flow_into_unmanaged_parameters_beside_the_units(
    strategy: ShardingStrategy,
) -> None:
    """Only blocks are wrapped; what surrounds them is the user's own business."""
    reference, model = build(Net), build(Net)
    for index in range(3):
        model.blocks[index] = sharded(
            model.blocks[index], sharding_strategy=strategy, use_orig_params=True
        )
    for each in (reference, model):
        train_step(each, 0)
    torch.testing.assert_close(model.embed.weight.grad, reference.embed.weight.grad)
    torch.testing.assert_close(model.head.weight.grad, reference.head.weight.grad)
    assert_at_rest(model)


@EACH_STRATEGY
@ranks(2)
def test_saved_tensor_hooks_that_move_activations_away_are_harmless(
    strategy: ShardingStrategy,
) -> None:
    def step_of(model: nn.Module, step: int) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            loss = model(inputs(step)).square().mean()
        loss.backward()
        return loss.detach()

    compare(step_of=step_of, sharding_strategy=strategy)


@EACH_STRATEGY
@ranks(2)
def test_a_detached_and_reattached_pipeline_of_two_graphs(strategy: ShardingStrategy) -> None:
    """Backward in two halves, by hand, as pipeline schedules do."""

    def step_of(model: Any, step: int) -> torch.Tensor:
        module = model.module if isinstance(model, FSDP) else model
        hidden = module.blocks[0](inputs(step, 4, WIDTH))
        cut = hidden.detach().requires_grad_()
        loss = module.blocks[2](module.blocks[1](cut)).square().mean()
        loss.backward()
        hidden.backward(cut.grad)
        return loss.detach()

    compare(step_of=step_of, sharding_strategy=strategy)
