"""Optimizers and clipping give what they give under torch's fully_shard, on local tensors."""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.fully_shard.side_by_side import (
    OURS,
    THEIRS,
    both,
    build,
    by_block,
    forward_loss,
    told,
    train,
    whole,
)
from tests.marks import in_long_runs
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.testing import ranks

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "ASGD": {"lr": 0.1},
    "Adadelta": {},
    "Adagrad": {"lr": 0.1},
    "Adam": {"lr": 0.01, "eps": 1e-3, "amsgrad": True},
    "AdamW": {"lr": 0.01, "eps": 1e-3, "fused": True},
    "Adamax": {"lr": 0.01, "eps": 1e-3},
    "NAdam": {"lr": 0.01, "eps": 1e-3},
    "RAdam": {"lr": 0.01, "eps": 1e-3},
    "RMSprop": {"lr": 0.01, "eps": 1e-3},
    "SGD": {"lr": 0.1, "momentum": 0.9, "foreach": True},
}


@ranks(2)
def test_every_elementwise_optimizer_of_torch_trains_the_same() -> None:
    for name, options in OPTIMIZERS.items():

        def make(parameters: Any, name: str = name, options: Any = options) -> Any:
            return getattr(torch.optim, name)(parameters, **options)

        ours, theirs = both(by_block(), make, steps=2)
        for step, (found, expected) in enumerate(
            zip(shown(ours.optimizer), shown(theirs.optimizer), strict=True)
        ):
            assert found.keys() == expected.keys(), (name, step)
            for key, value in expected.items():
                assert type(found[key]) is type(value), (name, key)
                torch.testing.assert_close(local(found[key]), local(value), rtol=1e-4, atol=1e-5)


@ranks(2)
def test_rprop_which_cannot_step_dtensors_trains_as_under_distributed_data_parallel() -> None:
    reference = DistributedDataParallel(build())
    expected = torch.optim.Rprop(reference.parameters(), lr=1e-3)
    for step in range(3):
        forward_loss(reference, step).backward()
        expected.step()
        expected.zero_grad()

    ours = train(OURS, by_block(), lambda parameters: torch.optim.Rprop(parameters, lr=1e-3))

    for name, parameter in reference.module.named_parameters():
        found = whole(ours.model.get_parameter(name))
        torch.testing.assert_close(found, parameter.detach())


def shown(optimizer: Any) -> list[dict[str, Any]]:
    return [optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"]]


def local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


class DTensorOperations(TorchDispatchMode):
    """Counts operations that are given DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat = torch.utils._pytree.tree_leaves((args, kwargs))
        self.count += any(isinstance(value, DTensor) for value in flat)
        return func(*args, **(kwargs or {}))


@ranks(2)
def test_a_step_and_clipping_run_no_operation_per_parameter_on_dtensors() -> None:
    model: Any = build()
    by_block()(OURS, model)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        forward_loss(model, step).backward()
        with DTensorOperations() as counted:
            optimizer.step()
        assert counted.count == 0
        with DTensorOperations() as counted:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert counted.count < 5
        with DTensorOperations() as counted:
            # As torchtitan does, to add the norms of a pipeline's stages in between.
            gradients = [p.grad for p in model.parameters()]
            norm: Any = torch.nn.utils.get_total_norm(gradients, error_if_nonfinite=True)
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm.full_tensor())
        assert counted.count < len(gradients) / 2
        optimizer.zero_grad()


@ranks(2)
def test_a_step_that_raises_leaves_the_optimizer_as_it_was() -> None:
    model: Any = build()
    by_block()(OURS, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    forward_loss(model, 0).backward()
    optimizer.step()
    before = copy.copy(optimizer.param_groups[0]["params"])

    def closure() -> torch.Tensor:
        raise KeyError("of the user's")

    with pytest.raises(KeyError):
        optimizer.step(closure)

    after = optimizer.param_groups[0]["params"]
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert all(isinstance(p, DTensor) for p in after)
    assert set(optimizer.state) == set(after)
    forward_loss(model, 1).backward()
    optimizer.step()


@ranks(2)
def test_a_closure_may_compute_the_gradients() -> None:
    weights = []
    for api in (THEIRS, OURS):
        model: Any = build()
        by_block()(api, model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)

        def closure(model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = forward_loss(model, 0)
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        weights.append(whole(model.head.weight))

    torch.testing.assert_close(weights[1], weights[0])


@ranks(2)
def test_a_scheduler_and_groups_with_options_of_their_own_are_followed() -> None:
    weights = []
    for api in (THEIRS, OURS):
        model: Any = build()
        by_block()(api, model)
        groups = [
            {"params": list(model.blocks.parameters()), "lr": 0.05},
            {"params": list(model.head.parameters()), "weight_decay": 0.3},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for step in range(3):
            forward_loss(model, step).backward()
            optimizer.step()
            scheduler.step()
            model.zero_grad()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.5**3)
        weights.append(whole(model.blocks[0].up.weight))
        weights.append(whole(model.head.weight))

    torch.testing.assert_close(weights[2:], weights[:2])


@ranks(2)
def test_optimizer_state_moves_by_state_dict_and_by_checkpoint_functions() -> None:
    source = train(OURS, by_block(), steps=2)
    full = get_optimizer_state_dict(
        source.model, source.optimizer, options=StateDictOptions(full_state_dict=True)
    )
    theirs = train(THEIRS, by_block(), steps=2)
    expected = get_optimizer_state_dict(
        theirs.model, theirs.optimizer, options=StateDictOptions(full_state_dict=True)
    )
    assert full["state"].keys() == expected["state"].keys()
    for name, state in expected["state"].items():
        torch.testing.assert_close(full["state"][name], state, rtol=1e-4, atol=1e-6)

    continued = []
    for how in ("torch", "checkpoint"):
        again: Any = train(OURS, by_block(), steps=2)
        fresh = torch.optim.AdamW(again.model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-4)
        if how == "torch":
            # A copy: torch lets two optimizers share what one loads from the other.
            fresh.load_state_dict(copy.deepcopy(source.optimizer.state_dict()))
        else:
            set_optimizer_state_dict(
                again.model,
                fresh,
                optim_state_dict=copy.deepcopy(full),
                options=StateDictOptions(full_state_dict=True),
            )
        forward_loss(again.model, 5).backward()
        fresh.step()
        continued.append(whole(again.model.head.weight))
    forward_loss(source.model, 5).backward()
    source.optimizer.step()
    for weight in continued:
        torch.testing.assert_close(weight, whole(source.model.head.weight))


@ranks(2)
def test_an_optimizer_that_is_not_elementwise_computes_with_dtensors() -> None:
    weights = []
    for api in (THEIRS, OURS):
        model: Any = build()
        by_block()(api, model)
        matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
        optimizer = torch.optim.Muon(matrices, lr=0.01)
        for step in range(2):
            forward_loss(model, step).backward()
            optimizer.step()
            model.zero_grad()
        weights.append(whole(model.blocks[0].up.weight))

    torch.testing.assert_close(weights[1], weights[0], rtol=1e-3, atol=1e-4)


@ranks(2)
def test_clipping_is_torchs_for_every_norm() -> None:
    for norm_type in (2.0, 1.0, 3.0):
        found = []
        for api in (THEIRS, OURS):
            model: Any = build()
            by_block()(api, model)
            forward_loss(model, 0).backward()
            norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type)
            assert isinstance(norm, DTensor)
            found.append((whole(norm), told(model.head.weight.grad)[-1], str(norm.placements)))
        torch.testing.assert_close(found[1][:2], found[0][:2])
        assert found[1][2] == found[0][2]


@ranks(2)
def test_the_maximum_norm_is_found_also_where_a_rank_has_no_rows() -> None:
    model: Any = build()
    by_block()(OURS, model)
    forward_loss(model, 0).backward()
    largest = max(whole(p.grad).abs().max().item() for p in model.parameters())

    norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, float("inf"))

    assert whole(norm).item() == pytest.approx(largest)
    clipped = max(whole(p.grad).abs().max().item() for p in model.parameters())
    assert clipped == pytest.approx(0.01, rel=1e-3)
    if dist.get_rank() == 0:
        model.head.weight.grad.to_local().fill_(float("nan"))
    with pytest.raises(RuntimeError, match=r"norm of order inf .* is non-finite"):
        torch.nn.utils.clip_grad_norm_(
            model.parameters(), 0.01, float("inf"), error_if_nonfinite=True
        )


@ranks(2)
def test_a_plain_gradient_scaler_skips_a_step_on_all_ranks() -> None:
    weights = []
    for api in (THEIRS, OURS):
        model: Any = build()
        by_block()(api, model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        for step in range(4):
            loss = forward_loss(model, step)
            if step == 1 and torch.distributed.get_rank() == 0:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        weights.append((whole(model.head.weight), scaler.get_scale()))

    torch.testing.assert_close(weights[1], weights[0])


#: Every way in which torch's elementwise optimizers can be asked to step on a host.
WAYS = [
    (name, {**{k: v for k, v in options.items() if k not in ("foreach", "fused")}, **way})
    for name, options in OPTIMIZERS.items()
    for way in ({"foreach": True}, {"foreach": False}, {"maximize": True}, {"fused": True})
    if "fused" not in way or name in ("Adam", "AdamW", "SGD", "Adagrad")
]


@in_long_runs
@ranks(2)
def test_every_way_to_step_is_that_of_whole_tensors() -> None:
    for name, options in WAYS:
        kind = getattr(torch.optim, name)
        reference = DistributedDataParallel(build())
        model: Any = build()
        by_block()(OURS, model)
        optimizers = [kind(each.parameters(), **options) for each in (reference, model)]
        for step in range(2):
            for each, optimizer in zip((reference, model), optimizers, strict=True):
                forward_loss(each, step).backward()
                optimizer.step()
                optimizer.zero_grad()
        for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
            found = parameter.full_tensor()
            case = f"{name} {options} {(found - expected).abs().max()}"
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=case)


def outcome_of(api: Any, kind: Any, options: dict[str, Any]) -> Any:
    """The parameters after two steps, or the kind of error that there was."""
    model: Any = build()
    by_block()(api, model)
    optimizer = kind(model.parameters(), **options)
    try:
        for step in range(2):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = forward_loss(model, step)
                loss.backward()
                return loss

            optimizer.step(closure)
    except Exception as error:
        return type(error).__name__
    return [parameter.to_local() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("name", "options"), [("Adafactor", {"lr": 0.01}), ("LBFGS", {"lr": 0.1, "max_iter": 1})]
)
@ranks(2)
def test_optimizers_over_whole_parameters_do_what_they_do_under_torchs(
    name: str, options: dict[str, Any]
) -> None:
    kind = getattr(torch.optim, name)
    theirs, ours = outcome_of(THEIRS, kind, options), outcome_of(OURS, kind, options)
    if isinstance(theirs, str):
        assert ours == theirs
    else:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def _replace_state(optimizer: Any, step: int) -> None:
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    for key, value in state.items():
        if value is not None and key != "step":
            state[key] = value * 0.5


def _load_its_own_state(optimizer: Any, step: int) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _set(**options: Callable[[int], Any]) -> Callable[[Any, int], None]:
    def change(optimizer: Any, step: int) -> None:
        optimizer.param_groups[0].update({name: of(step) for name, of in options.items()})

    return change


#: What may change between two steps of an optimizer; the last one is for SGD.
CHANGES: dict[str, Callable[[Any, int], None]] = {
    "nothing": _set(),
    "weight decay": _set(weight_decay=lambda step: 0.1 * step),
    "direction": _set(maximize=lambda step: step % 2 == 0),
    "learning rate": _set(lr=lambda step: 0.05),
    "kind of learning rate": _set(lr=lambda step: torch.tensor(0.05)),
    "all state": _load_its_own_state,
    "some state": _replace_state,
    "momentum": _set(momentum=lambda step: 0.1 * (step % 3)),
}


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
@pytest.mark.parametrize("way", ["foreach", "fused", "alone"])
@ranks(2)
def test_whatever_changes_between_steps_local_tensors_are_stepped_as_plain_ones(
    name: str, way: str
) -> None:
    kind: Any = getattr(torch.optim, name)
    options: dict[str, Any] = {"lr": 0.1} if name == "SGD" else {"lr": 0.1, "eps": 1e-3}
    if way != "alone":
        options[way] = True
    model: Any = build()
    by_block()(OURS, model)
    params = list(model.parameters())
    plain = [nn.Parameter(p.to_local().detach().clone()) for p in params]
    aside = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    half = len(params) // 2
    optimizers = [
        kind([{"params": [*params[:half], aside[0]]}], **options),
        kind([{"params": [*plain[:half], aside[1]]}], **options),
    ]
    chance = random.Random(f"{name} {way} {dist.get_rank()}")

    for step in range(30):
        change = chance.choice([*CHANGES.values()] if name == "SGD" else [*CHANGES.values()][:-1])
        without = chance.sample(range(len(params)), 2 if step % 5 == 4 else 0)
        for optimizer, mine in zip(
            optimizers, ([*params, aside[0]], [*plain, aside[1]]), strict=True
        ):
            if step > 1:
                change(optimizer, step)
                if way == "foreach" and isinstance(optimizer.param_groups[0]["lr"], torch.Tensor):
                    optimizer.param_groups[0]["lr"] = 0.05
            if step == 12:
                optimizer.add_param_group({"params": mine[half:-1], "lr": 0.02})
            for place, parameter in enumerate(mine):
                values = torch.Generator().manual_seed(100 * step + place)
                local = getattr(parameter, "_local_tensor", parameter)
                gradient = torch.randn(local.shape, generator=values)
                if isinstance(parameter, DTensor):
                    gradient = DTensor(gradient, parameter._spec, requires_grad=False)
                parameter.grad = None if place in without else gradient
            optimizer.step()
        for one, other in zip([*params, aside[0]], [*plain, aside[1]], strict=True):
            assert torch.equal(getattr(one, "_local_tensor", one), other), step
    assert _numbers_in(optimizers[0]) == _numbers_in(optimizers[1])


def _numbers_in(optimizer: Any) -> list[Any]:
    groups = [p for group in optimizer.param_groups for p in group["params"]]
    return [
        value if value is None else getattr(value, "_local_tensor", value).tolist()
        for parameter in groups
        for value in optimizer.state[parameter].values()
    ]


@ranks(2)
def test_gradients_are_gone_when_nobody_but_the_optimizer_might_have_them() -> None:
    model: Any = build()
    by_block()(OURS, model)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        forward_loss(model, step).backward()
        gradients = [
            weakref.ref(p.grad._local_tensor.untyped_storage()) for p in model.parameters()
        ]
        optimizer.step()
        optimizer.zero_grad()
        assert not any(reference() for reference in gradients)


@ranks(2)
def test_what_an_optimizer_is_given_for_one_step_is_not_there_in_the_next() -> None:
    # As torch's GradScaler does with fused optimizers.
    model: Any = build()
    by_block()(OURS, model)
    plain = [nn.Parameter(p.to_local().detach().clone()) for p in model.parameters()]
    ours, theirs = (
        torch.optim.Adam(each, lr=0.1, eps=1e-3, fused=True) for each in (model.parameters(), plain)
    )
    for step in range(4):
        for parameter, other in zip(model.parameters(), plain, strict=True):
            other.grad = torch.full_like(other, 8.0 + step)
            parameter.grad = DTensor(other.grad.clone(), parameter._spec, requires_grad=False)
        for optimizer in (ours, theirs):
            if step % 2 == 0:
                optimizer.grad_scale = torch.tensor(8.0)  # type: ignore[attr-defined]
                optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
            optimizer.step()
            if step % 2 == 0:
                del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        assert not hasattr(ours, "grad_scale")
        for parameter, other in zip(model.parameters(), plain, strict=True):
            assert torch.equal(parameter.to_local(), other), step
