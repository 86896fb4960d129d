"""Private functions of torch's FSDP that programs call answer about fullshard's wrappers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from tests.compat.installed import installed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import FlatParameter, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from fullshard.engine.params import handle as flat_param
from fullshard.testing import device, ranks


def build(use_orig_params: bool = False) -> FullyShardedDataParallel:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5)).to(device())
    model[2] = FullyShardedDataParallel(model[2], use_orig_params=use_orig_params)
    return FullyShardedDataParallel(model, use_orig_params=use_orig_params)


@ranks(2)
def test_units_and_handles_are_found() -> None:
    with installed():
        from torch.distributed.fsdp import _common_utils, _runtime_utils, _traversal_utils

        model = build()
        units = FullyShardedDataParallel.fsdp_modules(model)
        handles = _traversal_utils._get_fsdp_handles(model)

        assert handles == [unit._handle for unit in units]
        assert _traversal_utils._get_fsdp_states(model) == units
        assert _traversal_utils._get_fsdp_states_with_modules(model) == (units, units)
        assert _runtime_utils._get_fsdp_root_states(model) == [model]
        assert _runtime_utils._get_fsdp_root_states_with_modules(model) == ([model], [model])
        assert _common_utils._get_module_fsdp_state(model) is model
        assert _common_utils._get_module_fsdp_state(model.module) is None
        assert isinstance(model, _common_utils._FSDPState)
        assert _common_utils._module_handle(model, model) is model._handle
        assert _common_utils._has_fsdp_params(model, model)
        assert not _common_utils._is_composable(model)
        strategy = _common_utils._get_sharding_strategy(model._handle)
        assert strategy is ShardingStrategy.FULL_SHARD
        assert _common_utils._get_sharding_strategy(None) is None


@ranks(2)
def test_names_of_flattened_parameters_are_those_of_the_unwrapped_model() -> None:
    expected = [["0.weight", "0.bias"], ["2.weight", "2.bias"]]
    with installed():
        from torch.distributed.fsdp import _common_utils, _runtime_utils

        model = build()
        _runtime_utils._lazy_init(model, model)
        names = _common_utils._get_param_to_fqns(model)
        assert list(names.values()) == expected
        assert all(isinstance(parameter, FlatParameter) for parameter in names)
        assert all(map(_common_utils._is_fsdp_flattened, names))
        assert not _common_utils._is_fsdp_flattened(torch.rand(2))
        for unit, known in zip(FullyShardedDataParallel.fsdp_modules(model), expected, strict=True):
            assert _common_utils._get_handle_fqns_from_root(unit, unit._handle) == known

        original = _common_utils._get_param_to_fqns(build(use_orig_params=True))
        assert list(original.values()) == [[name] for names in expected for name in names]


@ranks(2)
def test_every_name_of_a_shared_parameter_is_given_on_demand() -> None:
    with installed():
        from torch.distributed.fsdp import _common_utils

        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        model[1].weight = model[0].weight
        once = _common_utils._get_param_to_fqns(model)
        every = _common_utils._get_param_to_fqns(model, dedup_shared_params=False)

    assert list(once.values()) == [["0.weight"]]
    assert list(every.values()) == [["0.weight", "1.weight"]]


@ranks(2)
def test_full_parameters_are_shown_through_the_private_contexts() -> None:
    with installed():
        from torch.distributed.fsdp import _runtime_utils, _unshard_param_utils
        from torch.distributed.fsdp._common_utils import TrainingState

        model = build()
        assert _runtime_utils._is_fsdp_root(model, model)
        assert not _runtime_utils._is_fsdp_root(model.module[2], model.module[2])
        options = {
            "writeback": True,
            "rank0_only": False,
            "offload_to_cpu": False,
            "with_grads": False,
        }
        with _unshard_param_utils._unshard_params(model, recurse=True, **options):
            assert model.module[0].weight.shape == (4, 3)
            assert model.module[2].module.weight.shape == (5, 4)
            model._assert_state(TrainingState.SUMMON_FULL_PARAMS)
        with _unshard_param_utils._unshard_fsdp_state_params(model, model, **options):
            assert model.module[0].weight.shape == (4, 3)
            assert model.module[2].training_state is TrainingState.IDLE
        model._assert_state([TrainingState.IDLE])


@ranks(2)
def test_a_unit_tells_the_type_of_its_state_dicts_and_its_ranks() -> None:
    model = build()
    kind = fullshard.StateDictType.SHARDED_STATE_DICT
    with FullyShardedDataParallel.state_dict_type(model, kind):
        for unit in FullyShardedDataParallel.fsdp_modules(model):
            assert unit._state_dict_type is kind
            assert unit._state_dict_config == fullshard.ShardedStateDictConfig()
            assert unit._optim_state_dict_config == fullshard.ShardedOptimStateDictConfig()
    assert model._state_dict_type is fullshard.StateDictType.FULL_STATE_DICT
    assert model._inter_node_pg is model._device_mesh is None

    mesh = init_device_mesh(device().type, (1, 2), mesh_dim_names=("copies", "shards"))
    hybrid = FullyShardedDataParallel(
        nn.Linear(3, 4).to(device()),
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
    )
    assert hybrid._device_mesh is mesh
    assert hybrid._inter_node_pg is mesh.get_group("copies")


@ranks(2)
def test_units_tell_their_handles_their_hook_and_whether_they_synchronize() -> None:
    def hook(state: object, gradient: torch.Tensor, shard: torch.Tensor) -> None: ...

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(flat_param._FSDP_USE_FULL_PREC_IN_EVAL, "1")
        model, state = build(), object()
    units = FullyShardedDataParallel.fsdp_modules(model)

    assert model._all_handles == [unit._handle for unit in units]
    assert {(unit._comm_hook, unit._comm_hook_state) for unit in units} == {(None, None)}
    assert all(unit._use_full_prec_in_eval and unit._sync_gradients for unit in units)
    with model.no_sync():
        assert not any(unit._sync_gradients for unit in units)
    model.register_comm_hook(state, hook)
    assert {(unit._comm_hook, unit._comm_hook_state) for unit in units} == {(hook, state)}


@ranks(2)
def test_a_unit_tells_that_it_is_in_the_middle_of_a_step() -> None:
    seen = []

    class Asks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(model.training_state)
            return super().forward(x)

    model = FullyShardedDataParallel(Asks(2, 2).to(device()))
    model(torch.rand(1, 2, device=device())).sum().backward()

    assert [state.name for state in seen] == ["FORWARD_BACKWARD"]
    assert model.training_state is fullshard.introspection.TrainingState.IDLE


@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_a_model_loaded_in_low_precision_is_kept_in_full_precision_as_accelerate_does_it(
    use_orig_params: bool,
) -> None:
    bare = nn.Linear(3, 5).to(device(), torch.bfloat16)
    expected = {name: p.detach().float() for name, p in bare.named_parameters()}
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    model = FullyShardedDataParallel(
        bare, mixed_precision=precision, use_orig_params=use_orig_params
    )
    assert model._has_params
    model._flat_param.data = model._flat_param.data.to(torch.float32)
    model._handle._orig_param_dtype = torch.float32

    output = model(torch.rand(2, 3, device=device()))
    output.sum().backward()

    assert output.dtype == torch.bfloat16
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters() if p.numel())
    with FullyShardedDataParallel.summon_full_params(model):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, expected[name])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_the_first_rank_brings_shared_parameters_to_the_others(use_orig_params: bool) -> None:
    with installed():
        from torch.distributed.checkpoint import state_dict

        options = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        model = FullyShardedDataParallel(Tied().to(device()), use_orig_params=use_orig_params)
        optimizer = torch.optim.Adam(model.parameters())
        value = torch.arange(24.0, device=device()).view(6, 4)
        first = torch.distributed.get_rank() == 0
        given = {"embedding.weight": value, "head.weight": value} if first else {}
        state_dict.set_model_state_dict(model, given, options=options)
        state = state_dict.get_optimizer_state_dict(model, optimizer)

    with FullyShardedDataParallel.summon_full_params(model):
        torch.testing.assert_close(model.module.head.weight.detach(), value)
    assert set(state["state"]) <= {"embedding.weight"}


@ranks(4)
def test_hybrid_sharding_inside_nodes_that_a_program_makes_smaller_than_the_machine() -> None:
    from torch.distributed.fsdp import _init_utils
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    def gradients() -> tuple[list[list[int]], list[list[float]]]:
        # Looked up anew: torch's own the first time, and then ours.
        groups = _init_utils._init_intra_and_inter_node_groups(dist.group.WORLD, 2)
        assert _init_utils._is_valid_hybrid_shard_pg_type(groups)
        assert not _init_utils._is_valid_hybrid_shard_pg_type(dist.group.WORLD)
        torch.manual_seed(0)
        model = torch.distributed.fsdp.FullyShardedDataParallel(
            nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).to(device()),
            process_group=groups,
            sharding_strategy=torch.distributed.fsdp.ShardingStrategy.HYBRID_SHARD,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            device_id=device().type,
        )
        x = torch.full((2, 3), float(dist.get_rank()), device=device())
        model(x).sum().backward()
        ranks_of = dist.get_process_group_ranks
        return (
            [ranks_of(model.process_group), ranks_of(model._inter_node_pg)],
            [p.grad.tolist() for p in model.parameters()],
        )

    expected = gradients()
    with installed():
        found = gradients()
        with pytest.raises(ValueError, match="must be divisible by 'group_size=3'"):
            _init_utils._init_intra_and_inter_node_groups(dist.group.WORLD, 3)
    rank = dist.get_rank()
    assert found[0] == [[rank - rank % 2, rank - rank % 2 + 1], [rank % 2, rank % 2 + 2]]
    assert found == expected
