"""The optimizer state of a rank, relative to its gradient shards."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from fullshard.optim.owners import assign_owners
from fullshard.optim.selection import embeddings_and_heads

__all__ = ["optimizer_factor"]

#: Bytes of state per byte of a parameter.
_ADAMW = 2.0
_MUON = 1.0


def optimizer_factor(
    optimizer: str, model: nn.Module, units: Collection[str], ranks: int, is_sharded: bool
) -> float:
    """Bytes of optimizer state per byte of gradient shards, on the rank that has most.

    ``units`` are the paths of the units below the outermost one. Muon's state is on the owners of
    matrices, which may have different numbers of elements.
    """
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    matrices = hidden_matrix_sizes(model, units) if optimizer == "muon" else []
    if not matrices:
        return _ADAMW
    owned = [0] * ranks
    sizes = [float(size) for size in matrices]
    for size, owner in zip(matrices, assign_owners(sizes, ranks), strict=True):
        owned[owner] += size
    rest = trained - sum(matrices)
    shards = ranks if is_sharded else 1
    return (_MUON * max(owned) * shards + _ADAMW * rest) / trained


def hidden_matrix_sizes(model: nn.Module, units: Collection[str]) -> list[int]:
    """The numbers of elements of the matrices that ``fullshard.optim.whole`` chooses by default."""
    edges = embeddings_and_heads(model)
    shared = {p for module in edges for p in module.parameters(recurse=False)}
    found: dict[nn.Parameter, None] = {}
    for path, module in model.named_modules():
        is_inside = not units or any(f"{path}.".startswith(f"{unit}.") for unit in units)
        for parameter in module.parameters(recurse=False):
            if is_inside and parameter.dim() == 2 and parameter.requires_grad:
                found[parameter] = None
    return [parameter.numel() for parameter in found if parameter not in shared]
