"""The DTensors that users of ``fully_shard`` hold: made of local parts, and copied."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch


def is_reduced_by_us(tensor: torch.Tensor) -> bool:
    """True if a tensor is a gradient (a DTensor) that a backward of fullshard left."""
    return hasattr(tensor, "_fullshard_reduced")


@dataclasses.dataclass(frozen=True, eq=False)
class RowSharding:
    """The DTensor that users see of one parameter: on ``mesh``, cut along ``dim`` among the others.

    ``placements`` include those of tensor parallelism; ``shape`` and ``stride`` are the whole
    parameter's.
    """

    mesh: Any
    placements: tuple[Any, ...]
    dim: int
    shape: torch.Size
    stride: tuple[int, ...]

    def among(self, mesh: Any) -> RowSharding:
        """The same sharding on another mesh, whose last dimension shards the rows."""
        from torch.distributed.tensor import Replicate, Shard

        placements = (*[Replicate()] * (mesh.ndim - 1), Shard(self.dim))
        return dataclasses.replace(self, mesh=mesh, placements=placements)

    def assemble(self, local: torch.Tensor) -> Any:
        """The DTensor of which ``local`` is this rank's part; shares its memory."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )


@functools.cache
def maker_of_dtensors() -> Callable[..., Any]:
    """A function that makes a DTensor of a local part and a spec.

    Without the function around it that keeps Dynamo out, as the engine does anyway: for a gradient
    per parameter and step it takes twice as long as all the rest.
    """
    # Not imported with this file: programs without DTensors save the second that it takes.
    kind: Any = importlib.import_module("torch.distributed.tensor").DTensor
    return functools.partial(inspect.unwrap(kind.__new__), kind)


def at_start(local: torch.Tensor) -> torch.Tensor:
    """A tensor like ``local`` at the beginning of its memory, to make a DTensor from.

    A DTensor has no memory of its own, but takes over where in its memory the local part begins;
    anywhere else than at the beginning, torch cannot copy it (``copy.deepcopy``).
    """
    return local.as_strided(local.shape, local.stride(), 0)


def copyable(value: Any) -> Any:
    """A DTensor of the same local part, which ``copy.deepcopy`` can copy."""
    local = value._local_tensor
    if local.storage_offset() == 0:
        return value
    found = type(value)(at_start(local), value._spec, requires_grad=False)
    found._local_tensor = local
    return found
