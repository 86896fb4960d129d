"""torch.compile of a wrapped model gives the eager losses and does not compile anew each step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
from tests.original.training import (
    STRATEGIES,
    assert_at_rest,
    assert_same_parameters,
    build,
    full_parameters,
    inputs,
)
from torch import nn

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy
from fullshard.testing import ranks
from fullshard.wrap import ModuleWrapPolicy


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def make() -> nn.Module:
    return nn.Sequential(Layer(), Layer())


def wrapped(strategy: ShardingStrategy) -> FSDP:
    return FSDP(
        build(make),
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({Layer}),
        use_orig_params=True,
    )


def train(model: Any, optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(inputs(step)).square().sum()
    loss.backward()
    optimizer.step()
    return loss.detach()


def graphs_compiled() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2, timeout=240)
def test_a_compiled_model_gives_eager_losses_over_ten_adam_steps(
    strategy: ShardingStrategy, backend: str
) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    eager, model = wrapped(strategy), wrapped(strategy)
    compiled = torch.compile(model, backend=backend)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (eager, compiled)]  # type: ignore[attr-defined]
    after_warm_up = 0
    for step in range(10):
        expected = train(eager, optimizers[0], step)
        torch.testing.assert_close(train(compiled, optimizers[1], step), expected)
        if step == 2:
            after_warm_up = graphs_compiled()
    assert after_warm_up > 0
    assert graphs_compiled() == after_warm_up
    expected_parameters = full_parameters(eager)
    for name, parameter in full_parameters(model).items():
        torch.testing.assert_close(parameter, expected_parameters[name])


@ranks(2, timeout=240)
def test_a_compiled_model_evaluates_and_goes_on_training() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    eager, model = build(make), wrapped(ShardingStrategy.FULL_SHARD)
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(3):
        with torch.no_grad():
            torch.testing.assert_close(compiled(inputs(step)), eager(inputs(step)))
        compiled(inputs(step)).sum().backward()
    assert_same_parameters(eager, model)


@pytest.mark.parametrize("in_place", [True, False])
@ranks(2, timeout=240)
def test_units_compiled_on_their_own_train_as_eager_ones_do(in_place: bool) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    eager, bare = wrapped(ShardingStrategy.FULL_SHARD), build(make)
    for index in range(2):
        if in_place:
            bare[index].compile(backend="aot_eager")
        else:
            # The policy finds the module inside of what this returns.
            bare[index] = torch.compile(bare[index], backend="aot_eager")
    model = FSDP(bare, auto_wrap_policy=ModuleWrapPolicy({Layer}), use_orig_params=True)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (eager, model)]
    for step in range(4):
        expected = train(eager, optimizers[0], step)
        torch.testing.assert_close(train(model, optimizers[1], step), expected)


@ranks(2, timeout=240)
def test_a_compiled_model_survives_a_forward_that_raises() -> None:
    torch._dynamo.reset()
    eager, model = wrapped(ShardingStrategy.FULL_SHARD), wrapped(ShardingStrategy.FULL_SHARD)
    compiled = torch.compile(model, backend="eager")
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (eager, compiled)]  # type: ignore[attr-defined]
    for step in range(3):
        with pytest.raises(RuntimeError):
            compiled(inputs(step, 4, 6))
        assert_at_rest(model)
        expected = train(eager, optimizers[0], step)
        torch.testing.assert_close(train(compiled, optimizers[1], step), expected)


@ranks(2, timeout=240)
def test_a_registered_method_can_be_compiled() -> None:
    class Generator(Layer):
        def generate(self, x: torch.Tensor) -> torch.Tensor:
            return self(self(x))

    torch._dynamo.reset()
    bare, model = build(Generator), FSDP(build(Generator), use_orig_params=True)
    model.register_forward_method("generate")
    generate: Any = torch.compile(lambda x: model.generate(x), backend="eager")  # type: ignore[misc]
    for step in range(2):
        output = generate(inputs(step))
        torch.testing.assert_close(output, bare.generate(inputs(step)))
        output.sum().backward()
        assert_at_rest(model)
