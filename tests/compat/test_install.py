"""What install() replaces, what it leaves, and that uninstall() gives all of it back."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
import threading
import types
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from tests.compat.installed import installed
from torch import nn

import fullshard
from fullshard import compat
from fullshard.compat.names import TABLE
from fullshard.testing import device, ranks

SECOND_GENERATION = {
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "share_comm_ctx",
}
PACKAGE = "torch.distributed.fsdp"
SUBMODULES = [
    "_common_utils",
    "_exec_order_utils",
    "_flat_param",
    "_fsdp_extensions",
    "_init_utils",
    "_limiter_utils",
    "_optim_utils",
    "_runtime_utils",
    "_shard_utils",
    "_state_dict_utils",
    "_trace_utils",
    "_traversal_utils",
    "_unshard_param_utils",
    "_wrap_utils",
    "api",
    "fully_sharded_data_parallel",
    "sharded_grad_scaler",
    "wrap",
]
HOLDERS = [
    PACKAGE,
    *(f"{PACKAGE}.{name}" for name in SUBMODULES),
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.checkpoint.optimizer",
    "torch.distributed.tensor.parallel.fsdp",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "torch.distributed.optim.named_optimizer",
]


def public(module: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith(PACKAGE)
    }


def snapshot() -> dict[str, dict[str, int]]:
    modules = {name: importlib.import_module(name) for name in HOLDERS}
    return {
        name: {key: id(value) for key, value in vars(module).items()}
        for name, module in modules.items()
    }


@pytest.mark.parametrize(
    "name", ["", "api", "wrap", "fully_sharded_data_parallel", "sharded_grad_scaler"]
)
def test_every_public_name_of_the_first_generation_becomes_ours(name: str) -> None:
    module = importlib.import_module(f"{PACKAGE}.{name}".rstrip("."))
    theirs = set(public(module)) - SECOND_GENERATION
    private_parts = {"FlatParamHandle", "HandleTrainingState"}  # imported there, not meant for us

    with installed():
        left = set(public(module)) - SECOND_GENERATION - private_parts

    assert theirs
    assert left == set()


def test_names_imported_in_either_way_are_ours_while_installed() -> None:
    with installed():
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        assert FullyShardedDataParallel is fullshard.FullyShardedDataParallel
        assert torch.distributed.fsdp.ShardingStrategy is fullshard.ShardingStrategy
        assert ModuleWrapPolicy is fullshard.wrap.ModuleWrapPolicy
        assert torch.distributed.fsdp.fully_shard is fullshard.fully_shard


def test_modules_of_torch_that_imported_a_name_before_get_ours() -> None:
    from torch.distributed.checkpoint import state_dict
    from torch.distributed.optim import named_optimizer

    original = state_dict.FSDP
    with installed():
        assert state_dict.FSDP is fullshard.FullyShardedDataParallel
        assert named_optimizer.FSDP is fullshard.FullyShardedDataParallel
        assert state_dict.StateDictType is fullshard.StateDictType
    assert state_dict.FSDP is named_optimizer.FSDP is original


def test_uninstalling_restores_every_name_exactly() -> None:
    before = snapshot()

    compat.install()
    compat.install()  # does nothing more
    during = snapshot()
    compat.uninstall()
    compat.uninstall()  # nor does this

    assert during != before
    assert snapshot() == before


def test_modules_imported_while_installed_are_torchs_again_afterwards() -> None:
    script = """
import fullshard.compat
fullshard.compat.install()
import torch.distributed.checkpoint.state_dict as late
import torch.distributed.algorithms._optimizer_overlap.optimizer_overlap
ours = late.FSDP, late.HYBRID_SHARDING_STRATEGIES
fullshard.compat.uninstall()
from torch.distributed.fsdp import FullyShardedDataParallel, _init_utils, _common_utils
assert ours[0].__module__ == "fullshard.fsdp"
assert late.FSDP is FullyShardedDataParallel and late.FSDP is not ours[0]
assert late.FSDP.__module__.startswith("torch.distributed.fsdp")
assert late.HYBRID_SHARDING_STRATEGIES is _init_utils.HYBRID_SHARDING_STRATEGIES
assert late.HYBRID_SHARDING_STRATEGIES is not ours[1]
name = "_get_module_fsdp_state_if_fully_sharded_module"
assert getattr(late, name) is getattr(_common_utils, name)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_a_module_that_imported_torchs_wrapper_before_is_named() -> None:
    early = types.ModuleType("imported_too_early")
    early.FSDP = torch.distributed.fsdp.FullyShardedDataParallel  # type: ignore[attr-defined]
    sys.modules["imported_too_early"] = early
    try:
        with pytest.warns(UserWarning, match="imported_too_early imported Fully"), installed():
            assert early.FSDP is not fullshard.FullyShardedDataParallel
    finally:
        del sys.modules["imported_too_early"]


def test_importing_fullshard_does_not_import_torchs_fsdp() -> None:
    script = "import fullshard, sys; sys.exit('torch.distributed.fsdp' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_installing_from_many_threads_at_once_is_installing_once() -> None:
    before = snapshot()
    threads = [threading.Thread(target=compat.install) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    compat.uninstall()

    assert snapshot() == before


@pytest.mark.parametrize("home", [home for home in TABLE if home])
def test_every_row_of_the_table_replaces_a_name_that_torch_has(home: str) -> None:
    module = importlib.import_module(f"{PACKAGE}.{home}")
    missing = [name for name in TABLE[home] if not hasattr(module, name)]
    assert missing == []
    with installed():
        assert all(getattr(module, name) is ours for name, ours in TABLE[home].items())


def test_functions_of_torchs_engine_are_refused_with_a_way_out() -> None:
    from torch.distributed.fsdp import _runtime_utils

    with installed(), pytest.raises(NotImplementedError) as caught:
        _runtime_utils._unshard(None, None, None, None)
    assert "torch.distributed.fsdp._runtime_utils._unshard" in str(caught.value)
    assert "uninstall()" in str(caught.value)


@ranks(2)
def test_options_and_policies_made_by_torchs_classes_before_are_understood() -> None:
    from torch.distributed import fsdp as theirs
    from torch.distributed.fsdp import wrap as their_wrap

    options: dict[str, Any] = {
        "sharding_strategy": theirs.ShardingStrategy.SHARD_GRAD_OP,
        "backward_prefetch": theirs.BackwardPrefetch.BACKWARD_POST,
        "mixed_precision": theirs.MixedPrecision(param_dtype=torch.bfloat16),
        "cpu_offload": theirs.CPUOffload(offload_params=False),
    }
    policies = [
        their_wrap.ModuleWrapPolicy({nn.Linear}),
        their_wrap.CustomPolicy(lambda module: isinstance(module, nn.Linear)),
        functools.partial(
            their_wrap.transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear}
        ),
        functools.partial(their_wrap.size_based_auto_wrap_policy, min_num_params=10),
    ]
    state_type = theirs.StateDictType.SHARDED_STATE_DICT
    state_options = theirs.ShardedStateDictConfig(offload_to_cpu=True)
    assert options["sharding_strategy"] is not fullshard.ShardingStrategy.SHARD_GRAD_OP

    with installed():
        from torch.distributed.fsdp import FullyShardedDataParallel

        for policy in policies:
            bare = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to(device())
            model = FullyShardedDataParallel(bare, auto_wrap_policy=policy, **options)
            model(torch.rand(2, 4, device=device())).sum().backward()
            assert len(FullyShardedDataParallel.fsdp_modules(model)) == 3
            assert model.sharding_strategy is fullshard.ShardingStrategy.SHARD_GRAD_OP
            assert model.backward_prefetch is fullshard.BackwardPrefetch.BACKWARD_POST
            assert model.mixed_precision.param_dtype is torch.bfloat16
            with FullyShardedDataParallel.state_dict_type(model, state_type, state_options):
                chosen = FullyShardedDataParallel.get_state_dict_type(model)
            assert chosen.state_dict_type is fullshard.StateDictType.SHARDED_STATE_DICT
            assert chosen.state_dict_config == fullshard.ShardedStateDictConfig(offload_to_cpu=True)


@ranks(2)
def test_activation_checkpointing_takes_policies_of_either_origin() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointWrapper,
        apply_activation_checkpointing,
    )
    from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

    made_before = [
        ModuleWrapPolicy({nn.Linear}),
        CustomPolicy(lambda module: isinstance(module, nn.Linear)),
    ]
    with installed():
        from torch.distributed.fsdp import wrap

        ours = [
            wrap.ModuleWrapPolicy({nn.Linear}),
            wrap.CustomPolicy(lambda module: isinstance(module, nn.Linear)),
            functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=10),
        ]
        for policy in (*made_before, *ours):
            model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to(device())
            apply_activation_checkpointing(model, auto_wrap_policy=policy)
            assert sum(isinstance(m, CheckpointWrapper) for m in model.modules()) == 2
            sharded = torch.distributed.fsdp.FullyShardedDataParallel(model)
            sharded(torch.rand(2, 4, device=device())).sum().backward()
