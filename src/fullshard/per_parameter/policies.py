"""Options of ``fully_shard`` for precision, offloading and meshes."""

from __future__ import annotations

import dataclasses

import torch

__all__ = ["CPUOffloadPolicy", "DataParallelMeshDims", "MixedPrecisionPolicy", "OffloadPolicy"]


@dataclasses.dataclass(frozen=True)
class MixedPrecisionPolicy:
    """In which dtypes a module computes, reduces gradients and returns.

    ``param_dtype`` is that of full parameters and, with ``cast_forward_inputs``, of a forward's
    floating-point inputs; ``reduce_dtype`` that of gradients while they are reduced, as computed
    if it is None; ``output_dtype`` that of a forward's floating-point outputs. None leaves a dtype
    as it is. Sharded parameters and their gradients stay in the parameters' own.

    >>> mp_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclasses.dataclass
class OffloadPolicy:
    """Parameters, gradients and optimizer state stay where the module computes."""


@dataclasses.dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Sharded parameters and gradients stay on the host, in pinned memory where there is a device.

    ``pin_memory=False`` is accepted, and pins all the same. On a host that computes itself there is
    nothing to offload.
    """

    pin_memory: bool = True


@dataclasses.dataclass
class DataParallelMeshDims:
    """The dimensions of a mesh over which parameters are sharded, and over which replicated."""

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError(
                "At least one of shard or replicate must be set in DataParallelMeshDims"
            )
