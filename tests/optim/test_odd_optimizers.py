"""Optimizers that are unlike torch's own: what they keep, read and expect; and what programs do."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tests.optim.training import (
    everything,
    full_values,
    muon,
    reference,
    train,
    whole,
    wrapped,
)
from tests.original.training import InPlace, build, train_step
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils._pytree import tree_leaves

import fullshard
from fullshard import RanksDisagreeError, ShardingStrategy
from fullshard.optim import optimizer as optimizer_module
from fullshard.testing import ranks
from fullshard.wrap import ModuleWrapPolicy

FULL_SHARD = ShardingStrategy.FULL_SHARD
EITHER = pytest.mark.parametrize("how", [FULL_SHARD, InPlace.RESHARD])


def other_owners(name: str, parameter: torch.Tensor) -> float:
    return float(sum(map(ord, name)) % 97)


class Odd(torch.optim.Optimizer):
    """Keeps numbers, lists, nested dicts, tensors of other shapes and dtypes, some of them late.

    It also keeps state of no parameter, and calls a method of its own that it keeps.
    """

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self._update = self._step_one

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        calls = self.state["calls"] + 1 if "calls" in self.state else 1
        self.state["calls"] = calls
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"] / calls)

    def _step_one(self, parameter: Any, lr: float) -> None:
        state = self.state[parameter]
        if not state:
            state["seen"], state["flag"] = 0, False
            state["count"] = torch.zeros((), dtype=torch.int64)
            state["history"] = torch.zeros(parameter.shape[0] + 3, device=parameter.device)
            state["nested"] = {"sums": [torch.zeros_like(parameter), 1.5, None], "table": {}}
            state["nested"]["table"]["values"] = torch.ones(100, device=parameter.device)
        state["seen"] += 1
        state["flag"] = not state["flag"]
        state["count"] += 1
        state["history"] += parameter.grad.norm()
        (total, *_), table = state["nested"]["sums"], state["nested"]["table"]["values"]
        total.add_(parameter.grad)
        table.mul_(0.9)
        update = total * table[0] * (0.5 if state["flag"] else 1.0) / state["seen"]
        if state["seen"] == 2:
            state["late"] = parameter.grad.clone()
        if "late" in state:
            update = update + state["late"] / (1 + state["history"][0])
        # Another tensor in place of the old one.
        parameter.data = parameter - lr * update


@EITHER
@ranks(3)
def test_state_of_any_form_is_stepped_saved_and_loaded_by_other_owners(how: Any) -> None:
    model = wrapped(how=how)
    optimizer = whole(Odd, model, None, select=everything)
    expected = reference(model, Odd, None, everything)
    train(model, optimizer, expected, range(3))

    saved = optimizer.state_dict()
    assert saved["state"]["calls"] == 3
    resumed = whole(Odd, model, None, select=everything, cost=other_owners)
    resumed.load_state_dict(saved)
    for loaded, given in zip(
        tree_leaves(resumed.state_dict()["state"]), tree_leaves(saved["state"]), strict=True
    ):
        if isinstance(given, torch.Tensor):
            # As torch's own optimizers do, it takes state to the device of its parameters.
            assert torch.equal(_local(loaded), _local(given).to(_local(loaded)))
        else:
            assert loaded == given
    train(model, resumed, expected, range(3, 5))


def _local(tensor: Any) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


class Decaying(torch.optim.Optimizer):
    """Looks at every parameter, and takes it that every parameter has a gradient."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.99).sub_(parameter.grad, alpha=group["lr"])


@EITHER
@ranks(3)
def test_an_optimizer_sees_only_the_parameters_that_are_there(how: Any) -> None:
    model = wrapped(how=how)
    with patch.object(optimizer_module, "_ROUND_NUMEL", 1):
        optimizer = whole(Decaying, model)
    train(model, optimizer, reference(model, Decaying), range(3))


class SlowWeights(torch.optim.SGD):
    """Copies the parameters when it is made."""

    def __init__(self, params: Any) -> None:
        given = list(params)
        super().__init__(given, lr=0.1)
        self.slow = [parameter.detach().clone() for parameter in given]


class Remembering(torch.optim.SGD):
    """Writes to parameters of its own list, which other ranks may own."""

    def __init__(self, params: Any) -> None:
        self.all = list(params)
        super().__init__(self.all, lr=0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.all:
            parameter.mul_(0.99)


@ranks(2)
def test_reading_values_that_are_not_there_is_an_error() -> None:
    model = wrapped()
    with pytest.raises(
        RuntimeError, match=r"parameter blocks\.0\.up\.weight were read .* by aten\.clone"
    ):
        whole(SlowWeights, model)
    optimizer = whole(Remembering, model)
    train_step(model, 0)
    with pytest.raises(RuntimeError, match="single memory location"):
        optimizer.step()


class Vectors(nn.Module):
    """A piece of the norm's weight has 4 elements, on each of two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm = nn.Linear(5, 8), nn.LayerNorm(8, bias=False)
        self.out = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.into(x)))


class Tabled(torch.optim.SGD):
    """Keeps a table of 4 values, which may have the shape of a piece by accident."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["table"] = torch.arange(4.0)


@EITHER
@ranks(2)
def test_a_tensor_that_has_a_pieces_shape_by_accident_is_not_taken_for_one(how: Any) -> None:
    model = wrapped(build(Vectors), how, auto_wrap_policy=ModuleWrapPolicy({nn.LayerNorm}))
    options: dict[str, Any] = {"select": everything}
    optimizer = whole(lambda ps: Tabled(ps, 0.1, 0.9), model, None, **options)
    train_step(model, 0)
    optimizer.step()
    resumed = whole(lambda ps: Tabled(ps, 0.1, 0.9), model, None, cost=other_owners, **options)
    resumed.load_state_dict(optimizer.state_dict())

    owned = [state for state in resumed.state.values() if state]
    told: list[Any] = [None, None]
    dist.all_gather_object(told, [state["table"].tolist() for state in owned])
    assert told[0] + told[1] == [[0, 1, 2, 3]] * 5


# -- what programs do -----------------------------------------------------------------------------


@EITHER
@ranks(2)
def test_a_learning_rate_in_a_tensor_reaches_all_rounds_also_after_loading(how: Any) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=torch.tensor(0.01), foreach=False)

    model = wrapped(how=how)
    with patch.object(optimizer_module, "_ROUND_NUMEL", 1):
        optimizer = whole(make, model)
    expected = reference(model, make)
    train(model, optimizer, expected, range(2))
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    both = (optimizer, *expected.optimizers)
    schedulers = [ExponentialLR(each, 0.5) for each in both]
    for step in range(2, 5):
        train(model, optimizer, expected, range(step, step + 1))
        for scheduler in schedulers:
            scheduler.step()
    assert float(saved["param_groups"][0]["lr"]) == pytest.approx(0.01), "what was given is copied"


@ranks(2)
def test_hooks_of_steps_and_state_dicts_are_called() -> None:
    model = wrapped()
    optimizer = whole(muon, model)
    seen: list[str] = []

    def add(found: Any) -> Any:
        seen.append("saved")
        return {**found, "extra": 1}

    optimizer.register_step_pre_hook(lambda *_: seen.append("step"))
    optimizer.register_step_post_hook(lambda *_: seen.append("stepped"))
    optimizer.register_state_dict_pre_hook(lambda _: seen.append("save"))
    optimizer.register_state_dict_post_hook(lambda _, found: add(found))
    optimizer.register_load_state_dict_pre_hook(lambda *_: seen.append("load"))
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    train_step(model, 0)
    optimizer.step()
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)

    assert saved["extra"] == 1
    assert seen == ["step", "stepped", "save", "saved", "load", "loaded"]


@EITHER
@ranks(2)
def test_state_is_forgotten_by_assigning_none_of_it(how: Any) -> None:
    model = wrapped(how=how)
    optimizer = whole(muon, model)
    expected = reference(model, muon)
    train(model, optimizer, expected, range(2))
    with pytest.raises(RuntimeError, match="cannot be replaced by other state"):
        optimizer.state = optimizer.state
    for each in (optimizer, *expected.optimizers):
        each.state = defaultdict(dict)
    assert not optimizer.state
    train(model, optimizer, expected, range(2, 4))


@ranks(2)
def test_a_state_dict_of_no_steps_is_loaded_as_no_state() -> None:
    """Accelerate does so with every optimizer, and torch's functions look whether there is any."""
    model = wrapped(how=InPlace.RESHARD)
    optimizer = whole(muon, model)
    optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer.state
    expected = reference(model, muon)
    train(model, optimizer, expected, range(2))
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    resumed = whole(muon, model, cost=other_owners)
    resumed.load_state_dict(resumed.state_dict())
    set_optimizer_state_dict(model, resumed, saved)
    train(model, resumed, expected, range(2, 4))


@EITHER
@ranks(2)
def test_a_model_converted_after_its_optimizer_was_made_is_refused(how: Any) -> None:
    model = wrapped(how=how)
    optimizer = whole(muon, model)
    model.double()
    model(torch.randn(4, 5, dtype=torch.float64)).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"blocks\.0\.\S+ was torch.float32 on .* torch.float64"):
        optimizer.step()


@EITHER
@ranks(2)
def test_a_step_of_summoned_parameters_is_refused(how: Any) -> None:
    model = wrapped(how=how)
    optimizer = whole(muon, model)
    train_step(model, 0)
    before = full_values(model)
    with (
        fullshard.summon_full_params(model),
        pytest.raises(
            RuntimeError, match=r"values of blocks\.0\.\S+ are those of summon_full_params"
        ),
    ):
        optimizer.step()
    for name, (value, _) in full_values(model).items():
        assert torch.equal(value, before[name][0])


@ranks(2)
def test_parameters_that_were_replaced_are_not_left_out_in_silence() -> None:
    model = wrapped(how=InPlace.RESHARD)
    optimizer = whole(muon, model)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    train_step(model, 0)
    with pytest.raises(RuntimeError, match=r"blocks\.0\.up\.weight is another object than when"):
        optimizer.step()


class Failing(torch.optim.Muon):
    """Raises while it is told to."""

    fails = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if Failing.fails:
            raise ZeroDivisionError
        super().step()


@EITHER
@ranks(2)
def test_a_step_that_fails_on_all_ranks_may_be_followed_by_others(how: Any) -> None:
    model = wrapped(how=how)
    with patch.object(optimizer_module, "_ROUND_NUMEL", 1):
        optimizer = whole(Failing, model)
    train_step(model, 0)
    optimizer.step()
    before = full_values(model)
    Failing.fails = True
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
    Failing.fails = False
    for name, (value, _) in full_values(model).items():
        if "blocks" in name and value.dim() == 2:
            assert torch.equal(value, before[name][0])
    # The second optimizer was not to blame, and has stepped.
    optimizer.state = defaultdict(dict)
    expected = reference(model, torch.optim.Muon)
    with torch.no_grad():
        for name, (value, _) in full_values(model).items():
            expected.parameters[name].copy_(value)
    train(model, optimizer, expected, range(1, 3))


@ranks(2)
def test_an_owner_whose_step_fails_alone_is_told_of_on_all_ranks() -> None:
    model = wrapped(process_group=dist.new_group([0, 1]))
    optimizer = whole(Failing, model)
    train_step(model, 0)
    Failing.fails = dist.get_rank() == 1
    with pytest.raises((ZeroDivisionError, RanksDisagreeError)) as told:
        optimizer.step()
    assert (told.type is ZeroDivisionError) == (dist.get_rank() == 1)
    if dist.get_rank() == 1:
        with pytest.raises(RanksDisagreeError):
            train_step(model, 1)
