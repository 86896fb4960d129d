"""fullshard: fully sharded data parallelism for PyTorch.

The names are those of ``torch.distributed.fsdp``; ``fullshard.wrap`` has those of its ``wrap``.
What belongs to ``fully_shard``, which is no part of fullshard, is torch's own here, too.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .api import (
    BackwardPrefetch,
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
from .fsdp import FullyShardedDataParallel, UnshardHandle
from .grad.scaler import ShardedGradScaler
from .state.optim.methods import optim_state_template
from .stopping import StopRequest

if TYPE_CHECKING:
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

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "Checkpoint",
    "CheckpointError",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "RankLostError",
    "RanksDisagreeError",
    "SaveHandle",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "StopRequest",
    "UnshardHandle",
    "export_safetensors",
    "latest",
    "load",
    "optim_state_template",
    "register_fsdp_forward_method",
    "resume",
    "save",
]

__version__ = "0.1.0.dev0"

# torch.distributed.checkpoint imports torch.distributed.fsdp, which takes its time: what is built
# on it waits until it is used.
_WHEN_USED = {
    "Checkpoint": "state.checkpoint",
    "CheckpointError": "state.checkpoint",
    "SaveHandle": "state.checkpoint",
    "export_safetensors": "state.checkpoint.export",
    "latest": "state.checkpoint",
    "load": "state.checkpoint",
    "resume": "state.checkpoint",
    "save": "state.checkpoint",
}

#: What torch has beside its wrapper: not ours, and found under the same names.
_OF_TORCH = {
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "fully_shard",
    "share_comm_ctx",
}


def __getattr__(name: str) -> Any:
    if name in _OF_TORCH:
        return getattr(importlib.import_module("torch.distributed.fsdp"), name)
    if name not in _WHEN_USED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_WHEN_USED[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHEN_USED, *_OF_TORCH})
