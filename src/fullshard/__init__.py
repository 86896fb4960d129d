"""fullshard: fully sharded data parallelism for PyTorch.

The names are those of ``torch.distributed.fsdp``; ``fullshard.wrap`` has those of its ``wrap``.
"""

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
from .engine.agreement import RanksDisagreeError
from .engine.flat_param import FlatParameter
from .fsdp import FullyShardedDataParallel, register_fsdp_forward_method
from .grad.scaler import ShardedGradScaler
from .state.checkpoint import Checkpoint, CheckpointError, SaveHandle, latest, load, save
from .state.export import export_safetensors
from .state.optim_template import optim_state_template

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
    "RanksDisagreeError",
    "SaveHandle",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "export_safetensors",
    "latest",
    "load",
    "optim_state_template",
    "register_fsdp_forward_method",
    "save",
]

__version__ = "0.1.0.dev0"
