"""Low-precision compute: what the module sees, what the optimizer sees, and the numbers.

The expected numbers come from the module itself, cast as a whole, run on every rank's data in
turn; its gradients are cast, summed and divided by hand.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.engine.parity import full_parameters
from torch import nn

from fullshard import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from fullshard.testing import device, ranks
from fullshard.wrap import ModuleWrapPolicy

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
with_both_modes = pytest.mark.parametrize("use_orig_params", [False, True])
with_each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


class Watching(nn.Module):
    """Two linears and a buffer, and a record of the dtypes that forward met."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 3)
        self.register_buffer("offset", torch.ones(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((x.dtype, self.first.weight.dtype, self.offset.dtype, self.count.dtype))
        return self.second(self.first(x).tanh()) + self.offset.to(x.dtype)


def data(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(4, 5, generator=generator).to(device())


def wrap(module: nn.Module, precision: MixedPrecision, strategy: str, **options: Any) -> Any:
    return FullyShardedDataParallel(
        module.to(device()),
        mixed_precision=precision,
        sharding_strategy=ShardingStrategy[strategy],
        **options,
    )


def expected_gradients(
    compute: torch.dtype, reduce: torch.dtype, size: int
) -> dict[str, torch.Tensor]:
    """The mean over the ranks, summed in ``reduce``, of gradients computed in ``compute``."""
    sums: dict[str, torch.Tensor] = {}
    for rank in range(size):
        low = Watching().to(device(), compute)
        low(data(rank).to(compute)).float().square().sum().backward()
        for name, parameter in low.named_parameters():
            gradient = parameter.grad.to(reduce)
            sums[name] = sums[name] + gradient if name in sums else gradient
    return {name: (total / size).float() for name, total in sums.items()}


def step(model: Any) -> torch.Tensor:
    output = model(data(dist.get_rank()))
    output.float().square().sum().backward()
    return output


@with_both_modes
@with_each_strategy
@pytest.mark.parametrize(
    ("compute", "reduce"),
    [
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, None),
        (torch.float16, torch.float32),
        (torch.float16, None),
        (None, torch.bfloat16),
    ],
)
@ranks(2)
def test_a_step_equals_one_computed_by_hand(
    compute: torch.dtype | None, reduce: torch.dtype | None, strategy: str, use_orig_params: bool
) -> None:
    model = wrap(
        Watching(), MixedPrecision(compute, reduce), strategy, use_orig_params=use_orig_params
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    computes = compute or torch.float32
    reduces = reduce or computes

    output = step(model)

    assert output.dtype == computes
    low = Watching().to(device(), computes)
    assert torch.equal(output, low(data(dist.get_rank()).to(computes)))
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)
    optimizer.step()
    gradients = expected_gradients(computes, reduces, 2)
    found = full_parameters(model)
    for name, parameter in Watching().named_parameters():
        expected = parameter.detach() - 0.5 * gradients[name].cpu()
        # Two summands: their order does not matter, and halving is exact.
        torch.testing.assert_close(found[name], expected, rtol=1e-6, atol=1e-6, msg=name)


@with_each_strategy
@ranks(2)
def test_modules_meet_the_dtypes_asked_for(strategy: str) -> None:
    precision = MixedPrecision(torch.bfloat16, torch.float32, torch.float16)
    model = wrap(Watching(), precision, strategy)

    step(model)

    assert model.seen == [(torch.bfloat16, torch.bfloat16, torch.float16, torch.int64)]


@ranks(2)
def test_without_dtypes_nothing_is_cast() -> None:
    model = wrap(Watching(), MixedPrecision(), "FULL_SHARD")

    step(model)

    assert model.seen == [(torch.float32, torch.float32, torch.float32, torch.int64)]


@ranks(2)
def test_reduce_dtype_alone_leaves_compute_as_it_is() -> None:
    model = wrap(Watching(), MixedPrecision(reduce_dtype=torch.bfloat16), "FULL_SHARD")

    step(model)

    assert model.seen[0][:2] == (torch.float32, torch.float32)


@with_both_modes
@with_each_strategy
@ranks(2)
def test_low_precision_gradients_are_kept_when_asked_for(
    strategy: str, use_orig_params: bool
) -> None:
    precision = MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)
    model = wrap(Watching(), precision, strategy, use_orig_params=use_orig_params)

    step(model)

    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients
    assert {gradient.dtype for gradient in gradients} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@ranks(2)
def test_inputs_of_nested_units_are_cast_only_when_asked_for() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Watching()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x.float())

    policy = ModuleWrapPolicy({Watching})
    precision = MixedPrecision(torch.bfloat16, cast_forward_inputs=True)
    model = wrap(Outer(), precision, "FULL_SHARD", auto_wrap_policy=policy)

    step(model)

    assert model.inner.seen[0][0] == torch.bfloat16
    model = wrap(Outer(), MixedPrecision(torch.bfloat16), "FULL_SHARD", auto_wrap_policy=policy)
    with pytest.raises(RuntimeError, match="dtype"):
        step(model)
    assert model.inner.seen[0][0] == torch.float32


@ranks(2)
def test_the_roots_inputs_stay_as_they_are_when_asked_for() -> None:
    precision = MixedPrecision(torch.bfloat16, cast_root_forward_inputs=False)
    model = wrap(Watching(), precision, "FULL_SHARD")

    model(data(0).bfloat16())
    with pytest.raises(RuntimeError, match="dtype"):
        model(data(0))

    assert [seen[0] for seen in model.seen] == [torch.bfloat16, torch.float32]


@ranks(2)
def test_integer_inputs_are_not_cast() -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 3)

        def forward(self, index: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
            assert index.dtype == torch.int64
            assert options["scale"].dtype == torch.bfloat16
            return self.table(index) * options["scale"]

    model = wrap(Lookup(), MixedPrecision(torch.bfloat16), "FULL_SHARD")

    output = model(torch.tensor([1, 3], device=device()), {"scale": torch.ones(1, device=device())})

    assert output.dtype == torch.bfloat16


@with_each_strategy
@ranks(2)
def test_gradients_reach_inputs_in_the_inputs_dtype(strategy: str) -> None:
    model = wrap(Watching(), MixedPrecision(torch.bfloat16), strategy)
    mine = data(dist.get_rank()).requires_grad_()
    low = Watching().to(device(), torch.bfloat16)
    same = data(dist.get_rank()).requires_grad_()

    model(mine).float().sum().backward()
    low(same.bfloat16()).float().sum().backward()

    assert mine.grad.dtype == torch.float32
    assert torch.equal(mine.grad, same.grad)


@with_both_modes
@ranks(2)
def test_summoned_parameters_are_in_full_precision(use_orig_params: bool) -> None:
    precision = MixedPrecision(torch.bfloat16, torch.bfloat16)
    model = wrap(Watching(), precision, "FULL_SHARD", use_orig_params=use_orig_params)

    for _ in range(2):
        for name, parameter in full_parameters(model).items():
            assert parameter.dtype == torch.float32
            assert torch.equal(parameter, dict(Watching().named_parameters())[name].detach())
        step(model)


@ranks(2)
def test_eval_computes_in_full_precision_when_the_environment_says_so() -> None:
    os.environ["FSDP_USE_FULL_PREC_IN_EVAL"] = "1"
    precision = MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16)
    model = wrap(Watching(), precision, "FULL_SHARD")
    expected = Watching().to(device())(data(0))

    step(model)
    model.eval()
    output = model(data(0))
    model.train()
    step(model)

    assert torch.equal(output, expected)
    low, full = torch.bfloat16, torch.float32
    assert [seen[:3] for seen in model.seen] == [(low,) * 3, (full,) * 3, (low,) * 3]


@ranks(2)
def test_batch_norm_stays_in_full_precision() -> None:
    module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    reference = copy.deepcopy(module).to(device())

    with pytest.warns(UserWarning, match=r"(?i)batch ?norm"):
        model = wrap(
            module,
            MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16),
            "FULL_SHARD",
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        )
    output = step(model)

    hidden = nn.functional.linear(
        data(dist.get_rank()).bfloat16(),
        reference[0].weight.bfloat16(),
        reference[0].bias.bfloat16(),
    )
    hidden = reference[1](hidden.float())
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(model[1].running_mean, reference[1].running_mean, rtol=0, atol=0)
    expected = reference[2].bfloat16()(hidden.bfloat16())
    torch.testing.assert_close(output, expected, rtol=1e-2, atol=1e-2)


@with_both_modes
@ranks(3)
def test_training_in_low_precision_follows_full_precision(use_orig_params: bool) -> None:
    def losses(model: Any) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        found = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(data(0)).float().square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    expected = losses(Watching().to(device()))
    precision = MixedPrecision(torch.bfloat16, torch.bfloat16)
    found = losses(wrap(Watching(), precision, "FULL_SHARD", use_orig_params=use_orig_params))

    assert found == pytest.approx(expected, rel=0.05)
    assert found[-1] < found[0]
