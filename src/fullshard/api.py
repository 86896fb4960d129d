"""Enums and option dataclasses that users pass in. Facts only: nothing here imports the engine.

The names, members, fields and defaults are those of ``torch.distributed.fsdp``; values made by
torch's own classes are understood as well (see :func:`adopt`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
]


class ShardingStrategy(Enum):
    """What is split over the ranks, and when full parameters are given back.

    ``FULL_SHARD``
        Parameters, gradients and optimizer state are sharded; full parameters are freed after
        forward and gathered again for backward.
    ``SHARD_GRAD_OP``
        As above, but full parameters stay between forward and backward.
    ``NO_SHARD``
        Every rank keeps everything; gradients are averaged, as in ``DistributedDataParallel``.
    ``HYBRID_SHARD``, ``_HYBRID_SHARD_ZERO2``
        ``FULL_SHARD`` / ``SHARD_GRAD_OP`` inside a group of ranks (a node), copies across groups.
    """

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()


#: Strategies under which full parameters stay in place between forward and backward.
NO_RESHARD_AFTER_FORWARD_STRATEGIES = (
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy._HYBRID_SHARD_ZERO2,
)

#: Strategies that shard inside one group of ranks and keep copies across a second one.
HYBRID_STRATEGIES = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


class BackwardPrefetch(Enum):
    """When, in backward, the next unit's parameters are gathered.

    ``BACKWARD_PRE`` starts before the current unit's gradients are computed (more overlap, one
    more unit in memory), ``BACKWARD_POST`` after them.
    """

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


@dataclasses.dataclass
class MixedPrecision:
    """The dtypes a unit computes, reduces and keeps its buffers in.

    Shards stay in the parameters' own dtype; the optimizer never sees low precision unless
    ``keep_low_precision_grads`` is set. ``reduce_dtype`` defaults to ``param_dtype``.

    >>> MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32).reduce_dtype
    torch.float32
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (_BatchNorm,)


@dataclasses.dataclass
class CPUOffload:
    """Whether shards and gradient shards rest in host memory between uses."""

    offload_params: bool = False


class StateDictType(Enum):
    """The shape in which ``state_dict()`` hands parameters out."""

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


@dataclasses.dataclass
class StateDictConfig:
    """What every model state dict can be asked for."""

    offload_to_cpu: bool = False


@dataclasses.dataclass
class FullStateDictConfig(StateDictConfig):
    """Full parameters, on every rank or on rank 0 alone."""

    rank0_only: bool = False


@dataclasses.dataclass
class LocalStateDictConfig(StateDictConfig):
    """This rank's flat shards as they are."""


@dataclasses.dataclass
class ShardedStateDictConfig(StateDictConfig):
    """Each parameter as a sharded tensor, to be resharded at load."""

    _use_dtensor: bool = False


@dataclasses.dataclass
class OptimStateDictConfig:
    """What every optimizer state dict can be asked for."""

    offload_to_cpu: bool = True


@dataclasses.dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """Full optimizer state, on every rank or on rank 0 alone."""

    rank0_only: bool = False


@dataclasses.dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """This rank's optimizer state as it is."""

    offload_to_cpu: bool = False


@dataclasses.dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Optimizer state as sharded tensors."""

    _use_dtensor: bool = False


@dataclasses.dataclass
class StateDictSettings:
    """The type and options in force for a module's state dicts."""

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig


class OptimStateKeyType(Enum):
    """Whether an optimizer state dict is keyed by parameter names or by parameter ids."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


Option = TypeVar("Option")


def adopt(value: Any, kind: type[Option], argument: str) -> Option:
    """Return ``value`` as an instance of our ``kind``, accepting torch's class of the same name.

    Programs hold enum members and option objects made by ``torch.distributed.fsdp`` before
    fullshard was put in its place; they are equal by name, not by identity.
    """
    if isinstance(value, kind):
        return value
    theirs = type(value)
    if theirs.__name__ == kind.__name__ and theirs.__module__.startswith("torch.distributed."):
        if isinstance(value, Enum):
            return kind[value.name]  # type: ignore[index]
        if dataclasses.is_dataclass(value):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            return kind(**fields)
    members = f"one of {[str(m) for m in kind]}" if issubclass(kind, Enum) else kind.__name__
    raise TypeError(f"{argument} expects {members}, but got {value!r} of type {theirs.__name__}")
