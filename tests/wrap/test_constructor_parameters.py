"""Which parameters the real units manage: shared, tied, ignored, frozen, and in which precision."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.wrap.test_frozen import CLASSES, LoraAttention, LoraModel
from tests.wrap.wrapped import RankAndSize, linears, size_based, unit_paths
from torch import nn

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import MixedPrecision, ShardingStrategy
from fullshard.testing import device, ranks
from fullshard.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    wrap,
)

BOTH_MODES = pytest.mark.parametrize("use_orig_params", [False, True])


def batch(width: int = 5) -> torch.Tensor:
    """The whole batch, of which each of two ranks computes one half."""
    return torch.randn(6, width, generator=torch.Generator().manual_seed(5)).to(device())


def halves(data: torch.Tensor) -> torch.Tensor:
    return data.chunk(dist.get_world_size())[dist.get_rank()]


def built(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """A model and a copy of it, the same on every rank."""
    torch.manual_seed(3)
    model = make().to(device())
    return model, copy.deepcopy(model)


def assert_trains_alike(bare: nn.Module, model: FSDP, steps: int = 3) -> None:
    """Three steps of the bare model on the batch, and of the wrapped one on its halves."""
    optimizers = [
        torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (bare, model)
    ]
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        bare(batch()).square().mean().backward()
        model(halves(batch())).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    with FSDP.summon_full_params(model):
        found = dict(model.named_parameters())
        for name, parameter in bare.named_parameters():
            torch.testing.assert_close(found[name].detach(), parameter.detach())


# -- shared modules and tied weights ------------------------------------------------------------


class Twice(nn.Module):
    """One module at two paths."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.middle = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        self.again = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.middle(self.first(x)))


@BOTH_MODES
@ranks(2)
def test_a_module_at_two_paths_is_one_unit_and_trains_as_the_bare_model(
    use_orig_params: bool,
) -> None:
    bare, module = built(Twice)
    model = FSDP(
        module, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=use_orig_params
    )
    assert isinstance(model.first, FSDP)
    assert model.first is model.again
    assert len(FSDP.fsdp_modules(model)) == 3
    assert_trains_alike(bare, model)


class Tied(nn.Module):
    """An input and an output layer with one weight, and layers in between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        self.middle = nn.Linear(5, 5)
        self.head = nn.Linear(5, 5)
        self.head.weight = self.embedding[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embedding(x)))


TIED_POLICIES = {
    "linears": ModuleWrapPolicy({nn.Linear}),
    "everything": always_wrap_policy,
    "one side": CustomPolicy(lambda m: isinstance(m, nn.Sequential)),
}


@BOTH_MODES
@pytest.mark.parametrize("strategy", list(ShardingStrategy)[:3])
@pytest.mark.parametrize("kind", TIED_POLICIES)
@ranks(2)
def test_weights_tied_across_two_units_train_as_the_bare_model(
    kind: str, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    bare, module = built(Tied)
    model = FSDP(
        module,
        sharding_strategy=strategy,
        auto_wrap_policy=TIED_POLICIES[kind],
        use_orig_params=use_orig_params,
    )
    assert_trains_alike(bare, model)
    with FSDP.summon_full_params(model):
        names = [n for n, _ in model.named_parameters(remove_duplicate=False)]
        assert {"embedding.0.weight", "head.weight"} <= set(names)
        weights = {p for n, p in model.named_parameters() if n == "embedding.0.weight"}
        assert weights == {model.head.weight}


@BOTH_MODES
@ranks(2)
def test_weights_tied_inside_a_nested_unit_train_as_the_bare_model(use_orig_params: bool) -> None:
    bare, module = built(lambda: nn.Sequential(Tied(), nn.Linear(5, 5)))
    model = FSDP(module, auto_wrap_policy=always_wrap_policy, use_orig_params=use_orig_params)
    assert_trains_alike(bare, model)


@ranks(2)
def test_a_weight_shared_by_two_units_made_by_hand_is_refused_with_advice() -> None:
    _, module = built(Tied)
    module.embedding = FSDP(module.embedding)
    with pytest.raises(ValueError, match=r"'weight' of Linear is shared .* auto_wrap_policy"):
        module.head = FSDP(module.head)


# -- what is ignored ----------------------------------------------------------------------------


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("argument", ["ignored_modules", "ignored_states"])
def test_ignored_modules_are_neither_wrapped_nor_counted(argument: str, by_hand: bool) -> None:
    sequential = linears()
    ignored = [sequential[1], sequential[2][0]]
    arguments: dict[str, Any] = {
        "process_group": RankAndSize(),
        "auto_wrap_policy": size_based(40),
        argument: ignored,
    }

    def wrap_it() -> nn.Module:
        if not by_hand:
            return FSDP(sequential, **arguments)
        with enable_wrap(wrapper_cls=FSDP, **arguments):
            return wrap(sequential)

    with pytest.warns(UserWarning, match="matches no module"):
        model = wrap_it()
    assert isinstance(model, FSDP)
    assert unit_paths(model) == []
    # The root manages the other two linears; the ignored ones are as they were.
    assert model._flat_param is not None
    assert sum(model._flat_param._numels) == 60
    assert [m.weight.shape for m in ignored] == [(5, 5)] * 2


def average_by_hand(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


@BOTH_MODES
@pytest.mark.parametrize("argument", ["ignored_modules", "modules", "parameters"])
@ranks(2)
def test_what_is_ignored_keeps_shape_and_gradient_and_is_not_averaged(
    argument: str, use_orig_params: bool
) -> None:
    bare, module = built(linears)
    if argument == "parameters":
        given: dict[str, Any] = {"ignored_states": [module[0].weight, module[2][1].bias]}
        ignored = list(given["ignored_states"])
    else:
        name = "ignored_modules" if argument == "ignored_modules" else "ignored_states"
        given = {name: [module[0], module[2][1]]}
        ignored = [*module[0].parameters(), *module[2][1].parameters()]
    shapes = [p.shape for p in ignored]
    model = FSDP(
        module,
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
        use_orig_params=use_orig_params,
        **given,
    )
    assert [p.shape for p in ignored] == shapes
    assert {id(p) for p in ignored} <= {id(p) for p in model.parameters()}
    bare(halves(batch())).square().mean().backward()
    local = [p.grad for p in bare.parameters() if p.grad is not None]
    model(halves(batch())).square().mean().backward()
    own = [g for g in local if any(g.shape == p.shape and g.allclose(p.grad) for p in ignored)]
    assert len(own) == len(ignored)

    # With gradients averaged by hand it trains as the bare model does.
    for each in (bare, model):
        each.zero_grad()
    bare(batch()).square().mean().backward()
    model(halves(batch())).square().mean().backward()
    average_by_hand(ignored)
    for each in (bare, model):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    torch.testing.assert_close(model(batch()), bare(batch()))


@ranks(2)
def test_buffers_of_ignored_modules_keep_their_precision() -> None:
    class Offset(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("offset", torch.ones(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.offset

    module = nn.Sequential(nn.Linear(5, 5), Offset(), Offset()).to(device())
    low = MixedPrecision(buffer_dtype=torch.bfloat16)
    model = FSDP(module, mixed_precision=low, ignored_modules=[module[1]])
    model(batch())
    assert [m.offset.dtype for m in module[1:]] == [torch.float32, torch.bfloat16]  # type: ignore[attr-defined]


@ranks(2)
def test_a_model_that_is_ignored_as_a_whole_runs_unsharded() -> None:
    bare, module = built(linears)
    with pytest.warns(UserWarning, match="Trying to ignore the top-level module"):
        model = FSDP(module, ignored_modules=[module])
    assert model._flat_param is None
    torch.testing.assert_close(model(batch()), bare(batch()))


# -- frozen beside trainable --------------------------------------------------------------------


def nonuniform(module: nn.Module) -> bool | dict[str, Any]:
    if isinstance(module, LoraAttention):
        return {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
    return isinstance(module, CLASSES)


FROZEN_POLICIES: dict[str, Any] = {
    "classes": ModuleWrapPolicy(CLASSES),
    "uniform": CustomPolicy(lambda module: isinstance(module, CLASSES)),
    "nonuniform": CustomPolicy(nonuniform),
}
MIXED = "layers.0.attn has both parameters with requires_grad=True and False. "


@pytest.mark.parametrize("kind", FROZEN_POLICIES)
def test_mixing_frozen_and_trainable_parameters_is_an_error_in_flat_mode(kind: str) -> None:
    model = LoraModel()
    message = MIXED + "FSDP does not support wrapping such modules when use_orig_params=False."
    with pytest.raises(ValueError, match=re.escape(message)):
        FSDP(model, RankAndSize(), auto_wrap_policy=FROZEN_POLICIES[kind])
    assert not FSDP.fsdp_modules(model)


def test_a_unit_made_by_hand_of_frozen_and_trainable_parameters_is_refused_with_advice() -> None:
    message = "Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`"
    with pytest.raises(ValueError, match=f"{re.escape(message)}: wrap the frozen") as caught:
        FSDP(LoraModel(), RankAndSize())
    words = "The root module (LoraModel) has both parameters with requires_grad=True and False. "
    assert words + "FSDP does not support wrapping such modules when" in str(caught.value)
    trainable, frozen = str(caught.value).split("requires_grad=True:\n")[1].split("\n")[::2]
    assert "layers.0.attn.lora_A.weight" in trainable
    assert "lora" not in frozen


@pytest.mark.parametrize("kind", FROZEN_POLICIES)
def test_mixing_frozen_and_trainable_parameters_is_a_warning_with_originals(kind: str) -> None:
    policy = FROZEN_POLICIES[kind]
    message = MIXED + "We do not recommend wrapping such modules"
    with pytest.warns(UserWarning, match=re.escape(message)):
        model = FSDP(LoraModel(), RankAndSize(), auto_wrap_policy=policy, use_orig_params=True)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("lora" in name)


# -- batch norm under mixed precision -----------------------------------------------------------


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.norm, self.after = nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(torch.relu(self.norm(self.before(x))))


@BOTH_MODES
@ranks(2)
def test_batch_norm_under_mixed_precision_computes_in_full_precision_and_trains(
    use_orig_params: bool,
) -> None:
    _, module = built(Normed)
    low = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    with pytest.warns(UserWarning, match=r"(?s)mixed precision and an auto_wrap_policy.*BatchNorm"):
        model = FSDP(
            module,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            mixed_precision=low,
            use_orig_params=use_orig_params,
        )
    assert unit_paths(model) == ["before", "norm", "after"]
    assert model.norm.mixed_precision == MixedPrecision()
    seen: list[tuple[torch.dtype, ...]] = []
    model.norm.module.register_forward_pre_hook(
        lambda m, _: seen.append((m.weight.dtype, m.bias.dtype, m.running_var.dtype))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(halves(batch())).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert set(seen) == {(torch.float32,) * 3}
    assert model.norm.running_mean.abs().sum() > 0
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("exempt", [nn.LayerNorm, nn.Linear])
@ranks(2)
def test_modules_of_classes_exempted_by_the_user_compute_in_full_precision(
    exempt: type[nn.Module],
) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv1d(1, 1, 1), nn.LayerNorm(5), nn.Linear(5, 5)).to(device())
    low = MixedPrecision(torch.bfloat16, _module_classes_to_ignore=(exempt,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FSDP(module, auto_wrap_policy=ModuleWrapPolicy({nn.Conv1d}), mixed_precision=low)
    seen: dict[str, torch.dtype] = {}
    for each in module.modules():
        if isinstance(each, nn.LayerNorm | nn.Linear | nn.Conv1d):
            each.register_forward_pre_hook(
                lambda m, _: seen.__setitem__(type(m).__name__, m.weight.dtype)
            )
    model(torch.randn(2, 1, 5, device=device())).float().square().mean().backward()
    kinds = ("Conv1d", "LayerNorm", "Linear")
    assert seen == {k: torch.float32 if k == exempt.__name__ else torch.bfloat16 for k in kinds}
