"""Frozen weights, absent gradients, and gradients that only some ranks have."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.engine.models import NestedLinears, SharedTransformer, TrainingModel, make
from tests.engine.parity import (
    adam,
    assert_same,
    full_parameters,
    sgd,
    train,
    train_alone,
    train_with_ddp,
)
from tests.original.training import average_gradients
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fullshard import FullyShardedDataParallel, ShardingStrategy
from fullshard.testing import device, ranks
from fullshard.wrap import ModuleWrapPolicy, always_wrap_policy

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
with_both_modes = pytest.mark.parametrize("use_orig_params", [False, True])


def wrap(module: nn.Module, strategy: str = "FULL_SHARD", **options: Any) -> Any:
    return FullyShardedDataParallel(module, sharding_strategy=ShardingStrategy[strategy], **options)


# -- a trunk and a head ---------------------------------------------------------------------------


class Trunk(TrainingModel):
    """A convolutional trunk, of one block or of two nested ones, and a linear head."""

    shape = (2, 3, 8, 8)

    def __init__(self, nested: bool, no_grad: bool) -> None:
        super().__init__()
        pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        if nested:
            self.trunk = nn.Sequential(self.block(3, 6), self.block(6, 6))
            self.head: nn.Module = nn.Sequential(*pool, nn.Linear(6, 5))
        else:
            self.trunk = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(inplace=True), *pool)
            self.head = nn.Linear(6, 5)
        self.nested = nested
        self.context = torch.no_grad if no_grad else contextlib.nullcontext

    @staticmethod
    def block(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3), nn.ReLU(inplace=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.context():
            x = self.trunk(x)
        return self.head(x)

    def get_loss(self, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, torch.tensor([0, 1], device=output.device))

    def wrap_parts(self, **options: Any) -> None:
        if self.nested:
            for name, child in list(self.trunk.named_children()):
                setattr(self.trunk, name, wrap(child, **options))
        self.trunk = wrap(self.trunk, **options)
        self.head = wrap(self.head, **options)

    def freeze_trunk(self) -> None:
        for parameter in self.trunk.parameters():
            parameter.requires_grad = False


def train_without_trunk_gradients(model: Any, clears: bool) -> tuple[list[torch.Tensor], Any]:
    optimizer = sgd(model.parameters())
    losses = []
    for step in range(3):
        inputs = model.module.get_input(dist.get_rank(), step)
        loss = model.module.get_loss(inputs, model(*inputs))
        optimizer.zero_grad()
        loss.backward()
        if clears:
            for parameter in model.module.trunk.parameters():
                parameter.grad = None
        optimizer.step()
        losses.append(loss.detach())
    return losses, full_parameters(model)


@with_both_modes
@pytest.mark.parametrize("nested", [False, True])
@ranks(2)
def test_all_ways_to_freeze_a_trunk_train_as_ddp_does(nested: bool, use_orig_params: bool) -> None:
    for by_flag, no_grad in itertools.product([False, True], repeat=2):
        plain = make(Trunk, nested=nested, no_grad=no_grad)
        if by_flag:
            plain.freeze_trunk()
        reference = DistributedDataParallel(plain, find_unused_parameters=no_grad)
        expected, expected_parameters = train_without_trunk_gradients(reference, not by_flag)

        for after_wrapping, prefetch in itertools.product([False, True], repeat=2):
            case = f"{by_flag=} {no_grad=} {after_wrapping=} {prefetch=}"
            options = {"forward_prefetch": prefetch, "use_orig_params": use_orig_params}
            module = make(Trunk, nested=nested, no_grad=no_grad)
            if after_wrapping:
                module.wrap_parts(**options)
            if by_flag:
                module.freeze_trunk()
            if not after_wrapping:
                module.wrap_parts(**options)
            model = wrap(module, **options)
            found, parameters = train_without_trunk_gradients(model, not by_flag)

            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, msg=case)
            assert list(parameters) == list(expected_parameters)
            for name, value in parameters.items():
                torch.testing.assert_close(
                    value, expected_parameters[name], rtol=1e-9, atol=1e-9, msg=f"{name} {case}"
                )
            wanted = {name: p.requires_grad for name, p in plain.named_parameters()}
            with FullyShardedDataParallel.summon_full_params(model):
                flags = {name: p.requires_grad for name, p in model.named_parameters()}
            assert flags == wanted, case


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_frozen_parameters_beside_trainable_ones_train_as_in_ddp(strategy: str) -> None:
    expected = train_with_ddp(make(SharedTransformer, frozen=True), adam)
    layers = ModuleWrapPolicy({nn.TransformerEncoderLayer, nn.TransformerDecoderLayer})

    for policy in (None, layers):
        warns = pytest.warns(UserWarning, match="requires_grad=True and False")
        with warns if policy else contextlib.nullcontext():
            model = wrap(
                make(SharedTransformer, frozen=True),
                strategy,
                auto_wrap_policy=policy,
                use_orig_params=True,
            )
        flags = {name: p.requires_grad for name, p in model.named_parameters()}
        train(model, adam(model.parameters())).assert_close(expected, policy)
        plain = make(SharedTransformer, frozen=True)
        assert flags == {name: p.requires_grad for name, p in plain.named_parameters()}


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_freezing_one_parameter_group_after_wrapping_trains_as_in_ddp(strategy: str) -> None:
    def groups(module: nn.Module) -> list[dict[str, Any]]:
        named = list(module.named_parameters())
        return [
            {"params": [p for n, p in named if "bias" not in n], "lr": 0.01},
            {"params": [p for n, p in named if "bias" in n], "lr": 0.02},
        ]

    def freeze_biases(module: nn.Module, frozen: bool) -> None:
        for name, parameter in module.named_parameters():
            if "bias" in name:
                parameter.requires_grad_(not frozen)

    for foreach in (False, True):
        plain = make(NestedLinears)
        freeze_biases(plain, True)
        expected = train(
            DistributedDataParallel(plain), torch.optim.Adam(groups(plain), foreach=foreach)
        )
        freeze_biases(plain, False)
        later = train(
            DistributedDataParallel(plain), torch.optim.Adam(groups(plain), foreach=foreach)
        )

        model = wrap(
            make(NestedLinears), strategy, auto_wrap_policy=always_wrap_policy, use_orig_params=True
        )
        optimizer = torch.optim.Adam(groups(model), foreach=foreach)
        freeze_biases(model, True)
        train(model, optimizer).assert_close(expected, f"frozen, {foreach=}")
        assert not any(p.grad is not None for n, p in model.named_parameters() if "bias" in n)
        freeze_biases(model, False)
        optimizer = torch.optim.Adam(groups(model), foreach=foreach)
        train(model, optimizer).assert_close(later, f"thawed, {foreach=}")


# -- gradients that are not there -----------------------------------------------------------------


class Choosing(TrainingModel):
    """Uses its second layer where ``uses`` says so, its first always."""

    def __init__(self, uses: str) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.uses = uses

    def get_input(self, rank: int, step: int = 0) -> tuple[Any, ...]:
        chosen = {
            "never": False,
            "first step": step == 0,
            "rank 0": rank == 0,
            "last rank": rank == dist.get_world_size() - 1,
            "in turn": (rank + step) % 2 == 0,
        }[self.uses]
        return *super().get_input(rank, step), chosen

    def forward(self, x: torch.Tensor, second: bool) -> torch.Tensor:
        x = self.first(x).tanh()
        return self.second(x) if second else x


USES = ["never", "first step", "rank 0", "last rank", "in turn"]


def _check_unused(uses: str) -> None:
    for set_to_none in (True, False):
        expected = train_alone(make(Choosing, uses=uses), adam, 3, set_to_none)
        ddp = train_with_ddp(make(Choosing, uses=uses), adam, 3, set_to_none, unused=True)
        ddp.assert_close(expected, "the references")
        for strategy in STRATEGIES:
            model = wrap(make(Choosing, uses=uses), strategy, use_orig_params=True)
            found = train(model, adam(model.parameters()), 3, set_to_none)
            found.assert_close(expected, (uses, strategy, set_to_none))


@pytest.mark.parametrize("uses", USES)
@ranks(2)
def test_parameters_unused_on_some_of_two_ranks_are_stepped_as_in_ddp(uses: str) -> None:
    _check_unused(uses)


@pytest.mark.parametrize("uses", USES)
@ranks(3)
def test_parameters_unused_on_some_of_three_ranks_are_stepped_as_in_ddp(uses: str) -> None:
    _check_unused(uses)


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_a_parameter_that_no_rank_used_has_no_gradient(strategy: str) -> None:
    model = wrap(make(Choosing, uses="never"), strategy, use_orig_params=True)

    inputs = model.get_input(dist.get_rank())
    model.get_loss(inputs, model(*inputs)).backward()

    assert model.second.weight.grad is None
    assert model.second.bias.grad is None
    assert all(p.grad is not None for p in model.first.parameters() if p.numel())


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_a_parameter_whose_gradient_is_zero_on_every_rank_has_one(strategy: str) -> None:
    model = wrap(make(Choosing, uses="rank 0"), strategy, use_orig_params=True)

    inputs = model.get_input(dist.get_rank())
    (model(*inputs).sum() * 0.0).backward()

    for parameter in model.parameters():
        if parameter.numel():
            assert parameter.grad is not None
            assert not parameter.grad.any()


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_unused_parameters_of_a_flat_unit_count_as_zero(strategy: str) -> None:
    plain = make(Choosing, uses="first step")
    optimizer = adam(plain.parameters())
    for step in range(2):
        optimizer.zero_grad(set_to_none=False)
        for rank in range(2):
            inputs = plain.get_input(rank, step)
            plain.get_loss(inputs, plain(*inputs)).div(2).backward()
        for parameter in plain.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()

    model = wrap(make(Choosing, uses="first step"), strategy)
    train(model, adam(model.parameters()), 2)

    for name, value in full_parameters(model).items():
        expected = full_parameters(plain)[name]
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_of_two_optimizers_only_the_one_with_zero_gradients_steps(
    strategy: str, kind: type[torch.optim.Adam]
) -> None:
    """Weights' gradients are set to None and biases' to zero; then the second layer is not used."""

    def optimizers_for(module: nn.Module) -> list[torch.optim.Optimizer]:
        named = list(module.named_parameters())
        return [
            kind([p for n, p in named if "weight" in n], lr=0.01, weight_decay=0.1),
            kind([p for n, p in named if "bias" in n], lr=0.01, weight_decay=0.1),
        ]

    def run(model: Any) -> tuple[Any, dict[str, float]]:
        optimizers = optimizers_for(model)
        for step in range(3):
            optimizers[0].zero_grad(set_to_none=True)
            optimizers[1].zero_grad(set_to_none=False)
            inputs = model.module.get_input(dist.get_rank(), step)
            model.module.get_loss(inputs, model(*inputs)).backward()
            for optimizer in optimizers:
                optimizer.step()
        states = {p: s["step"].item() for o in optimizers for p, s in o.state.items()}
        named = {n.removeprefix("module."): p for n, p in model.named_parameters()}
        # A parameter of which this rank owns nothing need not have a state.
        return full_parameters(model), {n: states[p] for n, p in named.items() if p.numel()}

    plain = make(Choosing, uses="first step")
    expected, expected_steps = run(DistributedDataParallel(plain, find_unused_parameters=True))
    assert (expected_steps["second.weight"], expected_steps["second.bias"]) == (1.0, 3.0)

    model = wrap(make(Choosing, uses="first step"), strategy, use_orig_params=True)
    found, steps = run(model)

    assert steps == {name: expected_steps[name] for name in steps}
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9, msg=name)


@with_both_modes
@ranks(2)
def test_a_unit_that_a_step_does_not_use_is_left_alone(use_orig_params: bool) -> None:
    expected = train_with_ddp(make(Choosing, uses="first step"), adam, unused=True)

    model = wrap(
        make(Choosing, uses="first step"),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=use_orig_params,
    )
    train(model, adam(model.parameters())).assert_close(expected, use_orig_params)


@ranks(2)
def test_a_frozen_model_runs_and_gives_its_input_a_gradient() -> None:
    plain = make(NestedLinears).requires_grad_(False)
    data = torch.randn(2, 5, dtype=torch.float64, device=device(), requires_grad=True)
    plain(data).square().sum().backward()
    expected, data.grad = data.grad, None

    model = wrap(
        make(NestedLinears).requires_grad_(False),
        auto_wrap_policy=always_wrap_policy,
        use_orig_params=True,
    )
    model(data).square().sum().backward()

    torch.testing.assert_close(data.grad, expected, rtol=1e-12, atol=1e-12)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("frozen_in_forward", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES[:2])
@with_both_modes
@ranks(2)
def test_parameters_are_frozen_or_unfrozen_between_forward_and_backward(
    use_orig_params: bool, strategy: str, frozen_in_forward: bool
) -> None:
    reference = make(NestedLinears)
    model = wrap(
        make(NestedLinears),
        strategy,
        use_orig_params=use_orig_params,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
    )
    # Held by the user: between forward and backward a unit may show full tensors in their place.
    parameters = [list(each.layers[0].parameters()) for each in (reference, model.module)]
    inputs = reference.get_input(dist.get_rank())
    optimizers = [sgd(each.parameters()) for each in (reference, model)]
    for each, some in zip((reference, model), parameters, strict=True):
        for parameter in some:
            parameter.requires_grad = not frozen_in_forward
        loss = reference.get_loss(inputs, each(*inputs))
        for parameter in some:
            parameter.requires_grad = frozen_in_forward
        loss.backward()
    average_gradients(reference)
    for optimizer in optimizers:
        optimizer.step()
    assert_same(full_parameters(model), full_parameters(reference), strategy)
