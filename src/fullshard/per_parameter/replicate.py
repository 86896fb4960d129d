"""``replicate``: data parallelism without sharding, in place, on the same units."""

from __future__ import annotations

from typing import Any

from torch import nn

from .fully_shard import Application, state_of
from .meshes import mesh_of_copies
from .module import ReplicateModule
from .policies import DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy

__all__ = ["replicate"]


def replicate(
    module: Any,
    *,
    mesh: Any = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (a constant)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 (a constant)
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Any:
    """Keep the parameters of ``module`` on every rank of ``mesh``, and average their gradients.

    As ``fully_shard``, but nothing is sharded: parameters are DTensors that every rank has all of,
    and a backward all-reduces their gradients, module by module.

    >>> model = Net()
    >>> blocks = [replicate(module) for module in model.modules() if isinstance(module, Block)]
    >>> model = replicate(model)

    The arguments are those of torch's ``replicate`` of ``torch.distributed._composable``.
    """
    return Application(
        name="replicate",
        kind=ReplicateModule,
        default_mesh=mesh_of_copies,
        mesh=mesh,
        dims=dp_mesh_dims,
        reshard_after_forward=False,
        placement_of=None,
        precision=mp_policy,
        offload=offload_policy,
        ignored=frozenset(ignored_params or ()),
    ).to(module)


replicate.state = state_of  # type: ignore[attr-defined]
