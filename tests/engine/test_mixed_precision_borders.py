"""Where units of different precision meet: casts at their borders, norms, embeddings, autocast.

Expected numbers come from the same modules, cast by hand, called with inputs cast by hand.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.engine.parity import full_parameters
from tests.original.training import (
    Block,
    Net,
    assert_same_parameters,
    average_gradients,
    blocks_policy,
    build,
    inputs,
)
from torch import nn

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import MixedPrecision
from fullshard.testing import device, ranks
from fullshard.wrap import CustomPolicy, ModuleWrapPolicy

HALF, LOW, FULL = torch.float16, torch.bfloat16, torch.float32
with_both_modes = pytest.mark.parametrize("use_orig_params", [False, True])


class Recording(nn.Linear):
    """A linear that knows the dtypes it was called with."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = (x.dtype, self.weight.dtype)
        return super().forward(x)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Recording(5, 4)
        self.second = Recording(4, 4)
        self.third = Recording(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x)))


def precision(dtype: torch.dtype | None) -> MixedPrecision:
    return MixedPrecision(dtype, reduce_dtype=FULL, cast_forward_inputs=True)


@with_both_modes
@ranks(2)
def test_units_of_different_precision_cast_their_inputs_at_each_border(
    use_orig_params: bool,
) -> None:
    bare = build(Chain)
    reference = copy.deepcopy(bare)
    own = {bare.first: LOW, bare.second: HALF, bare.third: FULL}

    def choose(module: nn.Module) -> bool | dict[str, Any]:
        return module in own and {"mixed_precision": precision(own[module])}

    model = FSDP(bare, auto_wrap_policy=CustomPolicy(choose), use_orig_params=use_orig_params)
    mine, same = inputs(0).requires_grad_(), inputs(0).requires_grad_()

    model(mine).square().sum().backward()
    hidden = copy.deepcopy(reference.first).to(LOW)(same.to(LOW))
    hidden = copy.deepcopy(reference.second).to(HALF)(hidden.to(HALF))
    reference.third(hidden.float()).square().sum().backward()

    assert (bare.first.module.seen, bare.second.module.seen) == ((LOW, LOW), (HALF, HALF))
    assert bare.third.module.seen == (FULL, FULL)
    assert mine.grad.dtype == FULL
    torch.testing.assert_close(mine.grad, same.grad, rtol=0, atol=0)
    average_gradients(reference.third)
    before = {n: p.detach().cpu() for n, p in reference.named_parameters()}
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    for name, value in full_parameters(model).items():
        assert value.dtype == FULL
        assert not torch.equal(value, before[name])
        if name.startswith("third"):
            expected = before[name] - dict(reference.named_parameters())[name].grad.cpu()
            torch.testing.assert_close(value, expected)


@ranks(2)
def test_gradients_between_units_are_in_the_dtype_of_what_passed_between_them() -> None:
    seen: list[torch.dtype] = []

    class Watched(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            x.register_hook(lambda gradient: seen.append(gradient.dtype))
            for block in self.blocks:
                x = block(x)
            return self.head(x.float())

    bare = build(Watched)
    for index, block in enumerate(bare.blocks):
        bare.blocks[index] = FSDP(block, mixed_precision=precision(LOW))

    FSDP(bare)(inputs(0)).sum().backward()

    assert seen == [FULL]


class Normed(nn.Module):
    """A batch norm between two linears, none of which has a unit of its own."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.inner = nn.Sequential(norm or nn.BatchNorm1d(4))
        self.second = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.inner(self.first(x)))


NORMS = {
    "batch norm": lambda: nn.BatchNorm1d(4),
    "without weights": lambda: nn.BatchNorm1d(4, affine=False),
    "in eval": lambda: nn.BatchNorm1d(4).eval(),
}


@pytest.mark.parametrize("norm", NORMS)
@with_both_modes
@ranks(2)
def test_a_batch_norm_without_a_unit_of_its_own_computes_in_full_precision(
    use_orig_params: bool, norm: str
) -> None:
    bare = build(lambda: Normed(NORMS[norm]()))
    reference = copy.deepcopy(bare)

    with pytest.warns(UserWarning, match=r"'inner.0' \(BatchNorm1d\) would compute in .*bfloat16"):
        model = FSDP(bare, mixed_precision=MixedPrecision(LOW), use_orig_params=use_orig_params)
    output = model(inputs(0))
    output.float().sum().backward()

    hidden = copy.deepcopy(reference.first).to(LOW)(inputs(0).to(LOW))
    hidden = reference.inner(hidden.float())
    expected = copy.deepcopy(reference.second).to(LOW)(hidden.to(LOW))
    assert torch.equal(output, expected)
    assert torch.equal(bare.inner[0].running_mean, reference.inner[0].running_mean)
    assert bare.inner[0].running_mean.dtype == FULL
    assert list(full_parameters(model)) == list(dict(reference.named_parameters()))


@ranks(2)
def test_a_batch_norm_that_is_the_unit_computes_in_full_precision() -> None:
    reference = nn.BatchNorm1d(5).to(device())

    with pytest.warns(UserWarning, match=r"'\(root\)' \(BatchNorm1d\) would compute"):
        model = FSDP(copy.deepcopy(reference), mixed_precision=MixedPrecision(LOW))

    assert torch.equal(model(inputs(0)), reference(inputs(0)))


@ranks(2)
def test_a_batch_norm_whose_statistics_are_lowered_as_well_stays_in_its_unit() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = FSDP(build(Normed), mixed_precision=MixedPrecision(LOW, buffer_dtype=LOW))

    assert len(FSDP.fsdp_modules(model)) == 1
    low = build(Normed).to(LOW)
    assert torch.equal(model(inputs(0)), low(inputs(0).to(LOW)))


@with_both_modes
@ranks(2)
def test_batch_norms_in_units_made_by_hand_and_shared_ones_train(use_orig_params: bool) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Normed()
            self.norm = self.first.inner[0]
            self.last = nn.Linear(3, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.last(self.first(x)))

    bare = build(Shared)
    bare.last = FSDP(bare.last, mixed_precision=MixedPrecision(LOW))
    with pytest.warns(UserWarning, match="would compute"):
        model = FSDP(bare, mixed_precision=MixedPrecision(LOW), use_orig_params=use_orig_params)
    before = full_parameters(model)

    model(inputs(0)).float().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()

    assert bare.norm is bare.first.inner[0]
    assert isinstance(bare.norm, FSDP)
    assert not torch.equal(
        full_parameters(model)["first.inner.0.bias"], before["first.inner.0.bias"]
    )
    assert model.state_dict().keys() == build(Shared).state_dict().keys()


@ranks(2)
def test_an_ignored_batch_norm_is_left_alone() -> None:
    bare = build(Normed)
    norm = bare.inner[0]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = FSDP(bare, mixed_precision=MixedPrecision(LOW), ignored_modules=[norm])

    assert bare.inner[0] is norm
    assert model(inputs(0)).dtype == LOW


@with_both_modes
@ranks(2)
def test_embeddings_give_low_precision_and_get_full_precision_gradients(
    use_orig_params: bool,
) -> None:
    table = build(lambda: nn.Embedding(7, 3, padding_idx=0))
    index = torch.tensor([0, 1, 1, 2 + dist.get_rank()], device=device())
    reference = copy.deepcopy(table)
    model = FSDP(table, mixed_precision=MixedPrecision(LOW, FULL), use_orig_params=use_orig_params)

    output = model(index)
    output.float().sum().backward()
    reference(index).sum().backward()
    average_gradients(reference)
    for each in (model, reference):
        torch.optim.SGD(each.parameters(), lr=1.0).step()

    assert output.dtype == LOW
    assert all(p.grad.dtype == FULL for p in model.parameters() if p.grad is not None)
    assert_same_parameters(reference, model)


@pytest.mark.parametrize("mixed", [None, MixedPrecision(LOW, FULL)], ids=["full", "mixed"])
@with_both_modes
@ranks(2)
def test_autocast_around_the_model_does_what_it_does_to_the_bare_one(
    use_orig_params: bool, mixed: MixedPrecision | None
) -> None:
    bare = build(Net)
    options = {"auto_wrap_policy": blocks_policy(), "use_orig_params": use_orig_params}
    model = FSDP(copy.deepcopy(bare), mixed_precision=mixed, **options)
    reference = bare if mixed is None else copy.deepcopy(bare).to(LOW)

    with torch.autocast(device().type, LOW):
        output = model(inputs(0))
        expected = reference(inputs(0) if mixed is None else inputs(0).to(LOW))
    output.float().square().mean().backward()
    expected.float().square().mean().backward()

    assert output.dtype == expected.dtype == LOW
    assert torch.equal(output, expected)
    for parameter in reference.parameters():
        parameter.grad = parameter.grad.float() if mixed is None else parameter.grad
    gradients = {n: p.grad.float() for n, p in reference.named_parameters()}
    for name, parameter in bare.named_parameters():
        parameter.grad = gradients[name]
    average_gradients(bare)
    for each in (bare, model):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    assert_same_parameters(bare, model)


@ranks(2)
def test_policies_of_a_class_and_of_the_root_can_differ_by_policy_alone() -> None:
    bare = build(Net)
    own = {"mixed_precision": precision(LOW)}
    policy = CustomPolicy(lambda module: own if isinstance(module, Block) else False)

    class Casting(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x.float())

    casting = build(Casting)
    model = FSDP(casting, auto_wrap_policy=policy)
    output = model(inputs(0))

    hidden = bare.embed(inputs(0))
    for block in bare.blocks:
        hidden = block.to(LOW)(hidden.to(LOW))
    assert torch.equal(output, bare.head(hidden.float()))
    assert [m.mixed_precision.param_dtype for m in FSDP.fsdp_modules(model)] == [None, *[LOW] * 3]


@ranks(2)
def test_exempt_classes_wrapped_by_a_policy_stay_in_full_precision() -> None:
    bare = build(Net)
    mixed = MixedPrecision(LOW, _module_classes_to_ignore=(Recording,))
    bare.head = Recording(7, 3).to(device())

    with pytest.warns(UserWarning, match="Recording"):
        model = FSDP(bare, auto_wrap_policy=ModuleWrapPolicy({Block}), mixed_precision=mixed)
    output = model(inputs(0))

    assert bare.head.module.seen == (FULL, FULL)
    assert output.dtype == LOW


@ranks(2)
def test_buffers_that_were_lowered_in_inference_mode_take_part_in_training() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3)
            self.register_buffer("scale", torch.full((3,), 1.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.scale

    reference = build(Scaled).to(LOW)
    model = FSDP(build(Scaled), mixed_precision=MixedPrecision(LOW, buffer_dtype=LOW))
    with torch.inference_mode():
        model(inputs(0))
    output = model(inputs(0))
    torch.testing.assert_close(output, reference(inputs(0).to(LOW)))
    output.sum().backward()


@ranks(2)
def test_a_buffer_that_modules_share_is_still_shared_when_it_is_lowered() -> None:
    class Counting(nn.Module):
        def __init__(self, count: torch.Tensor) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5)
            self.register_buffer("count", count)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return self.linear(x)

    # Where the model will be: to move it would make two of one.
    count = torch.zeros(3, device=device())
    model = FSDP(
        build(lambda: nn.Sequential(Counting(count), Counting(count))),
        mixed_precision=MixedPrecision(LOW, buffer_dtype=LOW),
    )
    model(inputs(0))
    assert [buffer.tolist() for buffer in model.buffers()] == [[2.0] * 3]
