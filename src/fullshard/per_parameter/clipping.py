"""``torch.nn.utils.clip_grad_norm_`` of DTensor gradients, on their local parts.

Note: where torch's function is met
    Torch's function computes the norm of each gradient, stacks them, and multiplies each gradient.
    Every one of these operations goes through DTensor's dispatch, gradient by gradient. Programs
    import the function by name, so another one in its place would not be found by all. It calls
    two functions of its own file, though, and those are replaced: for gradients that
    fullshard made, they compute with local parts and give the result that torch's do. Anything
    else they leave to torch's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import clip_grad

from ..engine.params.row_sharding import is_reduced_by_us

_NORM = "_get_total_norm"
_SCALE = "_clip_grads_with_norm_"


@functools.cache
def watch_clipping() -> None:
    """Let ``clip_grad_norm_`` compute with local parts from now on."""
    for name, make in ((_NORM, _norm_around), (_SCALE, _scale_around)):
        original = getattr(clip_grad, name, None)
        if original is None:
            # This release of torch is built differently; its own implementation is slow, and
            # correct.
            return
        replacement = functools.wraps(original)(make(original))
        for key, value in list(vars(clip_grad).items()):
            if value is original:
                setattr(clip_grad, key, replacement)


def _norm_around(original: Any) -> Any:
    def get_total_norm(
        tensors: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        ours = _norm_of_parts(given, float(norm_type))
        if ours is None:
            found: torch.Tensor = original(given, norm_type, error_if_nonfinite, foreach)
            return found
        if error_if_nonfinite and not ours._local_tensor.isfinite():  # type: ignore[attr-defined]
            raise RuntimeError(
                f"The total norm of order {float(norm_type)} for gradients from `parameters` is "
                "non-finite, so it cannot be clipped. To disable this error and scale the "
                "gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
            )
        return ours

    return get_total_norm


def _scale_around(original: Any) -> Any:
    def clip_grads_with_norm_(
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        total_norm: torch.Tensor,
        foreach: bool | None = None,
    ) -> None:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        gradients = [p.grad for p in given if p.grad is not None]
        if not all(map(is_reduced_by_us, gradients)):
            original(given, max_norm, total_norm, foreach)
            return
        with torch.no_grad():
            norm = total_norm.full_tensor() if isinstance(total_norm, DTensor) else total_norm
            factor = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
            by_kind: dict[Any, list[torch.Tensor]] = {}
            for gradient in gradients:
                local = _local(gradient)
                by_kind.setdefault((local.device, local.dtype), []).append(local)
            for (device, _), locals_ in by_kind.items():
                torch._foreach_mul_(locals_, factor.to(device))

    return clip_grads_with_norm_


def _by_spec(gradients: list[Any]) -> list[tuple[Any, list[torch.Tensor]]] | None:
    """The local parts of gradients, by the mesh and placements that they share.

    None if some are not DTensors that fullshard made.
    """
    if not gradients or not all(map(is_reduced_by_us, gradients)):
        return None
    found: list[tuple[Any, list[torch.Tensor]]] = []
    for gradient in gradients:
        spec = gradient._spec
        for known, locals_ in found:
            same_mesh = spec.device_mesh is known.device_mesh
            if same_mesh and spec.placements == known.placements:
                locals_.append(gradient._local_tensor)
                break
        else:
            if any(placement.is_partial() for placement in spec.placements):
                return None
            found.append((spec, [gradient._local_tensor]))
    return found


def _local(gradient: Any) -> torch.Tensor:
    local: torch.Tensor = gradient._local_tensor
    return local


@torch.no_grad()
def _norm_of_parts(gradients: list[Any], norm_type: float) -> torch.Tensor | None:
    """The norm of all gradients, as a DTensor that every rank has in full, like torch's.

    Torch refuses gradients on different meshes, as those beside tensor-parallel ones are; here
    each kind is reduced over its own mesh.
    """
    groups = _by_spec(gradients)
    if groups is None or norm_type <= 0:
        return None
    totals = [_norm_over_mesh(spec, locals_, norm_type) for spec, locals_ in groups]
    total = totals[0]
    if len(totals) > 1:
        total = torch.linalg.vector_norm(torch.stack(totals), norm_type)
    mesh = groups[0][0].device_mesh
    norm: torch.Tensor = DTensor.from_local(total, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return norm


def _norm_over_mesh(spec: Any, locals_: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The norm of gradients of which ``locals_`` are this rank's parts."""
    is_maximum = norm_type == float("inf")
    if is_maximum:
        # Torch cannot take the maximum of nothing, and a rank may have no rows at all.
        filled = [local for local in locals_ if local.numel()]
        locals_ = filled or [locals_[0].new_zeros(1)]
    norms = torch._foreach_norm(locals_, norm_type)
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    found = total if is_maximum else total.pow(norm_type)
    operation = dist.ReduceOp.MAX if is_maximum else dist.ReduceOp.SUM
    for dim, placement in enumerate(spec.placements):
        # Not is_shard(): of rows of what tensor parallelism has cut it says otherwise.
        if not placement.is_replicate():
            dist.all_reduce(found, operation, group=spec.device_mesh.get_group(dim))
    return found if is_maximum else found.pow(1.0 / norm_type)
