"""Checks what ``fully_shard`` and ``replicate`` are given, and says what it means."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from ..engine.runtime.parts import FewRanks
from ..wrap import is_unit
from .meshes import DataParallelMesh
from .module import FSDPModule

#: Modules without a forward of their own, at which parameters could be gathered.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def modules_in(module: Any, name: str) -> list[nn.Module]:
    """The outermost of the modules given to ``name``, one or a list; refuses what cannot be."""
    given = list(module) if isinstance(module, (list, tuple)) else [module]
    for each in given:
        if not isinstance(each, nn.Module):
            raise TypeError(f"{name} expects nn.Modules, but got {each!r}")
        if isinstance(each, _CONTAINERS) and type(each).forward in (
            nn.Module.forward,
            *(container.forward for container in _CONTAINERS),
        ):
            raise ValueError(
                f"{name} does not support containers that do not implement forward: {each}"
            )
        if isinstance(each, FSDPModule):
            raise AssertionError(
                "Each distinct composable distributed API can only be applied to a module once. "
                f"{each._fullshard_applied_by} has already been applied to the following module:\n"
                f"{each}"
            )
        wrapped = [sub for sub in each.modules() if is_unit(sub) and not _is_in_place(sub)]
        if wrapped:
            raise ValueError(
                f"{type(each).__name__} is, or holds, a FullyShardedDataParallel: a model is "
                "sharded by the wrapper or by fully_shard, not by both"
            )
    if not given:
        raise ValueError(f"{name} expects at least one module, but got an empty list")
    below = {sub for each in given for sub in each.modules() if sub is not each}
    return [each for each in dict.fromkeys(given) if each not in below]


def _is_in_place(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def resharding_of(
    reshard_after_forward: bool | int | None, data_parallel: DataParallelMesh
) -> tuple[bool | None, FewRanks | None]:
    """Decide whether to reshard after forward, if that was asked, and to which few ranks."""
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward, None
    size = data_parallel.shard_size
    if not isinstance(reshard_after_forward, int):
        raise ValueError(
            "reshard_after_forward should be a bool or an int representing the group size to "
            f"reshard to, not {reshard_after_forward}"
        )
    if reshard_after_forward < 1 or size % reshard_after_forward:
        raise ValueError(
            "If passing reshard_after_forward as an int, it should be a factor of "
            f"{size}, not {reshard_after_forward}"
        )
    if reshard_after_forward == 1:
        warnings.warn(
            "reshard_after_forward=1 (int) means that each rank keeps parameters after forward, "
            "as reshard_after_forward=False does; pass True to free them",
            UserWarning,
            stacklevel=4,
        )
    if reshard_after_forward in (1, size):
        return reshard_after_forward == size, None
    return True, data_parallel.few_ranks(reshard_after_forward)
