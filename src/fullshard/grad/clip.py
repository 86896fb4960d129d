"""``clip_grad_norm_``: clips by the norm over the gradients of all ranks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ..engine.comm.collectives import Group
from ..engine.params.handle import FlatParamHandle
from ..engine.params.tensor_parallel import Distribution, is_distributed, local_part
from ..engine.runtime.forward import Schedule
from ..engine.runtime.unit import Unit

#: This rank's parts of gradients, by the process groups whose ranks have the other parts. A
#: gradient that is sharded and tensor-parallel has two groups, an unsharded one has none.
_Found = dict[tuple[Group, ...], list[torch.Tensor]]


def clip_grad_norm(
    model: nn.Module,
    schedule: Schedule,
    units: Sequence[Unit],
    max_norm: float | torch.Tensor,
    norm_type: float,
) -> torch.Tensor:
    """Clip the gradients of ``model`` in place; return their norm before clipping."""
    _check(schedule, units, norm_type)
    if not isinstance(max_norm, torch.Tensor):
        # Programs pass strings that they read from a command line or a file.
        max_norm = float(max_norm)
    found = _gradients(model, units)
    gradients = [gradient for part in found.values() for gradient in part]
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
    return total.to(widest.to_real())


def _check(schedule: Schedule, units: Sequence[Unit], norm_type: float) -> None:
    if not units or units[0] is not schedule.root:
        name = units[0].name if units else "?"
        raise RuntimeError(
            "`clip_grad_norm_()` should only be called on the root FSDP instance: the norm is that "
            f"of the whole model, and unit {name!r} is nested in {schedule.root.name!r}"
        )
    if not schedule.wait_until_idle():
        raise RuntimeError(
            "clip_grad_norm_() was called in the middle of a forward or backward, when gradients "
            "are not complete. Call it after backward"
        )
    if not float(norm_type) > 0:
        raise ValueError(f"clip_grad_norm_() expects a norm_type above 0, but got {norm_type}")
    pending = [u.name for u in units if any(h.keeps_local_gradients for h in u.handles)]
    if pending:
        raise RuntimeError(
            f"Units {pending} hold unreduced gradients of a backward inside no_sync(), which "
            "differ between ranks. Run a backward outside no_sync() before clipping"
        )


def _gradients(model: nn.Module, units: Sequence[Unit]) -> _Found:
    found: _Found = {(): []}
    seen: set[nn.Parameter] = set()
    for unit in units:
        for handle in unit.handles:
            groups = (unit.shards,) if handle.is_sharded else ()
            if handle.distributions:
                _add_distributed(found, handle, groups)
            else:
                part = found.setdefault(groups, [])
                part += [p.grad for p in handle.optimizer_params if p.grad is not None]
            seen.update(handle.optimizer_params)
    for parameter in model.parameters():
        if parameter not in seen:
            _add_unmanaged(found, parameter)
    return found


def _add_distributed(found: _Found, handle: FlatParamHandle, groups: tuple[Group, ...]) -> None:
    """Add the gradients of a group of parameters of which some are tensor-parallel."""
    pieces: Iterable[tuple[int, torch.Tensor | None]]
    if handle.use_orig_params:
        pieces = enumerate(p.grad for p in handle.params)
    else:
        flat = handle.flat_param.grad
        pieces = [] if flat is None else handle.cut(flat)
    keys = [(*groups, *(d.parts if d else ())) for d in handle.distributions]
    for key in keys:
        # All ranks of a process group call its all-reduce, also those without gradients.
        found.setdefault(key, [])
    for index, piece in pieces:
        if piece is not None:
            found[keys[index]].append(piece)


def _add_unmanaged(found: _Found, parameter: nn.Parameter) -> None:
    distribution = Distribution.of(parameter) if is_distributed(parameter) else None
    part = found.setdefault(distribution.parts if distribution else (), [])
    if parameter.grad is None:
        return
    if distribution is not None:
        # A partial gradient is first summed over the mesh: the norm is that of the scaled
        # gradients.
        parameter.grad = distribution.placed(parameter.grad)
    part.append(local_part(parameter.grad))


def _total_norm(found: _Found, root: Unit, p: float) -> torch.Tensor:
    """The norm over all ranks: the root of the sum of each part's norm to the power of ``p``.

    For an infinite ``p`` it is the maximum. The sum is in float64, so that powers do not overflow.
    """
    device = root.device
    powers: list[torch.Tensor] = []
    for groups, gradients in found.items():
        power = _power(gradients, p, device)
        for group in groups:
            group.begin_pass("clip", root.name)
            if math.isinf(p):
                power = _maximum(power, group, root.name)
            else:
                group.all_reduce(power, root.name, "norm")
        powers.append(power)
    stacked = torch.stack(powers)
    return stacked.amax() if math.isinf(p) else stacked.sum().pow(1.0 / p)


def _maximum(value: torch.Tensor, group: Group, unit: str) -> torch.Tensor:
    """All-reduce the maximum; NaN if a rank has NaN, which backends' maximum ignores."""
    pair = torch.stack([value.nan_to_num(0.0, posinf=math.inf), value.isnan().to(value.dtype)])
    group.all_reduce_max(pair, unit, "norm")
    return torch.where(pair[1] > 0, math.nan, pair[0])


def _power(gradients: Sequence[torch.Tensor], p: float, device: torch.device) -> torch.Tensor:
    """The sum of |g|^p over this rank's elements, or for an infinite ``p`` their maximum."""
    norms: list[torch.Tensor] = []
    for group in _alike(gradients):
        wide = torch.promote_types(group[0].dtype, torch.float32)
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
        # In low precision a GPU would round the factor and then the product.
        for gradient in group:
            gradient.copy_(gradient * wide_factor.view(1))


def _alike(gradients: Sequence[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Gradients with elements, grouped by device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return groups.values()
