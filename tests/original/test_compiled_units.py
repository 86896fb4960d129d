"""Under torch.compile every unit's module is compiled, and nothing that surrounds it is traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.compiled_autograd
from tests.marks import in_long_runs
from tests.original.training import (
    MODES,
    Net,
    blocks_policy,
    build,
    full_parameters,
    inputs,
    loss_of,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy
from fullshard.engine.runtime import untraced
from fullshard.testing import ranks
from fullshard.wrap import ModuleWrapPolicy

WIDTH = 5
UNITS = 12
BATCHES = (4, 6, 3)


def make_class(checkpoints: bool = False) -> type[nn.Module]:
    """A class of blocks with a ``forward`` of its own: functions made alike share a code object."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            torch.nn.init.normal_(self.linear.weight, std=0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if checkpoints:
                return x + torch.tanh(checkpoint(self.linear, x, use_reentrant=False))
            return x + torch.tanh(self.linear(x))

    forward: Any = Block.forward
    forward.__code__ = forward.__code__.replace()
    return Block


class Model(nn.Module):
    def __init__(self, classes: list[type[nn.Module]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(cls() for cls in classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Graphs:
    """A backend that runs graphs as they are and keeps how many operations each has."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        self.operations: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        called = ("call_function", "call_method", "call_module")
        self.operations.append(sum(node.op in called for node in graph.graph.nodes))
        return graph.forward


def train_and_evaluate(model: Any) -> None:
    for step, batch in enumerate(BATCHES):
        model.train()
        model(inputs(step, batch, WIDTH)).sum().backward()
        model.eval()
        with torch.no_grad():
            model(inputs(step, batch, WIDTH))


@pytest.mark.parametrize("use_orig_params", [True, pytest.param(False, marks=in_long_runs)])
@pytest.mark.parametrize("number_of_classes", [UNITS, 1])
@ranks(2, timeout=240)
def test_all_that_blocks_compute_is_compiled_and_no_more(
    number_of_classes: int, use_orig_params: bool
) -> None:
    distinct = [make_class() for _ in range(number_of_classes)]
    classes = [distinct[index % number_of_classes] for index in range(UNITS)]

    expected = Graphs()
    bare: Any = build(lambda: Model(classes))
    for block in bare.blocks:
        block.compile(backend=expected)
    train_and_evaluate(bare)

    found = Graphs()
    model = FSDP(
        build(lambda: Model(classes)),
        auto_wrap_policy=ModuleWrapPolicy(set(classes)),
        use_orig_params=use_orig_params,
    )
    train_and_evaluate(torch.compile(model, backend=found))
    assert sorted(found.operations) == sorted(expected.operations)
    assert sum(expected.operations) >= 3 * len(expected.operations) > 0


@pytest.mark.parametrize("checkpoints", [False, True])
@ranks(2, timeout=240)
def test_a_compiled_training_step_with_its_backward_gives_eager_losses(checkpoints: bool) -> None:
    classes = [make_class(checkpoints) for _ in range(UNITS)]

    def wrapped() -> FSDP:
        policy = ModuleWrapPolicy(set(classes))
        bare = build(lambda: Model(classes))
        return FSDP(bare, auto_wrap_policy=policy, use_orig_params=True)

    def step_of(model: FSDP) -> Any:
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().sum()
            loss.backward()
            norm = model.clip_grad_norm_(1.0)
            return loss.detach() + norm

        return step

    graphs = Graphs()
    eager, model = wrapped(), wrapped()
    steps = step_of(eager), torch.compile(step_of(model), backend=graphs)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (eager, model)]
    for number, batch in enumerate(BATCHES):
        expected, found = (step(inputs(number, batch, WIDTH)) for step in steps)
        torch.testing.assert_close(found, expected)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert sum(graphs.operations) >= 3 * UNITS
    expected_parameters = full_parameters(eager)
    for name, parameter in full_parameters(model).items():
        torch.testing.assert_close(parameter, expected_parameters[name])


def test_to_mark_a_function_puts_nothing_around_it() -> None:
    def function() -> None: ...

    assert untraced.untraced(function) is function
    assert untraced.untraced_itself(function) is function


def test_where_code_cannot_be_marked_functions_are_left_out_of_graphs_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos()

    monkeypatch.delattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy")
    itself = untraced.untraced_itself(lambda x: inner(x) + 1)
    everything = untraced.untraced(lambda x: inner(x) + 1)
    monkeypatch.undo()
    x = torch.ones(3)
    for function, operations in ((itself, [2]), (everything, [])):
        graphs = Graphs()
        torch.testing.assert_close(torch.compile(function, backend=graphs)(x), inner(x) + 1)
        assert graphs.operations == operations


@pytest.mark.parametrize("compiles_forward", [True, False])
@pytest.mark.parametrize(("strategy", "use_orig_params"), MODES)
@ranks(2)
def test_a_backward_by_compiled_autograd_is_refused(
    strategy: ShardingStrategy, use_orig_params: bool, compiles_forward: bool
) -> None:
    model = FSDP(
        build(Net),
        auto_wrap_policy=blocks_policy(),
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
    )
    run = torch.compile(model, backend="eager") if compiles_forward else model
    loss = loss_of(run, 0)
    with (
        torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")),
        pytest.raises(RuntimeError, match=r"Leave torch._dynamo.config.compiled_autograd at False"),
    ):
        loss.backward()
    loss_of(run, 0).backward()
    assert all(p.grad is not None for p in model.parameters() if p.numel())
