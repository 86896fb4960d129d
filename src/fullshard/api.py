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
    "Communication",
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
    """The choice of what is sharded across ranks, and of when units reshard.

    ``FULL_SHARD``
        Parameters, gradients and optimizer state are sharded. A unit reshards its parameters after
        forward and all-gathers them again for backward.
    ``SHARD_GRAD_OP``
        As above, but a unit stays unsharded between forward and backward.
    ``NO_SHARD``
        Every rank keeps everything; gradients are averaged, as in ``DistributedDataParallel``.
    ``HYBRID_SHARD``, ``_HYBRID_SHARD_ZERO2``
        ``FULL_SHARD`` / ``SHARD_GRAD_OP`` within a group of ranks (usually a node), with the shards
        replicated across groups.
    """

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()


#: Strategies under which a unit stays unsharded between forward and backward.
NO_RESHARD_AFTER_FORWARD_STRATEGIES = (
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy._HYBRID_SHARD_ZERO2,
)

#: Strategies that shard within one group of ranks and replicate across a second one.
HYBRID_STRATEGIES = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


class BackwardPrefetch(Enum):
    """The time at which backward prefetches (all-gathers) the parameters of the next unit.

    ``BACKWARD_PRE`` prefetches before the current unit's gradients are computed (more overlap, one
    more unit in memory); ``BACKWARD_POST`` prefetches after them.
    """

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


@dataclasses.dataclass
class MixedPrecision:
    """The dtypes in which a unit computes, reduces gradients and keeps its buffers.

    Shards stay in the parameters' own dtype, and so do the gradients that the optimizer sees,
    unless ``keep_low_precision_grads`` is set. ``reduce_dtype`` defaults to ``param_dtype``.

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
    """Options for keeping parameter and gradient shards in host memory between uses."""

    offload_params: bool = False


class StateDictType(Enum):
    """The form in which ``state_dict()`` returns parameters: full, local or sharded."""

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


@dataclasses.dataclass
class StateDictConfig:
    """Options common to all model state dicts."""

    offload_to_cpu: bool = False


@dataclasses.dataclass
class FullStateDictConfig(StateDictConfig):
    """Options for full parameters, on every rank or on rank 0 only."""

    rank0_only: bool = False


@dataclasses.dataclass
class LocalStateDictConfig(StateDictConfig):
    """Options for this rank's flat shards, returned without communication."""


@dataclasses.dataclass
class ShardedStateDictConfig(StateDictConfig):
    """Options for parameters as sharded tensors, which may be loaded on another number of ranks."""

    _use_dtensor: bool = False


@dataclasses.dataclass
class OptimStateDictConfig:
    """Options common to all optimizer state dicts."""

    offload_to_cpu: bool = True


@dataclasses.dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """Options for full optimizer state, on every rank or on rank 0 only."""

    rank0_only: bool = False


@dataclasses.dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Options for this rank's optimizer state, returned without communication."""

    offload_to_cpu: bool = False


@dataclasses.dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Options for optimizer state as sharded tensors."""

    _use_dtensor: bool = False


@dataclasses.dataclass
class StateDictSettings:
    """The state dict type and options that are currently set for a module."""

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig


class OptimStateKeyType(Enum):
    """The keys of an optimizer state dict: parameter names or parameter ids."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


#: The dtypes in which numbers may be all-gathered or reduced instead of their own.
ALL_GATHER_DTYPES = (torch.int8, torch.float8_e4m3fn)
REDUCE_DTYPES = (torch.int8, torch.float8_e4m3fn, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class Communication:
    """Options that reduce communication: fewer bits per number, all-gathers over fewer ranks.

    ``all_gather_dtype``
        Parameters are all-gathered in 8 bits, ``torch.int8`` or ``torch.float8_e4m3fn``, with a
        scale for each ``block_size`` of them, and computed with as before.
    ``reduce_dtype``
        Gradients are sent in 8 bits likewise, or in ``torch.bfloat16``, and added up in float32.
    ``min_numel``
        Parameters with fewer elements, or less than two dimensions, such as norms and biases, stay
        as they are, and so do their gradients.
    ``secondary_shards``
        After forward, a unit keeps a second shard of its parameters, in the precision that it
        computes in, over the ranks of this host (True) or over so many neighbouring ranks; backward
        gathers among these alone.

    Shards, optimizer state and checkpoints stay in full precision, so that a run may be resumed
    with other options.

    >>> Communication(all_gather_dtype=torch.int8, reduce_dtype=torch.int8).block_size
    256
    """

    all_gather_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    block_size: int = 256
    min_numel: int = 4096
    secondary_shards: bool | int = False

    def __post_init__(self) -> None:
        _check_dtype("all_gather_dtype", self.all_gather_dtype, ALL_GATHER_DTYPES)
        _check_dtype("reduce_dtype", self.reduce_dtype, REDUCE_DTYPES)
        for name, least in ("block_size", 16), ("min_numel", 0):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} expects a whole number from {least}, but got {value!r}")
        if not isinstance(self.secondary_shards, int) or self.secondary_shards < 0:
            raise ValueError(
                "secondary_shards expects True, False or the number of ranks that share a second "
                f"shard, but got {self.secondary_shards!r}"
            )

    @property
    def encodes(self) -> bool:
        """True if anything is sent in another form than it is kept in."""
        return self.all_gather_dtype is not None or self.reduce_dtype is not None

    def encodes_parameter(self, parameter: torch.Tensor) -> bool:
        """True if what is sent of ``parameter``, or of its gradient, is encoded."""
        large = parameter.dim() > 1 and parameter.numel() >= max(1, self.min_numel)
        return self.encodes and large and parameter.is_floating_point()


def _check_dtype(name: str, given: object, allowed: Sequence[torch.dtype]) -> None:
    if given is not None and given not in allowed:
        raise ValueError(
            f"{name} expects None or one of {', '.join(map(str, allowed))}, but got {given!r}"
        )


Option = TypeVar("Option")


def adopt(value: Any, kind: type[Option], argument: str) -> Option:
    """Return ``value`` as an instance of our ``kind``, accepting torch's class of the same name.

    A program may hold enum members and option objects that it made with ``torch.distributed.fsdp``
    before ``fullshard.compat.install()``. Enum members are matched by name, options by field.
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
