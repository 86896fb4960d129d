"""Whatever raises in forward or backward, the model is at rest at once; the next step is right."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from tests.original.training import (
    EITHER_API,
    EITHER_MODES,
    IN_PLACE,
    STRATEGIES,
    WIDTH,
    Block,
    InPlace,
    assert_at_rest,
    assert_same_parameters,
    build,
    compare_models,
    inputs,
    living_bytes,
    module_of,
    sharded,
    train_step,
    unsynchronized,
)
from torch import nn

from fullshard import BackwardPrefetch, ShardingStrategy
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.engine.grads import gradients
from fullshard.state.model.units import units_in
from fullshard.testing import device, ranks
from fullshard.wrap import is_unit

EACH_MODE = pytest.mark.parametrize(("strategy", "use_orig_params"), EITHER_MODES)
SHARDING = pytest.mark.parametrize("strategy", [*STRATEGIES[:2], *IN_PLACE])
EACH_STRATEGY = pytest.mark.parametrize("strategy", EITHER_API)


class Trap(torch.autograd.Function):
    """The identity; raises when asked to, in forward or in backward."""

    armed = ""
    error: type[BaseException] = RuntimeError

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        if Trap.armed == "forward":
            raise Trap.error("trap in forward")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if Trap.armed == "backward":
            raise Trap.error("trap in backward")
        return gradient


class TrapBlock(Block):
    """Raises in the middle of its computation if ``trapped``."""

    trapped = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        if self.trapped:
            hidden = Trap.apply(hidden)
        return x + self.scale * self.down(hidden)


class TrapNet(nn.Module):
    def __init__(self, position: int = 1) -> None:
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(TrapBlock() for _ in range(3))
        if position < 3:
            self.blocks[position].trapped = True
        self.head = nn.Linear(WIDTH, 3)
        self.position = position

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        x = self.head(x)
        return Trap.apply(x) if self.position == 3 else x


def pair(position: int = 1, **options: Any) -> tuple[nn.Module, Any]:
    reference = build(lambda: TrapNet(position))
    options = {"use_orig_params": True, **options}
    policy = lambda module, recurse, **_: recurse or isinstance(module, TrapBlock)  # noqa: E731
    return reference, sharded(copy.deepcopy(reference), auto_wrap_policy=policy, **options)


def spring(model: nn.Module, where: str, error: type[BaseException] = RuntimeError) -> None:
    Trap.armed, Trap.error = where, error
    try:
        with pytest.raises(error, match=f"trap in {where}"):
            train_step(model, 9)
    finally:
        Trap.armed = ""


@EACH_MODE
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("position", [0, 2, 3])
@ranks(2)
def test_an_exception_restores_the_sharded_state_at_once_and_the_next_steps_are_right(
    position: int, where: str, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    reference, model = pair(position, sharding_strategy=strategy, use_orig_params=use_orig_params)
    spring(model, where)
    assert_at_rest(model)
    compare_models(reference, model, steps=1)
    spring(model, where)
    assert_at_rest(model)
    compare_models(reference, model, steps=1, first_step=1)


@SHARDING
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
@ranks(2)
def test_any_kind_of_exception_is_survived(
    error: type[BaseException], where: str, strategy: ShardingStrategy
) -> None:
    reference, model = pair(sharding_strategy=strategy)
    spring(model, where, error)
    assert_at_rest(model)
    compare_models(reference, model, steps=2)


@SHARDING
@pytest.mark.parametrize("forward_prefetch", [False, True])
@pytest.mark.parametrize("prefetch", [None, *BackwardPrefetch])
@ranks(2)
def test_what_was_prefetched_is_given_back_as_well(
    prefetch: BackwardPrefetch | None, forward_prefetch: bool, strategy: ShardingStrategy
) -> None:
    reference, model = pair(
        sharding_strategy=strategy,
        backward_prefetch=prefetch,
        forward_prefetch=forward_prefetch,
    )
    compare_models(reference, model, steps=2)
    for where in ("forward", "backward"):
        spring(model, where)
        assert_at_rest(model)
    compare_models(reference, model, steps=2, first_step=2)


@EACH_MODE
@ranks(2)
def test_no_memory_is_lost_over_many_broken_steps(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    _, model = pair(sharding_strategy=strategy, use_orig_params=use_orig_params)

    def broken_steps() -> int:
        for where in ("forward", "backward"):
            spring(model, where)
        train_step(model, 0)
        model.zero_grad()
        return living_bytes()

    broken_steps()
    before = broken_steps()
    for _ in range(3):
        after = broken_steps()
    assert after <= before


@EACH_MODE
@ranks(2)
def test_no_memory_is_lost_over_healthy_steps(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    _, model = pair(sharding_strategy=strategy, use_orig_params=use_orig_params)
    sizes = []
    for step in range(5):
        train_step(model, step)
        with torch.no_grad():
            model(inputs(step))
        with FSDP.summon_full_params(model):
            pass
        model.zero_grad()
        sizes.append(living_bytes())
    assert sizes[-1] <= sizes[1]


@EACH_STRATEGY
@pytest.mark.parametrize("hook", ["pre", "post", "tensor", "full backward", "root output"])
@ranks(2)
def test_a_users_hook_that_raises_is_survived(hook: str, strategy: ShardingStrategy) -> None:
    reference, model = pair(sharding_strategy=strategy)
    armed = [True]

    def fail(*_: Any) -> None:
        if armed[0]:
            raise ValueError("user's hook")

    block = module_of(model.blocks[1])
    if hook == "pre":
        block.register_forward_pre_hook(fail)
    elif hook == "post":
        block.register_forward_hook(fail)
    elif hook == "tensor":
        block.up.register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
    elif hook == "full backward":
        block.down.register_full_backward_hook(fail)
    else:
        model.register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
    with pytest.raises(ValueError, match="user's hook"):
        train_step(model, 9)
    if isinstance(strategy, InPlace) and hook == "root output":
        # The hook of a module's user runs before that of the unit, which notices nothing.
        model.reset_iter_state()
    assert_at_rest(model)
    armed[0] = False
    compare_models(reference, model, steps=2)


@EACH_STRATEGY
@ranks(2)
def test_gradients_of_earlier_backwards_survive_a_broken_one(strategy: ShardingStrategy) -> None:
    """Gradients of units that the broken backward did not reach stay as they were."""
    _, model = pair(position=2, sharding_strategy=strategy)
    train_step(model, 0)
    before = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    spring(model, "backward")
    for name, parameter in model.named_parameters():
        if name in before and ("embed" in name or "blocks.0" in name):
            assert torch.equal(parameter.grad, before[name]), name


@ranks(1)
def test_parameters_are_asked_for_while_a_backward_that_raised_is_cleaned_up() -> None:
    """As on a GPU, where a thread of autograd's does so when the user knows of it already."""
    _, model = pair(position=2, sharding_strategy=ShardingStrategy.NO_SHARD)
    train_step(model, 0)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    reached, go_on = threading.Event(), threading.Event()
    raised: list[bool] = []

    def stop(_: Any) -> None:
        reached.set()
        go_on.wait()
        raise RuntimeError("trap in backward")

    def run() -> None:
        try:
            output.sum().backward()
        except RuntimeError:
            raised.append(True)

    model.blocks[1].module.up.register_forward_hook(
        lambda _, __, out: out.register_hook(stop) and None
    )
    output = model(inputs(9))
    thread = threading.Thread(target=run)
    thread.start()
    reached.wait()
    threading.Timer(0.05, go_on.set).start()

    found = dict(model.named_parameters())
    with FSDP.summon_full_params(model):
        pass

    assert all(parameter.is_leaf for parameter in found.values())
    assert {name: parameter.shape for name, parameter in found.items()} == shapes
    thread.join()
    assert raised
    model.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


@EACH_STRATEGY
@ranks(2)
def test_an_exception_in_evaluation_and_inside_summon_is_survived(
    strategy: ShardingStrategy,
) -> None:
    reference, model = pair(sharding_strategy=strategy)
    with torch.no_grad():
        Trap.armed, Trap.error = "forward", RuntimeError
        with pytest.raises(RuntimeError, match="trap"):
            model(inputs(0))
        Trap.armed = ""
    assert_at_rest(model)
    with pytest.raises(KeyError), FSDP.summon_full_params(model):
        raise KeyError
    assert_at_rest(model)
    with unsynchronized(model):
        spring(model, "backward")
    if isinstance(strategy, InPlace):
        model.reset_iter_state()
    model.zero_grad()
    compare_models(reference, model, steps=2)
    assert_same_parameters(reference, model)


@EACH_STRATEGY
@ranks(2)
def test_wrong_inputs_raise_what_the_module_raises(strategy: ShardingStrategy) -> None:
    reference, model = pair(sharding_strategy=strategy)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(torch.zeros(2, 6, device=inputs(0).device))
    with pytest.raises(TypeError):
        model()
    assert_at_rest(model)
    compare_models(reference, model, steps=1)


@SHARDING
@ranks(2)
def test_what_raises_at_the_very_end_of_a_backward_leaves_the_model_at_rest(
    strategy: ShardingStrategy,
) -> None:
    _, model = pair(sharding_strategy=strategy, use_orig_params=True)
    units = len(units_in(model))
    calls = 0

    def fail_last(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == units:
            raise RuntimeError("the hook's own")

    if isinstance(model, FSDP):
        model.register_comm_hook(None, fail_last)
    else:
        for module in filter(is_unit, model.modules()):
            module.set_all_reduce_hook(fail_last)

    with pytest.raises(RuntimeError, match="the hook's own"):
        model(inputs(0)).sum().backward()
    assert_at_rest(model)
    with FSDP.summon_full_params(model):
        pass


class TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.ones(4))
        self.wide = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.narrow).sum() + self.wide.sum().float()


@EACH_STRATEGY
@ranks(2)
def test_gradients_that_were_staged_when_memory_ran_out_do_not_count_in_the_next_step(
    strategy: ShardingStrategy,
) -> None:
    model = sharded(build(TwoDtypes), sharding_strategy=strategy, use_orig_params=True)
    x = torch.ones(4, device=device())
    stage = gradients.stage
    staged: list[Any] = []

    def run_out(*given: Any, **named: Any) -> Any:
        if staged:
            raise torch.OutOfMemoryError
        staged.append(given)
        return stage(*given, **named)

    gradients.stage = run_out
    try:
        with pytest.raises(torch.OutOfMemoryError):
            model(x).backward()
    finally:
        gradients.stage = stage
    model.zero_grad()
    model(x).backward()

    for parameter in model.parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, torch.ones_like(parameter.grad))
