"""``clip_grad_norm_``: one norm over gradients of which every rank has a part."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ..engine.collectives import Group
from ..engine.schedule import Schedule
from ..engine.unit import Unit


class _Found(NamedTuple):
    """This rank's gradients: its shards of them, by the ranks that have the others, and whole."""

    sharded: dict[Group, list[torch.Tensor]]
    whole: list[torch.Tensor]

    def all(self) -> list[torch.Tensor]:
        return [*self.whole, *(g for part in self.sharded.values() for g in part)]


def clip_grad_norm(
    model: nn.Module,
    schedule: Schedule,
    units: Sequence[Unit],
    max_norm: float | torch.Tensor,
    norm_type: float,
) -> torch.Tensor:
    """Scale the gradients of ``model`` in place; return their norm before it."""
    _check(schedule, units, norm_type)
    found = _gradients(model, units)
    gradients = found.all()
    with torch.no_grad():
        total = _total_norm(found, schedule.root, float(norm_type))
        _scale(gradients, torch.clamp(max_norm / (total + 1e-6), max=1.0))
    if not gradients:
        warnings.warn(
            f"Called FSDP.clip_grad_norm_() on rank {schedule.root.shards.rank} with no gradients "
            f"-- returning the total norm in the default dtype {torch.get_default_dtype()}",
            UserWarning,
            stacklevel=3,
        )
        return total.to(torch.get_default_dtype())
    widest = gradients[0].dtype
    for gradient in gradients:
        widest = torch.promote_types(widest, gradient.dtype)
    return total.to(widest)


def _check(schedule: Schedule, units: Sequence[Unit], norm_type: float) -> None:
    if not units or units[0] is not schedule.root:
        name = units[0].name if units else "?"
        raise RuntimeError(
            "`clip_grad_norm_()` should only be called on the root FSDP instance: the norm is the "
            f"whole model's, and unit {name!r} is a part of {schedule.root.name!r}"
        )
    if not schedule.is_idle:
        raise RuntimeError(
            "clip_grad_norm_() in the middle of a forward or backward, where gradients are not "
            "complete: call it after backward"
        )
    if not float(norm_type) > 0:
        raise ValueError(f"clip_grad_norm_() expects a norm_type above 0, but got {norm_type}")
    pending = [u.name for u in units if any(h.local_gradients for h in u.handles)]
    if pending:
        raise RuntimeError(
            f"Units {pending} hold unreduced gradients (no_sync), which differ between ranks; run "
            "a backward outside no_sync() before clipping"
        )


def _gradients(model: nn.Module, units: Sequence[Unit]) -> _Found:
    sharded: dict[Group, list[torch.Tensor]] = {}
    seen: set[nn.Parameter] = set()
    for unit in units:
        for handle in unit.handles:
            if handle.is_sharded:
                part = sharded.setdefault(unit.shards, [])
                part += [p.grad for p in handle.watched if p.grad is not None]
                seen.update(handle.watched)
    others: Iterable[nn.Parameter] = model.parameters()
    return _Found(sharded, [p.grad for p in others if p.grad is not None and p not in seen])


def _total_norm(found: _Found, root: Unit, p: float) -> torch.Tensor:
    """The norm over all ranks, made of every part's norm to the power of ``p`` (or their maximum).

    Parts are added up in double precision, where large powers do not overflow.
    """
    device = root.device
    powers = [_power(found.whole, p, device)]
    for group, gradients in found.sharded.items():
        power = _power(gradients, p, device)
        group.begin_pass("clip", root.name)
        if math.isinf(p):
            power = _maximum(power, group, root.name)
        else:
            group.all_reduce(power, root.name, "norm")
        powers.append(power)
    stacked = torch.stack(powers)
    return stacked.amax() if math.isinf(p) else stacked.sum().pow(1.0 / p)


def _maximum(value: torch.Tensor, group: Group, unit: str) -> torch.Tensor:
    """The largest over the ranks; NaN if any is, which backends lose when they compare."""
    pair = torch.stack([value.nan_to_num(0.0, posinf=math.inf), value.isnan().to(value.dtype)])
    group.all_reduce_max(pair, unit, "norm")
    return torch.where(pair[1] > 0, math.nan, pair[0])


def _power(gradients: Sequence[torch.Tensor], p: float, device: torch.device) -> torch.Tensor:
    """The sum of |g|^p over this rank's elements (their maximum if ``p`` is inf)."""
    norms: list[torch.Tensor] = []
    for group in _alike(gradients):
        wide = torch.promote_types(group[0].dtype, torch.float32).to_real()
        norms += [n.to(device, torch.float64) for n in torch._foreach_norm(group, p, dtype=wide)]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    stacked = torch.stack(norms)
    return stacked.amax() if math.isinf(p) else stacked.pow(p).sum()


def _scale(gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    for group in _alike(gradients):
        wide = torch.promote_types(group[0].dtype, torch.float32).to_real()
        wide_factor = factor.to(group[0].device, wide)
        if torch.finfo(group[0].dtype).bits >= 32:
            torch._foreach_mul_(group, wide_factor)
            continue
        # A GPU would round the factor to the gradients' precision, and the product once more.
        for gradient in group:
            gradient.copy_(gradient * wide_factor.view(1))


def _alike(gradients: Sequence[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Gradients with elements, those of one device and dtype together."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return groups.values()
