"""fullshard: fully sharded data parallelism for PyTorch.

The names are those of ``torch.distributed.fsdp``, including ``fully_shard``; ``fullshard.wrap`` has
those of ``torch.distributed.fsdp.wrap``.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .api import (
    BackwardPrefetch,
    Communication,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from .engine.comm.disagreement import RankLostError, RanksDisagreeError
from .engine.params.flat_parameter import FlatParameter
from .forward_method import register_fsdp_forward_method
from .fsdp import FullyShardedDataParallel
from .full_parameters import UnshardHandle
from .grad.scaler import ShardedGradScaler
from .state.model.summon import summon_full_params
from .state.optim.methods import optim_state_template
from .stopping import StopRequest

if TYPE_CHECKING:
    from . import optim
    from .captured.step import CapturedStep, capture
    from .per_parameter.fully_shard import fully_shard
    from .per_parameter.module import FSDPModule, ReplicateModule, share_comm_ctx
    from .per_parameter.policies import (
        CPUOffloadPolicy,
        DataParallelMeshDims,
        MixedPrecisionPolicy,
        OffloadPolicy,
    )
    from .per_parameter.replicate import replicate
    from .state.checkpoint import (
        Checkpoint,
        CheckpointError,
        SaveHandle,
        latest,
        load,
        resume,
        save,
    )
    from .state.checkpoint.export import export_safetensors
    from .tracing.trace import Trace, trace

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "CapturedStep",
    "Checkpoint",
    "CheckpointError",
    "Communication",
    "DataParallelMeshDims",
    "FSDPModule",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "RankLostError",
    "RanksDisagreeError",
    "ReplicateModule",
    "SaveHandle",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "StopRequest",
    "Trace",
    "UnshardHandle",
    "capture",
    "export_safetensors",
    "fully_shard",
    "latest",
    "load",
    "optim",
    "optim_state_template",
    "register_fsdp_forward_method",
    "replicate",
    "resume",
    "save",
    "share_comm_ctx",
    "summon_full_params",
    "trace",
]

__version__ = "0.1.0.dev0"

# torch.distributed.checkpoint imports torch.distributed.fsdp, which takes its time, as DTensors do:
# what is built on them waits until it is used.
_WHEN_USED = {
    "CPUOffloadPolicy": "per_parameter.policies",
    "CapturedStep": "captured.step",
    "Checkpoint": "state.checkpoint",
    "CheckpointError": "state.checkpoint",
    "DataParallelMeshDims": "per_parameter.policies",
    "FSDPModule": "per_parameter.module",
    "MixedPrecisionPolicy": "per_parameter.policies",
    "OffloadPolicy": "per_parameter.policies",
    "ReplicateModule": "per_parameter.module",
    "SaveHandle": "state.checkpoint",
    "Trace": "tracing.trace",
    "capture": "captured.step",
    "export_safetensors": "state.checkpoint.export",
    "fully_shard": "per_parameter.fully_shard",
    "latest": "state.checkpoint",
    "load": "state.checkpoint",
    "replicate": "per_parameter.replicate",
    "resume": "state.checkpoint",
    "save": "state.checkpoint",
    "share_comm_ctx": "per_parameter.module",
    "trace": "tracing.trace",
}
#: Modules that are public themselves.
_ROOMS_WHEN_USED = frozenset({"optim"})


def __getattr__(name: str) -> Any:
    if name in _ROOMS_WHEN_USED:
        return importlib.import_module(f".{name}", __name__)
    if name not in _WHEN_USED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_WHEN_USED[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHEN_USED, *_ROOMS_WHEN_USED})
