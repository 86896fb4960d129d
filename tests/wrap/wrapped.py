"""What tests of the real wrapper class share: a stand-in for a process group, models, paths."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from fullshard import FullyShardedDataParallel as FSDP
from fullshard.wrap import size_based_auto_wrap_policy


class RankAndSize:
    """All that a constructor may ask of a process group."""

    def __init__(self, rank: int = 0, size: int = 2) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def linears() -> nn.Sequential:
    """Four linears of 30 elements each, the last two one level deeper."""
    return nn.Sequential(
        nn.Linear(5, 5), nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    )


def size_based(minimum: int, **options: Any) -> Any:
    return functools.partial(size_based_auto_wrap_policy, min_num_params=minimum, **options)


def unit_paths(model: nn.Module) -> list[str]:
    """Paths of the units below ``model``, as in the unwrapped model; the root is left out."""
    wrapped = "_fsdp_wrapped_module"
    found = [n for n, m in model.named_modules() if isinstance(m, FSDP) and m is not model]
    return [".".join(part for part in name.split(".") if part != wrapped) for name in found]
