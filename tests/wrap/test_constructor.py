"""The constructor of the wrapper class: its arguments, and the module behind it."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from tests.wrap.wrapped import RankAndSize, linears, size_based
from torch import nn

from fullshard import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.testing import device, ranks
from fullshard.wrap import always_wrap_policy

# -- the module behind the wrapper --------------------------------------------------------------


def test_the_arguments_are_those_of_torch_in_the_same_order() -> None:
    def arguments(constructor: Any) -> dict[str, Any]:
        parameters = inspect.signature(constructor).parameters.values()
        return {p.name: p.default for p in parameters}

    ours = arguments(FSDP)
    expected = arguments(theirs.FullyShardedDataParallel)
    # What torch does not have comes last, and by name only.
    own = {name: ours.pop(name) for name in list(ours)[len(expected) :]}
    assert own == {"communication": None}
    parameter = inspect.signature(FSDP).parameters["communication"]
    assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
    assert list(ours) == list(expected)
    prefetch = ours.pop("backward_prefetch"), expected.pop("backward_prefetch")
    assert [each.name for each in prefetch] == ["BACKWARD_PRE"] * 2
    assert ours == expected


def test_the_wrapped_module_its_attributes_and_its_items_are_reached_through_the_wrapper() -> None:
    class Model(nn.Sequential):
        greeting = "hello"

        def shout(self) -> str:
            return self.greeting.upper()

    module = Model(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    module.note = {"kept": True}
    model = FSDP(module, process_group=RankAndSize())
    assert model.module is module
    assert model[0] is module[0]
    assert model[-1] is module[2]
    assert list(model[1:]) == [module[1], module[2]]
    assert model.note is module.note
    assert (model.greeting, model.shout()) == ("hello", "HELLO")
    assert model[2].out_features == 2


def test_a_name_that_the_wrapped_module_lacks_is_an_attribute_error() -> None:
    model = FSDP(nn.Linear(2, 2), process_group=RankAndSize())
    with pytest.raises(AttributeError, match=r"'Linear' object has no attribute 'nonsense'"):
        _ = model.nonsense
    assert not hasattr(model, "nonsense")
    with pytest.raises(TypeError, match="not subscriptable"):
        _ = model[0]


def test_attributes_set_on_the_wrapper_stay_there() -> None:
    model = FSDP(nn.Linear(2, 2), process_group=RankAndSize())
    model.step_count = 3
    assert model.step_count == 3
    assert not hasattr(model.module, "step_count")


def test_names_of_parameters_and_buffers_are_those_of_the_unwrapped_model() -> None:
    module = nn.Sequential(nn.Linear(2, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)))
    parameters = [name for name, _ in module.named_parameters()]
    buffers = [name for name, _ in module.named_buffers()]
    model = FSDP(
        module,
        process_group=RankAndSize(),
        auto_wrap_policy=always_wrap_policy,
        use_orig_params=True,
    )
    assert [name for name, _ in model.named_parameters()] == parameters
    assert [name for name, _ in model.named_buffers()] == buffers


def test_wrapping_a_unit_again_is_refused() -> None:
    unit = FSDP(nn.Linear(2, 2), process_group=RankAndSize())
    with pytest.raises(ValueError, match="wrapped already: it is a unit around Linear"):
        FSDP(unit, process_group=RankAndSize())


# -- options ------------------------------------------------------------------------------------


def test_the_defaults_are_full_sharding_in_full_precision_with_backward_prefetch() -> None:
    model = FSDP(linears(), process_group=RankAndSize())
    assert model.sharding_strategy is ShardingStrategy.FULL_SHARD
    assert model.mixed_precision == MixedPrecision()
    assert model.cpu_offload == CPUOffload(offload_params=False)
    assert model.backward_prefetch is BackwardPrefetch.BACKWARD_PRE
    assert (model.forward_prefetch, model.limit_all_gathers) == (False, True)
    assert not model._use_orig_params


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("prefetch", [*BackwardPrefetch, None])
@pytest.mark.parametrize("forward_prefetch", [False, True])
@pytest.mark.parametrize("strategy", list(ShardingStrategy)[:3])
def test_all_options_can_be_read_back_from_every_unit(
    strategy: ShardingStrategy,
    forward_prefetch: bool,
    prefetch: BackwardPrefetch | None,
    offload: bool,
) -> None:
    group, precision = RankAndSize(1, 3), MixedPrecision(torch.bfloat16, torch.float32)
    model = FSDP(
        linears(),
        group,
        strategy,
        CPUOffload(offload),
        size_based(0),
        prefetch,
        precision,
        forward_prefetch=forward_prefetch,
        limit_all_gathers=False,
        use_orig_params=True,
    )
    inner = model.module[2]
    for unit in [model[0], model[1], inner.module[0], inner.module[1], inner, model]:
        assert isinstance(unit, FSDP)
        assert unit.process_group is group
        assert (unit.rank, unit.world_size) == (1, 3)
        assert unit.sharding_strategy is strategy
        assert unit.cpu_offload == CPUOffload(offload)
        assert unit.backward_prefetch is prefetch
        assert unit.forward_prefetch is forward_prefetch
        assert unit.mixed_precision == precision
        assert unit.limit_all_gathers is False
        assert unit._use_orig_params is True


@pytest.mark.parametrize("strategy", [s.name for s in ShardingStrategy])
def test_every_strategy_of_torch_is_understood(strategy: str) -> None:
    group: Any = RankAndSize()
    if "HYBRID" in strategy:
        group = (group, RankAndSize())
    given = theirs.ShardingStrategy[strategy]
    model = FSDP(linears(), group, given, auto_wrap_policy=always_wrap_policy)
    for unit in FSDP.fsdp_modules(model):
        assert unit.sharding_strategy is ShardingStrategy[strategy]


def test_option_objects_of_torch_are_understood_and_become_ours() -> None:
    model = FSDP(
        linears(),
        RankAndSize(),
        cpu_offload=theirs.CPUOffload(offload_params=True),
        backward_prefetch=theirs.BackwardPrefetch.BACKWARD_POST,
        mixed_precision=theirs.MixedPrecision(
            param_dtype=torch.float16, reduce_dtype=torch.float32, cast_forward_inputs=True
        ),
        auto_wrap_policy=theirs.wrap.ModuleWrapPolicy({nn.Linear}),
    )
    units = FSDP.fsdp_modules(model)
    assert len(units) == 5
    for unit in units:
        assert unit.cpu_offload == CPUOffload(True)
        assert unit.backward_prefetch is BackwardPrefetch.BACKWARD_POST
        assert unit.mixed_precision == MixedPrecision(
            torch.float16, torch.float32, cast_forward_inputs=True
        )


@ranks(2)
def test_a_model_wrapped_with_options_of_torch_trains() -> None:
    torch.manual_seed(0)
    bare = linears().to(device())
    model = FSDP(
        copy.deepcopy(bare),
        sharding_strategy=theirs.ShardingStrategy.SHARD_GRAD_OP,
        backward_prefetch=theirs.BackwardPrefetch.BACKWARD_POST,
        auto_wrap_policy=theirs.wrap.ModuleWrapPolicy({nn.Linear}),
    )
    data = torch.randn(4, 5, device=device())
    for each in (bare, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(data).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(model(data), bare(data))


WRONG: list[tuple[str, Any, str]] = [
    ("sharding_strategy", "FULL_SHARD", "'FULL_SHARD' of type str"),
    ("sharding_strategy", 1, "1 of type int"),
    ("sharding_strategy", BackwardPrefetch.BACKWARD_PRE, "of type BackwardPrefetch"),
    ("backward_prefetch", "BACKWARD_PRE", "'BACKWARD_PRE' of type str"),
    ("backward_prefetch", False, "False of type bool"),
    ("mixed_precision", torch.bfloat16, "torch.bfloat16 of type dtype"),
    ("mixed_precision", {"param_dtype": torch.bfloat16}, "of type dict"),
    ("cpu_offload", True, "True of type bool"),
    ("auto_wrap_policy", nn.Linear, "the class Linear"),
    ("auto_wrap_policy", {nn.Linear}, "nn|torch"),
    ("ignored_modules", nn.Linear(1, 1), "a single Linear"),
    ("ignored_states", nn.Parameter(torch.ones(1)), "a single Parameter"),
    ("module", 3, "3"),
    ("module", nn.Linear, "Linear"),
    ("module", [nn.Linear(1, 1)], "Linear"),
    ("process_group", 3, "int"),
    ("process_group", [0, 1], "list"),
    ("device_mesh", 3, "int"),
    ("device_id", 1.5, "float"),
    ("device_id", ["cuda:0"], "cuda:0"),
]


@pytest.mark.parametrize(("argument", "given", "named"), WRONG)
def test_an_argument_of_the_wrong_kind_is_refused_with_one_clear_line(
    argument: str, given: Any, named: str
) -> None:
    arguments: dict[str, Any] = {"module": linears(), "process_group": RankAndSize()}
    if argument == "device_mesh":
        del arguments["process_group"]
    arguments[argument] = given
    with pytest.raises(TypeError, match=rf"^{argument} expects .* but got .*(?:{named})") as error:
        FSDP(**arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("nested", [False, True])
@ranks(2)
def test_a_device_is_named_by_a_string_as_by_an_object(nested: bool) -> None:
    # Programs write device_id=device.type.
    policy = size_based(10) if nested else None
    model = FSDP(linears(), auto_wrap_policy=policy, device_id=device().type)

    assert all(unit.compute_device.type == device().type for unit in FSDP.fsdp_modules(model))
    assert model(torch.ones(2, 5, device=device())).device.type == device().type


def test_a_string_that_names_no_device_is_refused_with_examples() -> None:
    with pytest.raises(ValueError, match=r"such as 'cuda', 'cuda:1' or 'cpu', but got 'gpu zero'"):
        FSDP(linears(), RankAndSize(), device_id="gpu zero")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator here")
def test_a_named_accelerator_that_is_not_there_is_refused() -> None:
    with pytest.raises(RuntimeError, match="device_id asks for cuda:1, but torch finds no cuda"):
        FSDP(linears(), RankAndSize(), device_id="cuda:1")


def test_an_unknown_argument_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="'shard_strategy'"):
        FSDP(linears(), RankAndSize(), shard_strategy=ShardingStrategy.NO_SHARD)  # type: ignore[call-arg]


def test_without_a_process_group_one_is_asked_for() -> None:
    if dist.is_initialized():
        pytest.skip("this process has a default process group")
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        FSDP(linears())


# -- process groups -----------------------------------------------------------------------------


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_an_object_with_rank_and_size_shards_for_its_rank(use_orig_params: bool) -> None:
    module = linears()
    weight = module[0].weight.detach().flatten().clone()
    model = FSDP(
        module,
        RankAndSize(1, 2),
        auto_wrap_policy=always_wrap_policy,
        use_orig_params=use_orig_params,
    )
    # 25 elements and 5: aligned, the bias begins at 28, and rank 1 owns 17 to 33.
    own = weight[17:] if use_orig_params else weight[15:]
    assert model.module[0]._flat_param is not None
    assert torch.equal(model.module[0]._flat_param[: own.numel()], own)


def test_an_object_of_size_one_is_not_sharded_and_warned_about() -> None:
    with pytest.warns(UserWarning, match="switching to use `NO_SHARD`"):
        layer = FSDP(nn.Linear(5, 5), process_group=RankAndSize(0, 1))
    assert layer.sharding_strategy is ShardingStrategy.NO_SHARD
    assert (layer.rank, layer.world_size) == (0, 1)


@ranks(3)
def test_a_group_of_some_ranks_shards_among_them() -> None:
    pair = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return
    torch.manual_seed(0)
    bare = nn.Linear(3, 3).to(device())
    model = FSDP(copy.deepcopy(bare), process_group=pair)
    assert model.process_group is pair
    assert (model.rank, model.world_size) == (dist.get_rank() // 2, 2)
    data = torch.ones(2, 3, device=device())
    torch.testing.assert_close(model(data), bare(data))


@ranks(2)
def test_a_device_mesh_gives_the_group() -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    model = FSDP(linears(), device_mesh=mesh, auto_wrap_policy=always_wrap_policy)
    for unit in FSDP.fsdp_modules(model):
        assert unit.process_group is mesh.get_group()
    with pytest.raises(ValueError, match="Cannot pass both process_group and device_mesh"):
        FSDP(linears(), process_group=dist.group.WORLD, device_mesh=mesh)


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@ranks(2)
def test_groups_that_do_not_fit_a_hybrid_strategy_are_refused_in_the_words_of_torch(
    strategy: str,
) -> None:
    hybrid = ShardingStrategy[strategy]
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    with pytest.raises(ValueError, match="Expected device_mesh to have ndim=2 but got 1"):
        FSDP(linears(), device_mesh=mesh, sharding_strategy=hybrid)
    given = r"passed in as either None or Tuple\[dist.ProcessGroup, dist.ProcessGroup\] but got"
    with pytest.raises(ValueError, match=given):
        FSDP(linears(), process_group=dist.group.WORLD, sharding_strategy=hybrid)


@ranks(2)
def test_module_states_of_the_first_rank_are_taken_over_by_every_unit() -> None:
    torch.manual_seed(dist.get_rank())
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(device())
    module[1].running_mean.fill_(dist.get_rank() + 1.0)
    torch.manual_seed(0)
    expected = nn.Linear(3, 3).to(device())
    model = FSDP(module, sync_module_states=True, auto_wrap_policy=always_wrap_policy)
    with FSDP.summon_full_params(model):
        assert torch.equal(model[0].weight, expected.weight)
    assert torch.equal(model[1].running_mean.cpu(), torch.ones(3))


@pytest.mark.parametrize("by_function", [False, True])
@ranks(2)
def test_a_model_on_the_meta_device_gets_its_values_at_construction(by_function: bool) -> None:
    with torch.device("meta"):
        module = linears()
    filled = []

    def fill(part: nn.Module) -> None:
        part.to_empty(device=device(), recurse=False)
        for parameter in part.parameters(recurse=False):
            nn.init.constant_(parameter, 0.5)
        filled.append(part)

    model = FSDP(
        module,
        auto_wrap_policy=size_based(40),
        param_init_fn=fill if by_function else None,
        device_id=device(),
        sync_module_states=True,
    )
    assert len(filled) == (4 if by_function else 0)
    with FSDP.summon_full_params(model):
        weights = [p.detach() for p in model.parameters()]
        assert len(weights) == 8
        assert all(w.device == device() and torch.isfinite(w).all() for w in weights)
        assert (max(w.max() for w in weights) == 0.5) == by_function
    assert torch.isfinite(model(torch.ones(2, 5, device=device()))).all()


def test_a_module_on_the_meta_device_without_a_way_to_initialise_it_is_named() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3, device="meta"))

    with pytest.raises(RuntimeError, match=r"Bare.* has parameters or buffers on the meta device"):
        FSDP(Bare(), RankAndSize())
