"""Optimizer state of models with everything that is difficult: who has what, by what name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.original.training import Block, Net, average_gradients, build, inputs, loss_of
from tests.state.models import Odd, copied, hybrid_groups, kind, wrapped
from tests.state.optimizers import (
    OPTIM_KINDS,
    adam,
    assert_close_optim_state,
    assert_same_optim_state,
    bare_reference,
    full_state,
    next_loss_and_step,
    optim_kind,
    state_by_names,
    trained,
)
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fullshard import CPUOffload, MixedPrecision, ShardingStrategy, StateDictType
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.testing import device, ranks, run_on_ranks

FULL_SHARD = ShardingStrategy.FULL_SHARD
BEFORE = range(2)
#: Frozen and trainable parameters in one unit are worth a warning.
pytestmark = pytest.mark.filterwarnings("ignore:.*has both parameters with requires_grad")


def round_trip(model: Any, name: str, optimizer: torch.optim.Optimizer, make: Any = adam) -> None:
    """Save and load; the state must be the same, and so must the next step."""
    weights, expected = copied(model.state_dict()), full_state(model, optimizer)
    with optim_kind(model, name):
        saved = FSDP.optim_state_dict(model, optimizer)
    losses = next_loss_and_step(model, optimizer, 2)
    model.load_state_dict(weights)
    loaded = make(model)
    with optim_kind(model, name):
        FSDP.optim_state_dict_to_load(model, loaded, saved, load_directly=True)
    assert_same_optim_state(full_state(model, loaded), expected)
    assert next_loss_and_step(model, loaded, 2) == losses


@pytest.mark.parametrize("strategy", [FULL_SHARD, ShardingStrategy.NO_SHARD])
@ranks(4)
def test_odd_parameters_have_the_state_they_have_in_the_bare_model(
    strategy: ShardingStrategy,
) -> None:
    _, _, reference = bare_reference(Odd, adam, BEFORE)
    model = wrapped(build(Odd), strategy, "blocks", use_orig_params=True)
    optimizer = adam(model)
    trained(model, optimizer, BEFORE)
    found = full_state(model, optimizer)
    # A parameter without elements has nothing that an optimizer could keep.
    for state in (found["state"], reference["state"]):
        state.pop("nothing", None)
    assert "frozen" not in found["state"]
    assert "tied.weight" not in found["state"]
    assert found["state"]["gain"]["exp_avg"].shape == ()
    assert found["state"]["conv.weight"]["exp_avg"].shape == (4, 3, 3, 3)
    assert_close_optim_state(found, reference)


@pytest.mark.parametrize("name", [name for name in OPTIM_KINDS if name != "local"])
@ranks(4)
def test_odd_parameters_move_between_sharded_and_whole(name: str) -> None:
    options = {"use_orig_params": True}
    source = wrapped(build(Odd), FULL_SHARD, "blocks", **options)
    optimizer = adam(source)
    trained(source, optimizer, BEFORE)
    expected = full_state(source, optimizer)
    with optim_kind(source, name):
        saved = FSDP.optim_state_dict(source, optimizer)
    for strategy in (ShardingStrategy.NO_SHARD, FULL_SHARD):
        target = wrapped(build(Odd), strategy, "one unit", **options)
        loaded = adam(target)
        with optim_kind(target, name):
            FSDP.optim_state_dict_to_load(target, loaded, saved, load_directly=True)
        assert_same_optim_state(full_state(target, loaded), expected)


@pytest.mark.parametrize("name", ["full", "sharded"])
@ranks(2)
def test_state_of_a_shared_parameter_is_found_under_any_of_its_names(name: str) -> None:
    model = wrapped(build(Odd), FULL_SHARD, "blocks", use_orig_params=True)
    optimizer = adam(model)
    trained(model, optimizer, BEFORE)
    expected = full_state(model, optimizer)
    with optim_kind(model, name):
        saved = FSDP.optim_state_dict(model, optimizer)
        saved["state"]["tied.weight"] = saved["state"].pop("embed.weight")
        names = saved["param_groups"][0]["params"]
        names[names.index("embed.weight")] = "tied.weight"
        loaded = adam(model)
        FSDP.optim_state_dict_to_load(model, loaded, saved, load_directly=True)
    assert_same_optim_state(full_state(model, loaded), expected)


class TwoDtypes(Net):
    """A frozen part, and one in another dtype, in the same unit as the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.head = self.head.to(torch.bfloat16)
        self.embed.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.to(torch.bfloat16)).float()


@pytest.mark.parametrize("name", OPTIM_KINDS)
@ranks(2)
def test_a_unit_of_several_dtypes_has_state_of_several(name: str) -> None:
    model = wrapped(build(TwoDtypes), FULL_SHARD, "one unit", use_orig_params=True)
    optimizer = adam(model)
    trained(model, optimizer, BEFORE)
    found = full_state(model, optimizer)["state"]
    assert not any(parameter.startswith("embed") for parameter in found)
    assert found["head.weight"]["exp_avg"].dtype == torch.bfloat16
    assert found["blocks.0.scale"]["exp_avg"].dtype == torch.float32
    round_trip(model, name, optimizer)


class Ignoring(Net):
    """A part that no unit is to manage."""

    def __init__(self) -> None:
        super().__init__()
        self.apart = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.apart(super().forward(x))


@pytest.mark.parametrize("name", OPTIM_KINDS)
@ranks(2)
def test_parameters_that_no_unit_manages_have_state_too(name: str) -> None:
    bare = build(Ignoring)
    model = FSDP(bare, ignored_modules=[bare.apart])
    optimizer = adam(model)
    loss_of(model, 0).backward()
    average_gradients(bare.apart)
    optimizer.step()
    assert list(full_state(model, optimizer)["state"])[-1].startswith("apart")
    expected = full_state(model, optimizer)
    with optim_kind(model, name):
        saved = FSDP.optim_state_dict(model, optimizer)
        if saved:
            assert type(saved["state"]["apart.weight"]["exp_avg"]) is torch.Tensor
        loaded = adam(model)
        FSDP.optim_state_dict_to_load(model, loaded, saved, load_directly=True)
    assert_same_optim_state(full_state(model, loaded), expected)


@pytest.mark.parametrize("name", OPTIM_KINDS)
@ranks(4)
def test_nested_units_may_have_other_settings(name: str) -> None:
    def build_model() -> FSDP:
        net = build(Net)
        net.blocks[0] = FSDP(net.blocks[0], sharding_strategy=ShardingStrategy.NO_SHARD)
        net.blocks[1] = FSDP(
            net.blocks[1],
            process_group=hybrid_groups(),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            use_orig_params=True,
        )
        net.blocks[2] = FSDP(net.blocks[2], sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
        return FSDP(net, use_orig_params=True)

    model = build_model()
    optimizer = adam(model)
    trained(model, optimizer, BEFORE)
    assert_close_optim_state(full_state(model, optimizer), bare_reference(Net, adam, BEFORE)[2])
    round_trip(model, name, optimizer)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("name", OPTIM_KINDS)
@ranks(2)
def test_offload_and_mixed_precision_change_nothing_about_state(
    name: str, use_orig_params: bool
) -> None:
    model = wrapped(
        build(Net),
        FULL_SHARD,
        "blocks",
        use_orig_params=use_orig_params,
        cpu_offload=CPUOffload(offload_params=True),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )
    optimizer = adam(model)
    trained(model, optimizer, BEFORE)
    assert full_state(model, optimizer)["state"]["embed.weight"]["exp_avg"].dtype == torch.float32
    round_trip(model, name, optimizer)


@ranks(2)
def test_state_is_asked_for_between_forward_and_backward_of_a_unit_that_stays_gathered() -> None:
    model = wrapped(build(Net), ShardingStrategy.SHARD_GRAD_OP, "blocks", use_orig_params=True)
    optimizer = adam(model)
    trained(model, optimizer, BEFORE)
    expected = full_state(model, optimizer)
    loss = loss_of(model, 2)
    assert_same_optim_state(full_state(model, optimizer), expected)
    with FSDP.summon_full_params(model):
        assert_same_optim_state(full_state(model, optimizer), expected)
    loss.backward()


@ranks(2)
def test_a_device_mesh_makes_dtensors_and_none_makes_sharded_tensors() -> None:
    mesh = init_device_mesh(device().type, (2,))
    for options, kinds in (({"device_mesh": mesh}, DTensor), ({}, ShardedTensor)):
        model = FSDP(build(Net), **options)
        optimizer = adam(model)
        trained(model, optimizer, BEFORE)
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = FSDP.optim_state_dict(model, optimizer)["state"]
        value = state["head.weight"]["exp_avg"]
        assert isinstance(value, kinds)
        if isinstance(value, DTensor):
            assert value.placements == (Shard(0),)
            assert value.shape == (3, 7)
            assert value.to_local().shape == ((2, 7) if dist.get_rank() == 0 else (1, 7))


@ranks(2)
def test_asking_for_dtensors_once_does_not_change_what_is_made_later() -> None:
    model = FSDP(build(Net))
    with kind(model, "dtensor"):
        assert isinstance(model.state_dict()["head.weight"], DTensor)
    with kind(model, "sharded"):
        assert isinstance(model.state_dict()["head.weight"], ShardedTensor)


@ranks(2)
def test_an_optimizer_that_was_never_stepped_has_groups_and_no_state() -> None:
    model = wrapped(build(Net), FULL_SHARD, "blocks")
    names = [name for name, _ in build(Net).named_parameters()]
    for name in ("full", "sharded"):
        with optim_kind(model, name):
            saved = FSDP.optim_state_dict(model, adam(model))
            assert saved["state"] == {}
            assert saved["param_groups"][0]["lr"] == 0.02
            assert sorted(saved["param_groups"][0]["params"]) == sorted(names)
            loaded = torch.optim.Adam(model.parameters(), lr=7)
            FSDP.optim_state_dict_to_load(model, loaded, saved, load_directly=True)
            assert not loaded.state
            assert loaded.param_groups[0]["lr"] == 0.02


@ranks(2)
def test_what_is_saved_does_not_change_with_the_optimizer_nor_share_its_memory() -> None:
    for use_orig_params in (False, True):
        for strategy in (FULL_SHARD, ShardingStrategy.NO_SHARD):
            model = wrapped(build(Net), strategy, "blocks", use_orig_params=use_orig_params)
            optimizer = adam(model)
            trained(model, optimizer, BEFORE)
            with optim_kind(model, "full"):
                saved = FSDP.optim_state_dict(model, optimizer)
                before = copy.deepcopy(saved)
                FSDP.optim_state_dict_to_load(model, optimizer, saved, load_directly=True)
            trained(model, optimizer, range(2, 4))
            assert_same_optim_state(saved, before)


class Partly(Net):
    """Uses its last block only when told to."""

    deep = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[1](self.blocks[0](self.embed(x)))
        return self.head(self.blocks[2](x) if self.deep else x)


@ranks(2)
def test_parameters_that_began_later_keep_their_own_count_of_steps() -> None:
    model = wrapped(build(Partly), FULL_SHARD, "one unit", use_orig_params=True)
    optimizer = adam(model)
    trained(model, optimizer, range(1))
    assert not any("blocks.2" in name for name in full_state(model, optimizer)["state"])
    model.module.deep = True
    trained(model, optimizer, range(1, 2))
    saved = full_state(model, optimizer)
    assert saved["state"]["blocks.2.scale"]["step"] == 1
    assert saved["state"]["blocks.1.scale"]["step"] == 2
    round_trip(model, "sharded", optimizer)
    flat = wrapped(build(Partly), FULL_SHARD, "one unit")
    with pytest.raises(RuntimeError, match=r"'step' is .*blocks\.2.* flat parameter _flat_param"):
        FSDP.optim_state_dict_to_load(flat, adam(flat), saved)


@ranks(2)
def test_one_of_two_optimizers_over_a_model_is_saved_alone() -> None:
    model = wrapped(build(Net), FULL_SHARD, "one unit", use_orig_params=True)
    head = [p for name, p in model.named_parameters() if name.startswith("head")]
    rest = [p for name, p in model.named_parameters() if not name.startswith("head")]
    optimizers = torch.optim.Adam(rest), torch.optim.SGD(head, lr=0.1, momentum=0.9)
    loss_of(model, 0).backward()
    for optimizer in optimizers:
        optimizer.step()
    found = full_state(model, optimizers[1])
    assert {*found["state"]} == {"head.weight", "head.bias"}
    assert found["param_groups"][0]["params"] == ["head.weight", "head.bias"]
    loaded = torch.optim.SGD(head, lr=0.3, momentum=0.1)
    FSDP.optim_state_dict_to_load(model, loaded, found, load_directly=True)
    assert loaded.param_groups[0]["momentum"] == 0.9
    assert_same_optim_state(full_state(model, loaded), found)


class Tower(nn.Module):
    """A module outside of all units, with units inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@ranks(2)
def test_the_model_may_be_a_module_around_units() -> None:
    bare = build(Tower)
    model = copy.deepcopy(bare)
    model.second = FSDP(model.second)
    for each in (bare, model):
        optimizer = adam(each)
        each(inputs(0)).square().mean().backward()
        average_gradients(each if each is bare else each.first)
        optimizer.step()
        if each is bare:
            expected = state_by_names(bare, optimizer)
        else:
            assert_close_optim_state(FSDP.optim_state_dict(model, optimizer), expected)


class Named(nn.Module):
    """Linears under the names given."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.children():
            x = module(x)
        return x


@pytest.mark.parametrize("name", OPTIM_KINDS)
@ranks(2)
def test_names_that_end_as_those_of_wrappers_do_are_whole(name: str) -> None:
    bare = build(lambda: Named("my_orig_mod", "my", "not_fsdp_wrapped_module"))
    model = wrapped(bare, FULL_SHARD, "one unit", use_orig_params=True)
    optimizer = adam(model)
    trained(model, optimizer, BEFORE)
    assert list(full_state(model, optimizer)["state"]) == list(dict(bare.named_parameters()))
    round_trip(model, name, optimizer)


@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_parameters_that_only_a_wrappers_prefix_tells_apart_are_refused(
    use_orig_params: bool,
) -> None:
    def make_model() -> nn.Module:
        bare = Named("a")
        bare.a._orig_mod = nn.Linear(5, 5)
        return bare

    model = wrapped(build(make_model), FULL_SHARD, "one unit", use_orig_params=use_orig_params)
    message = r"^a\._orig_mod\.weight and a\.weight are both 'a\.weight' in the state"
    with pytest.raises(ValueError, match=message):
        FSDP.optim_state_dict(model, adam(model))


class Scalars(nn.Module):
    """Parameters without dimensions, and no others."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(2.0))
        self.shift = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain + self.shift


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("kind_of", [torch.optim.Adam, torch.optim.NAdam, torch.optim.ASGD])
@pytest.mark.parametrize("size", [1, 2])
def test_numbers_of_an_optimizer_stay_numbers_where_all_parameters_are(
    size: int, kind_of: type[torch.optim.Optimizer], use_orig_params: bool
) -> None:
    run_on_ranks(size, resume_scalars, kind_of, use_orig_params)


def resume_scalars(kind_of: type[torch.optim.Optimizer], use_orig_params: bool) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return kind_of(model.parameters(), lr=0.02)  # type: ignore[call-arg]

    bare, bare_optimizer, reference = bare_reference(Scalars, make, BEFORE)
    model = wrapped(build(Scalars), FULL_SHARD, "one unit", use_orig_params=use_orig_params)
    optimizer = make(model)
    trained(model, optimizer, BEFORE)
    saved = full_state(model, optimizer)
    assert_close_optim_state(saved, reference)
    loaded = make(model)
    FSDP.optim_state_dict_to_load(model, loaded, saved, load_directly=True)
    assert_same_optim_state(full_state(model, loaded), saved)
    torch.testing.assert_close(
        next_loss_and_step(model, loaded, 2),
        next_loss_and_step(bare, bare_optimizer, 2, bare=True),
    )
