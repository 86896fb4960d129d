"""Whatever a unit returns, a gradient that reaches any part of it finds the parameters there."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any, NamedTuple

import pytest
import torch
from tests.engine.traffic import counted_traffic
from tests.original.training import (
    EITHER_API,
    EITHER_MODES,
    IN_PLACE,
    STRATEGIES,
    assert_at_rest,
    build,
    compare,
    inputs,
    sharded,
)
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy
from fullshard.engine.runtime.pytrees import tensors_in
from fullshard.testing import device, ranks
from fullshard.wrap import ModuleWrapPolicy

SHARDING = pytest.mark.parametrize("strategy", [*STRATEGIES[:2], *IN_PLACE])
EACH_STRATEGY = pytest.mark.parametrize("strategy", EITHER_API)


class Named(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass
class Data:
    first: torch.Tensor
    nested: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Frozen:
    first: torch.Tensor
    second: torch.Tensor


class Custom:
    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        self.first = first
        self.inner = Data(first, {"second": [second]})


class Slotted:
    __slots__ = ("first", "second")

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        self.first, self.second = first, second


class ModelOutput(collections.OrderedDict):  # type: ignore[type-arg]
    """As in transformers: a dict that is also reached by attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


KINDS: dict[str, tuple[Any, Any]] = {
    "tuple": (lambda a, b: (a, b), lambda o: o),
    "list": (lambda a, b: [a, b], lambda o: o),
    "dict": (lambda a, b: {"a": a, "b": [b]}, lambda o: (o["a"], o["b"][0])),
    "named tuple": (Named, lambda o: (o.first, o.second)),
    "dataclass": (lambda a, b: Data(a, {"b": b}), lambda o: (o.first, o.nested["b"])),
    "frozen dataclass": (Frozen, lambda o: (o.first, o.second)),
    "custom": (Custom, lambda o: (o.first, o.inner.nested["second"][0])),
    "slots": (Slotted, lambda o: (o.first, o.second)),
    "model output": (lambda a, b: ModelOutput(a=a, b=b), lambda o: (o.a, o.b)),
    "callable": (lambda a, b: Distribution(a, b), lambda o: o()),
    "closure": (lambda a, b: lambda: (a, b), lambda o: o()),
    "sparse": (lambda a, b: [a.to_sparse(), b], lambda o: (o[0].to_dense(), o[1])),
}


class Distribution:
    """An object with tensors that can also be called."""

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        self.first, self.second = first, second

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first, self.second


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.tanh(self.first(x))
        # Computed with a non-linear use of the weights: backward needs them, not only inputs.
        return KINDS[self.kind][0](hidden, self.second(hidden * self.first.bias))


class Model(nn.Module):
    def __init__(self, kind: str, used: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(kind) for _ in range(2))
        self.kind, self.used = kind, used

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = KINDS[self.kind][1]
        for layer in self.layers:
            first, second = read(layer(x))
            x = {"both": first + second, "first": first, "second": second}[self.used]
        return x


@pytest.mark.parametrize("kind", KINDS)
@SHARDING
@ranks(2)
def test_outputs_of_every_kind_lead_gradients_back(strategy: ShardingStrategy, kind: str) -> None:
    policy = ModuleWrapPolicy({Layer})
    compare(lambda: Model(kind, "both"), sharding_strategy=strategy, auto_wrap_policy=policy)


@pytest.mark.parametrize("used", ["first", "second"])
@pytest.mark.parametrize(("strategy", "use_orig_params"), EITHER_MODES)
@ranks(2)
def test_outputs_that_do_not_reach_the_loss_do_no_harm(
    strategy: ShardingStrategy, use_orig_params: bool, used: str
) -> None:
    compare(
        lambda: Model("tuple", used),
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({Layer}),
        use_orig_params=use_orig_params,
    )


@EACH_STRATEGY
@ranks(2)
def test_each_output_goes_backward_on_its_own(strategy: ShardingStrategy) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer("tuple"), Layer("tuple")])

        def forward(self, x: torch.Tensor) -> Any:
            first, second = self.layers[0](x)
            return self.layers[1](first + second)

    def step_of(model: nn.Module, step: int) -> torch.Tensor:
        first, second = model(inputs(step))
        first.square().mean().backward(retain_graph=True)
        second.square().mean().backward()
        return (first.square().mean() + second.square().mean()).detach()

    compare(Pair, step_of, sharding_strategy=strategy, auto_wrap_policy=ModuleWrapPolicy({Layer}))


class Packed(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.recurrent = kind(5, 6, num_layers=2, bidirectional=True)  # type: ignore[call-arg]
        self.head = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, torch.tensor([4, 3, 1]))
        output, _ = self.recurrent(packed)
        assert isinstance(output, PackedSequence)
        return self.head(pad_packed_sequence(output)[0])


def packed_step(model: nn.Module, step: int) -> torch.Tensor:
    loss = model(inputs(step, 4, 3, 5)).square().mean()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize(("strategy", "use_orig_params"), EITHER_MODES)
@ranks(2)
def test_recurrent_units_take_and_give_packed_sequences(
    strategy: ShardingStrategy, use_orig_params: bool, kind: type[nn.RNNBase]
) -> None:
    compare(
        lambda: Packed(kind),
        packed_step,
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({kind}),
        use_orig_params=use_orig_params,
    )


@EACH_STRATEGY
@ranks(2)
def test_an_object_with_a_cycle_and_foreign_things_is_walked_once(
    strategy: ShardingStrategy,
) -> None:
    class Cyclic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> Any:
            output: dict[str, Any] = {"y": self.linear(x), "name": "x", "size": torch.Size([1])}
            output["self"] = output
            output["dtype"], output["none"] = torch.float32, None
            return output

    def step_of(model: nn.Module, step: int) -> torch.Tensor:
        loss = model(inputs(step))["y"].square().mean()
        loss.backward()
        return loss.detach()

    compare(Cyclic, step_of, sharding_strategy=strategy)


@EACH_STRATEGY
@ranks(2)
def test_a_unit_that_returns_nothing_still_trains_what_it_stored(
    strategy: ShardingStrategy,
) -> None:
    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3)
            self.kept: Any = None

        def forward(self, x: torch.Tensor) -> None:
            self.kept = self.linear(torch.tanh(x)).square().mean() * self.linear.weight.sum()

    def step_of(model: Any, step: int) -> torch.Tensor:
        model(inputs(step))
        module = model.module if isinstance(model, FSDP) else model
        loss, module.kept = module.kept, None
        loss.backward()
        return loss.detach()

    compare(Silent, step_of, sharding_strategy=strategy)


@EACH_STRATEGY
@ranks(2)
def test_a_parameter_returned_as_output_stays_valid(strategy: ShardingStrategy) -> None:
    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(5, 3))

        def forward(self, x: torch.Tensor) -> Any:
            return x @ self.table, self.table, {"row": self.table[0], "whole": self.table.T}

    bare = build(Gives)
    model = sharded(build(Gives), sharding_strategy=strategy, use_orig_params=True)
    _, table, parts = model(inputs(0))
    assert torch.equal(table, bare.table)
    assert torch.equal(parts["row"], bare.table[0])
    assert torch.equal(parts["whole"], bare.table.T)

    def step_of(model: nn.Module, step: int) -> torch.Tensor:
        output, table, parts = model(inputs(step))
        loss = output.square().mean() + table.square().sum() + (parts["row"] ** 3).sum()
        loss.backward()
        return loss.detach()

    compare(Gives, step_of, sharding_strategy=strategy)


@EACH_STRATEGY
@ranks(2)
def test_a_parameter_kept_beyond_forward_under_no_grad_stays_valid(
    strategy: ShardingStrategy,
) -> None:
    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 3)

        def forward(self) -> torch.Tensor:
            return self.inner.weight

    bare = build(Gives)
    model = sharded(build(Gives), sharding_strategy=strategy, use_orig_params=True)
    with torch.no_grad():
        weight = model()
    assert_at_rest(model)
    assert torch.equal(weight, bare.inner.weight)
    assert weight.device == device()


class Adding(nn.Module):
    """A layer that hands on, or not, one of its inputs, as those with a common bias do."""

    def __init__(self, hands_on: bool) -> None:
        super().__init__()
        self.linear, self.hands_on = nn.Linear(5, 5), hands_on

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> Any:
        x = torch.tanh(self.linear(x) + bias)
        return (x, bias) if self.hands_on else x


class CommonBias(nn.Module):
    def __init__(self, hands_on: bool, computed: bool) -> None:
        super().__init__()
        self.bias, self.computed = nn.Parameter(torch.ones(5)), computed
        self.layers = nn.ModuleList(Adding(hands_on) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias * 2 if self.computed else self.bias
        for layer in self.layers:
            x = layer(x, bias)
            if layer.hands_on:
                x, bias = x
        return x


@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("reentrant", [None, False, True])
@ranks(2)
def test_no_unit_is_gathered_for_an_input_that_it_handed_on(
    reentrant: bool | None, computed: bool
) -> None:
    launches = []
    for hands_on in (False, True):
        module = build(lambda hands_on=hands_on: CommonBias(hands_on, computed))  # type: ignore[misc]
        for layer in module.layers if reentrant is not None else ():
            layer.forward = functools.partial(
                checkpoint, layer.forward, use_reentrant=bool(reentrant)
            )
        model = sharded(module, auto_wrap_policy=ModuleWrapPolicy({Adding}), use_orig_params=True)
        for number in range(2):
            model(inputs(number)).square().mean().backward()
        with counted_traffic() as traffic:
            model(inputs(2)).square().mean().backward()
        launches.append(sorted(traffic.launches))
    assert launches[0] == launches[1]
    compare(functools.partial(CommonBias, True, computed))


@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_a_gradient_can_be_asked_for_a_returned_parameter_that_stays(use_orig_params: bool) -> None:
    """As by those who weigh losses by the gradients that each has at the last layer."""

    class Showing(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return super().forward(x), self.weight

    model = sharded(
        build(lambda: Showing(5, 3)),
        sharding_strategy=ShardingStrategy.NO_SHARD,
        use_orig_params=use_orig_params,
    )
    x = inputs(0)
    output, weight = model(x)
    (gradient,) = torch.autograd.grad(output.sum(), weight, retain_graph=True)
    torch.testing.assert_close(gradient, x.sum(0).expand(3, 5))


class HandsOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize("container", [Named, lambda *t: list(t), lambda *t: {"a": t[0], "b": t}])
@ranks(2)
def test_outputs_in_containers_have_hooks_also_where_they_are_inputs(container: Any) -> None:
    model = sharded(HandsOn().to(device()))
    leaf = torch.ones(2, requires_grad=True, device=device())
    made = leaf * 2

    for _ in range(3):
        given = container(leaf, made)
        for tensor in tensors_in(model(given)):
            assert len(tensor._backward_hooks) == 1
    (leaf.sum() + made.sum()).backward()

    assert torch.equal(leaf.grad, torch.full((2,), 3.0, device=device()))
    with torch.no_grad():
        fresh = torch.ones(2, requires_grad=True, device=device())
        assert model(fresh)._backward_hooks is None
