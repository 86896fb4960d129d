"""State of any optimizer goes from the sharded model to the bare one and back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.original.training import Net, build
from tests.state.models import copied, wrapped
from tests.state.optimizers import (
    assert_close_optim_state,
    assert_same_optim_state,
    bare_reference,
    full_state,
    next_loss_and_step,
    optim_kind,
    state_by_names,
    trained,
)
from tests.state.test_checkpoints import shared_folder
from torch import nn, optim

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import OptimStateKeyType, ShardingStrategy
from fullshard.state.optim.load import equal
from fullshard.testing import device, ranks

BEFORE = range(2)
FULL_SHARD = ShardingStrategy.FULL_SHARD


def of(kind: type[optim.Optimizer], **options: Any) -> Callable[[nn.Module], optim.Optimizer]:
    return lambda model: kind(model.parameters(), **options)


OPTIMIZERS = {
    "SGD": of(optim.SGD, lr=0.02),
    "SGD with momentum": of(optim.SGD, lr=0.02, momentum=0.9, nesterov=True),
    "Adam": of(optim.Adam, lr=0.02),
    "Adam foreach": of(optim.Adam, lr=0.02, foreach=True),
    "Adam fused": of(optim.Adam, lr=0.02, fused=True),
    "AdamW amsgrad": of(optim.AdamW, lr=0.02, amsgrad=True),
    "Adagrad": of(optim.Adagrad, lr=0.02, initial_accumulator_value=0.5),
    "Adadelta": of(optim.Adadelta, lr=0.2),
    "RMSprop": of(optim.RMSprop, lr=0.002, centered=True, momentum=0.5),
    "Rprop": of(optim.Rprop, lr=0.002),
    "NAdam": of(optim.NAdam, lr=0.02),
    "RAdam": of(optim.RAdam, lr=0.02),
    "Adamax": of(optim.Adamax, lr=0.02),
    "ASGD": of(optim.ASGD, lr=0.02, t0=1),
}
if device().type == "cuda":
    OPTIMIZERS["Adam capturable"] = of(optim.Adam, lr=0.02, capturable=True)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
@ranks(2)
def test_state_goes_to_the_bare_model_and_back(name: str, use_orig_params: bool) -> None:
    make = OPTIMIZERS[name]
    bare, bare_optimizer, reference = bare_reference(Net, make, BEFORE)
    model = wrapped(build(Net), FULL_SHARD, "blocks", use_orig_params=use_orig_params)
    optimizer = make(model)
    trained(model, optimizer, BEFORE)
    full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    assert_close_optim_state(full, reference)

    by_id = FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, build(Net))
    stranger_model = build(Net)
    stranger = make(stranger_model)
    stranger.load_state_dict(by_id)
    assert_same_optim_state(state_by_names(stranger_model, stranger), full)

    own = bare_optimizer.state_dict()
    by_name = FSDP.rekey_optim_state_dict(own, OptimStateKeyType.PARAM_NAME, bare)
    target = wrapped(bare, FULL_SHARD, "linears", use_orig_params=use_orig_params)
    loaded = make(target)
    loaded.load_state_dict(FSDP.shard_full_optim_state_dict(by_name, target, optim=loaded))
    assert_same_optim_state(full_state(target, loaded), reference)
    torch.testing.assert_close(
        next_loss_and_step(target, loaded, 2),
        next_loss_and_step(bare, bare_optimizer, 2, bare=True),
    )


class Peculiar(optim.Optimizer):
    """Keeps what no other optimizer does: words, lists, a common history, a number in float64."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "schedule": {"warm": [1, 2]}})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["calls"] = 0
                    state["phase"] = "warm"
                    state["history"] = torch.zeros(4)
                    state["exact"] = torch.tensor(1 / 3, dtype=torch.float64)
                    state["signs"] = torch.zeros_like(parameter, dtype=torch.bool)
                    state["sum"] = torch.zeros_like(parameter, dtype=torch.float64)
                    state["nested"] = {"lrs": [], "last": None, "scale": torch.tensor([0.5, 2])}
                state["history"][state["calls"]] = state["calls"] + 0.5
                state["calls"] += 1
                state["nested"]["lrs"].append(group["lr"])
                state["signs"].copy_(parameter.grad > 0)
                state["sum"] += parameter.grad
                parameter -= group["lr"] * state["sum"].to(parameter.dtype)


@pytest.mark.parametrize("kind", ["full", "full on the first rank", "sharded", "local"])
@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(4)
def test_state_that_is_not_shaped_like_parameters_is_kept(kind: str, use_orig_params: bool) -> None:
    make = of(Peculiar)
    _, _, reference = bare_reference(Net, make, BEFORE)
    model = wrapped(build(Net), FULL_SHARD, "blocks", use_orig_params=use_orig_params)
    optimizer = make(model)
    trained(model, optimizer, BEFORE)
    expected = full_state(model, optimizer)
    for name, state in reference["state"].items():
        found = expected["state"][name]
        assert found.keys() == state.keys()
        assert torch.equal(found["signs"], state["signs"])
        assert found["phase"] == "warm"
        assert torch.equal(found["history"], state["history"])
        assert equal(found["nested"], state["nested"])
        assert found["exact"] == state["exact"]
        assert found["sum"].dtype == torch.float64
        torch.testing.assert_close(found["sum"], state["sum"], rtol=1e-5, atol=1e-6)
    weights = copied(model.state_dict())
    with optim_kind(model, kind):
        saved = FSDP.optim_state_dict(model, optimizer)
    losses = next_loss_and_step(model, optimizer, 2)
    model.load_state_dict(weights)
    loaded = make(model)
    with optim_kind(model, kind):
        loaded_state = FSDP.optim_state_dict_to_load(model, loaded, saved)
    for state in loaded_state["state"].values():
        assert state["sum"].dtype == torch.float64  # Optimizers cast it when they load.
    loaded.load_state_dict(loaded_state)
    cast = full_state(model, loaded)
    for name, state in expected["state"].items():
        assert equal(cast["state"][name]["nested"], state["nested"])
        assert torch.equal(cast["state"][name]["sum"], state["sum"].float())
    torch.testing.assert_close(next_loss_and_step(model, loaded, 2), losses)


class Factored(optim.Optimizer):
    """Keeps one number for each half of what a rank holds: it belongs to that rank's piece."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                halves = torch.tensor_split(parameter.grad.reshape(-1), 2)
                self.state[parameter]["norms"] = torch.stack([half.norm() for half in halves])


@ranks(2)
def test_state_of_a_rank_s_own_piece_is_refused_and_saved_locally() -> None:
    model = wrapped(build(Net), FULL_SHARD, "one unit")
    optimizer = Factored(model.parameters())
    trained(model, optimizer, BEFORE)
    message = "'norms' of parameter _flat_param differs between rank 0"
    with pytest.raises(RuntimeError, match=message):
        FSDP.optim_state_dict(model, optimizer)
    with optim_kind(model, "local"):
        saved = FSDP.optim_state_dict(model, optimizer)
        loaded = Factored(model.parameters())
        FSDP.optim_state_dict_to_load(model, loaded, saved, load_directly=True)
    (mine,), (found,) = optimizer.state.values(), loaded.state.values()
    assert torch.equal(mine["norms"], found["norms"])


class Wrapping(optim.Optimizer):
    """Keeps a value per element in a dict of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.state[parameter]["inner"] = {"last": parameter.grad.clone()}


@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_values_per_element_inside_of_a_dict_are_refused_and_saved_locally(
    use_orig_params: bool,
) -> None:
    model = wrapped(build(Net), FULL_SHARD, "blocks", use_orig_params=use_orig_params)
    optimizer = Wrapping(model.parameters())
    trained(model, optimizer, BEFORE)
    with pytest.raises(RuntimeError, match=r"'inner' of parameter .* Save this state with LOCAL"):
        FSDP.optim_state_dict(model, optimizer)
    with optim_kind(model, "local"):
        saved = FSDP.optim_state_dict(model, optimizer)
    assert len(saved["state"]) == len(optimizer.state)


class Mixed(optim.Optimizer):
    """Keeps a value per element, or, in groups with a ``size``, that many for each parameter."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"size": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                mine = torch.arange(parameter.numel()) + 100.0 * dist.get_rank()
                common = torch.arange(group["size"]) + 0.5
                self.state[parameter]["v"] = (common if group["size"] else mine).to(device())


def squares() -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))


def mixed(model: nn.Module, sizes: list[int]) -> tuple[optim.Optimizer, optim.Optimizer]:
    """Optimizers with these sizes for the model's parameters, the first one stepped."""
    model(torch.ones(2, 4, device=device())).sum().backward()
    groups = [
        {"params": [parameter], "size": size}
        for parameter, size in zip(model.parameters(), sizes, strict=True)
    ]
    stepped, fresh = (Mixed([dict(group) for group in groups]) for _ in range(2))
    stepped.step()
    return stepped, fresh


@pytest.mark.parametrize("kind", ["full", "full on the first rank", "sharded"])
@pytest.mark.parametrize(
    ("wrapping", "sizes", "message"),
    [
        ("linears", [0, 1, 1, 1], r"'v' of parameter 0\.weight differs between rank 0 \(\(8,\)"),
        ("linears", [0, 8, 5, 5], r"'v' of parameter 0\.weight differs between rank 0 \(\(8,\)"),
        ("one unit", [0, 1, 1, 1], r"'v' of parameter 0\.weight has one value per .*\(1,\)"),
        ("one unit", [1, 0, 0, 0], r"'v' of parameter 1\.weight has one value per .*\(1,\)"),
        ("one unit", [3, 0, 0, 0], r"'v' of parameter 1\.weight has one value per .*\(3,\)"),
    ],
)
@ranks(2)
def test_state_of_one_name_with_a_value_per_element_here_and_not_there_is_refused(
    kind: str, wrapping: str, sizes: list[int], message: str
) -> None:
    model = wrapped(build(squares), FULL_SHARD, wrapping, use_orig_params=True)
    optimizer, _ = mixed(model, sizes)
    with optim_kind(model, kind), pytest.raises(RuntimeError, match=message):
        FSDP.optim_state_dict(model, optimizer)
    with optim_kind(model, "local"):
        assert len(FSDP.optim_state_dict(model, optimizer)["state"]) == len(optimizer.state)


@pytest.mark.parametrize("kind", ["full", "full on the first rank", "sharded", "dtensor"])
@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_state_that_fits_by_accident_is_kept_where_it_is_the_same_on_all_ranks(
    use_orig_params: bool, kind: str
) -> None:
    model = wrapped(build(squares), FULL_SHARD, "linears", use_orig_params=use_orig_params)
    optimizer, fresh = mixed(model, [8, 5, 16, 5])
    with optim_kind(model, kind):
        saved = FSDP.optim_state_dict(model, optimizer)
        FSDP.optim_state_dict_to_load(model, fresh, saved, load_directly=True)
    assert fresh.state.keys() == optimizer.state.keys()
    for parameter, state in optimizer.state.items():
        assert torch.equal(fresh.state[parameter]["v"], state["v"])


@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_lbfgs_over_shards_is_refused_and_saved_locally(use_orig_params: bool) -> None:
    model = wrapped(build(squares), FULL_SHARD, "one unit", use_orig_params=use_orig_params)
    inputs = torch.randn(2, 4, device=device())
    optimizer = optim.LBFGS(model.parameters(), lr=0.1, max_iter=5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(inputs) - 1).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    for kind in ("full", "full on the first rank", "sharded"):
        with optim_kind(model, kind), pytest.raises(RuntimeError, match="differs between rank 0"):
            FSDP.optim_state_dict(model, optimizer)
    with optim_kind(model, "local"):
        assert len(FSDP.optim_state_dict(model, optimizer)["state"]) == 1


class Eager(Peculiar):
    """Makes state of all parameters ahead, also of those that a rank has no part of."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = torch.zeros_like(parameter)
        self.step()
        for parameter, state in self.state.items():
            parameter.grad = None
            state["calls"] = 0
            state["nested"]["lrs"].clear()


@ranks(4)
def test_state_that_was_made_ahead_and_never_updated_does_not_count() -> None:
    model = wrapped(build(Net), FULL_SHARD, "one unit", use_orig_params=True)
    optimizer = Eager(model.parameters())
    trained(model, optimizer, BEFORE)
    found = full_state(model, optimizer)["state"]
    assert {state["calls"] for state in found.values()} == {len(BEFORE)}


@pytest.mark.parametrize("kind", ["full", "full on the first rank", "sharded", "dtensor"])
@ranks(2)
def test_factors_that_have_their_parameters_shape_by_accident_are_whole(kind: str) -> None:
    def make_model() -> nn.Module:
        return nn.Sequential(nn.Linear(1, 8), nn.Linear(8, 8), nn.Linear(8, 4))

    def step(optimizer: optim.Optimizer) -> None:
        model(torch.ones(2, 1, device=device())).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model = wrapped(build(make_model), ShardingStrategy.NO_SHARD, "one unit", use_orig_params=True)
    optimizer, loaded = (optim.Adafactor(model.parameters()) for _ in range(2))
    step(optimizer)
    expected = full_state(model, optimizer)
    with optim_kind(model, kind):
        saved = FSDP.optim_state_dict(model, optimizer)
        FSDP.optim_state_dict_to_load(model, loaded, saved, load_directly=True)
    assert_same_optim_state(full_state(model, loaded), expected)
    step(loaded)


@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_a_history_that_has_a_parameters_shape_by_accident_is_whole_in_checkpoints(
    tmp_path: Path, use_orig_params: bool
) -> None:
    def make_model() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(3, 3))

    folder = shared_folder(tmp_path)
    model = wrapped(build(make_model), FULL_SHARD, "linears", use_orig_params=use_orig_params)
    optimizer, loaded = (Peculiar(model.parameters()) for _ in range(2))
    trained(model, optimizer, BEFORE)
    expected = full_state(model, optimizer)["state"]
    assert expected["0.bias"]["history"].shape == (4,)
    fullshard.save(folder, model, optimizer)
    fullshard.load(folder, model, loaded)
    for name, state in full_state(model, loaded)["state"].items():
        # On a GPU, too, it was kept on the host; torch's optimizers load to where parameters are.
        assert torch.equal(state["history"].cpu(), expected[name]["history"].cpu())


@ranks(2)
def test_lbfgs_resumes_where_every_rank_has_everything() -> None:
    make = of(functools.partial(optim.LBFGS, lr=0.1, max_iter=2))
    model = wrapped(build(Net), ShardingStrategy.NO_SHARD, "blocks", use_orig_params=True)

    def steps(optimizer: optim.Optimizer) -> list[float]:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 5, device=device())).square().mean()
            loss.backward()
            return loss

        return [float(optimizer.step(closure)) for _ in range(2)]

    optimizer = make(model)
    steps(optimizer)
    weights, saved = copied(model.state_dict()), full_state(model, optimizer)
    expected = steps(optimizer)
    model.load_state_dict(weights)
    loaded = make(model)
    FSDP.optim_state_dict_to_load(model, loaded, saved, load_directly=True)
    assert steps(loaded) == expected
