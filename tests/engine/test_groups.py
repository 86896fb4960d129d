"""Parameters of different dtypes, and frozen beside trainable ones, in one unit.

Bytes are counted where they leave the process: at the methods of torch's process groups.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.engine.models import TrainingModel, make
from tests.engine.parity import adam, full_parameters, sgd, train, train_alone
from tests.engine.traffic import counted_traffic
from torch import nn

from fullshard import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from fullshard.testing import device, ranks

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
with_each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def wrap(module: nn.Module, strategy: str = "FULL_SHARD", **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FullyShardedDataParallel(
            module,
            sharding_strategy=ShardingStrategy[strategy],
            **{"use_orig_params": True, **options},
        )


class MixedDtypes(TrainingModel):
    """float64, float32 and bfloat16 layers in turn; ``make`` must not convert it."""

    def __init__(self, low: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(5, 5, dtype=dtype) for dtype in (torch.float64, low, torch.float32, low)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x

    def to(self, *_: Any) -> MixedDtypes:
        return super().to(device())


def _check_mixed_dtypes() -> None:
    # Two dtypes that round visibly would hide mistakes; one is bfloat16 below.
    expected = train_alone(make(MixedDtypes, low=torch.float32), sgd)
    for strategy in STRATEGIES:
        model = wrap(make(MixedDtypes, low=torch.float32), strategy)
        found = train(model, sgd(model.parameters()))
        found.assert_close(expected, strategy, tolerance=1e-6)


@ranks(2)
def test_parameters_of_several_dtypes_train_on_two_ranks() -> None:
    _check_mixed_dtypes()


@ranks(3)
def test_parameters_of_several_dtypes_train_on_three_ranks() -> None:
    _check_mixed_dtypes()


@with_each_strategy
@ranks(2)
def test_low_precision_parameters_keep_their_dtype_beside_others(strategy: str) -> None:
    plain = make(MixedDtypes)
    model = wrap(make(MixedDtypes), strategy)
    expected = train_alone(plain, sgd)

    found = train(model, sgd(model.parameters()))

    wanted = {name: p.dtype for name, p in plain.named_parameters()}
    assert {name: p.dtype for name, p in full_parameters(model).items()} == wanted
    assert {torch.float64, torch.float32, torch.bfloat16} == set(wanted.values())
    found.assert_close(expected, strategy, tolerance=2e-2)


@ranks(2)
def test_several_dtypes_are_gathered_in_one_launch() -> None:
    model = wrap(make(MixedDtypes))
    inputs = model.get_input(dist.get_rank())
    model(*inputs)

    with counted_traffic() as traffic, torch.no_grad():
        model(*inputs)

    # Gloo cannot do so with memory of another device.
    assert len(traffic.launches) == (1 if device().type == "cpu" else 3)
    # 25 and 5 elements a layer, each padded to 16 bytes but the last, and to an even number.
    elements = {8: 25 + 1 + 5 + 1, 4: 25 + 3 + 5 + 1, 2: 25 + 7 + 5 + 3 + 25 + 7 + 5 + 1}
    assert traffic.gathered == sum(size * count for size, count in elements.items())


@with_each_strategy
@ranks(2)
def test_mixed_precision_brings_all_dtypes_to_one(strategy: str) -> None:
    model = wrap(
        make(MixedDtypes),
        strategy,
        mixed_precision=MixedPrecision(torch.float32, torch.float32),
    )
    seen = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda layer, _: seen.append(layer.weight.dtype))

    train(model, sgd(model.parameters()), steps=1)

    assert seen == [torch.float32] * 4
    wanted = [p.dtype for p in make(MixedDtypes).parameters()]
    assert [p.dtype for p in model.parameters()] == wanted


@with_each_strategy
@ranks(2)
def test_integer_weights_lie_beside_trainable_ones(strategy: str) -> None:
    class Quantized(TrainingModel):
        def __init__(self) -> None:
            super().__init__()
            weight = torch.arange(-12, 13, dtype=torch.int8).view(5, 5)
            self.scale = nn.Parameter(torch.full((5, 1), 0.1, dtype=torch.float64))
            self.weight = nn.Parameter(weight, requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ (self.weight * self.scale)

    expected = train_alone(make(Quantized))
    model = wrap(make(Quantized), strategy)

    found = train(model, sgd(model.parameters()))

    found.assert_close(expected, strategy)
    assert full_parameters(model)["weight"].dtype == torch.int8


# -- frozen parameters ----------------------------------------------------------------------------


class Adapted(TrainingModel):
    """A large frozen layer with a small trainable one beside it."""

    def __init__(self, frozen: bool = True) -> None:
        super().__init__()
        self.large = nn.Linear(64, 64, bias=False)
        self.small = nn.Linear(64, 2, bias=False)
        self.large.requires_grad_(not frozen)

    shape = (3, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.small(self.large(x).tanh())


LARGE, SMALL = 64 * 64 * 8, 64 * 2 * 8


def bytes_of_a_step(model: Any) -> tuple[int, int]:
    """Bytes reduced, and bytes of gradients left on the parameters, both on this rank."""
    inputs = model.module.get_input(dist.get_rank())
    loss = model.module.get_loss(inputs, model(*inputs))
    with counted_traffic() as traffic:
        loss.backward()
    gradients = {p.grad.untyped_storage() for p in model.parameters() if p.grad is not None}
    sizes = {storage.data_ptr(): storage.nbytes() for storage in gradients}
    return traffic.reduced, sum(sizes.values())


@with_each_strategy
@ranks(2)
def test_frozen_parameters_cost_no_reduce_traffic_and_no_gradients(strategy: str) -> None:
    share = 1 if strategy == "NO_SHARD" else 2

    assert bytes_of_a_step(wrap(make(Adapted), strategy)) == (SMALL, SMALL // share)


@with_each_strategy
@ranks(2)
def test_trainable_parameters_cost_both(strategy: str) -> None:
    share = 1 if strategy == "NO_SHARD" else 2

    found = bytes_of_a_step(wrap(make(Adapted, frozen=False), strategy))

    assert found == (LARGE + SMALL, (LARGE + SMALL) // share)


@with_each_strategy
@ranks(2)
def test_a_frozen_unit_reduces_nothing(strategy: str) -> None:
    for use_orig_params in (False, True):
        module = make(Adapted)
        module.large = wrap(module.large, strategy, use_orig_params=use_orig_params)
        model = wrap(module, strategy, use_orig_params=use_orig_params)

        assert bytes_of_a_step(model)[0] == SMALL


@ranks(2)
def test_parameters_frozen_after_wrapping_get_no_gradients() -> None:
    for strategy in STRATEGIES:
        model = wrap(make(Adapted, frozen=False), strategy)
        model.large.requires_grad_(False)

        bytes_of_a_step(model)

        assert model.large.weight.grad is None
        assert model.small.weight.grad is not None or model.small.weight.numel() == 0


def _check_frozen_trains() -> None:
    for strategy, make_optimizer in itertools.product(STRATEGIES, [sgd, adam]):
        expected = train_alone(make(Adapted), make_optimizer)
        model = wrap(make(Adapted), strategy)
        before = full_parameters(model)["large.weight"]
        found = train(model, make_optimizer(model.parameters()))
        found.assert_close(expected, strategy)
        assert torch.equal(full_parameters(model)["large.weight"], before)


@ranks(2)
def test_trainable_parameters_beside_frozen_ones_train_on_two_ranks() -> None:
    _check_frozen_trains()


@ranks(3)
def test_trainable_parameters_beside_frozen_ones_train_on_three_ranks() -> None:
    _check_frozen_trains()


@ranks(2)
def test_groups_are_made_by_dtype_and_by_trainability() -> None:
    module = make(MixedDtypes)
    module.layers[1].requires_grad_(False)

    model = wrap(module)

    found = [handle.flat_param._fqns for handle in model._unit.handles]
    assert [{name.split(".")[1] for name in names} for names in found] == [
        {"0"},
        {"1"},
        {"2"},
        {"3"},
    ]


@ranks(2)
def test_without_original_parameters_dtypes_must_be_the_same() -> None:
    told = "got torch.float64 and torch.bfloat16 and torch.float32 .'layers.0.weight', "

    with pytest.raises(ValueError, match=told):
        wrap(make(MixedDtypes), use_orig_params=False)


@ranks(2)
def test_an_integer_parameter_needs_original_parameters_and_the_error_names_it() -> None:
    counts = nn.Parameter(torch.arange(5, device=device()), requires_grad=False)
    module = nn.ParameterDict({"counts": counts})

    with pytest.raises(ValueError, match=r"'counts' is torch\.int64\. Pass use_orig_params=True"):
        wrap(module, use_orig_params=False)
    model = wrap(module, use_orig_params=True)

    assert model.state_dict()["counts"].tolist() == [0, 1, 2, 3, 4]


@with_each_strategy
@ranks(2)
def test_a_backward_that_reaches_one_of_two_groups_leaves_the_other_without_gradients(
    strategy: str,
) -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.float32 = nn.Parameter(torch.ones(5))
            self.float64 = nn.Parameter(torch.ones(5, dtype=torch.float64))

        def forward(self, name: str) -> torch.Tensor:
            return getattr(self, name).square().sum()

    model = wrap(Either().to(device()), strategy)
    for name in ("float32", "float64"):
        model(name).backward()
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            gradients = {name: p.grad for name, p in model.named_parameters()}
        model.zero_grad()
        found = gradients.pop(name)
        torch.testing.assert_close(found, torch.full_like(found, 2.0))
        assert list(gradients.values()) == [None]
