"""``ShardedGradScaler``: gradient scaling for gradients that are sharded over ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from ..engine.comm.collectives import group_for
from ..engine.comm.messages import as_real

#: The name of the scaler in the order check and in errors.
_NAME = "gradient scaler"


class ShardedGradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for sharded gradients: if one rank finds inf or NaN, all skip.

    >>> scaler = ShardedGradScaler()
    >>> scaler.scale(loss).backward()
    >>> scaler.unscale_(optimizer)
    >>> norm = model.clip_grad_norm_(1.0)
    >>> scaler.step(optimizer)
    >>> scaler.update()

    All ranks of ``process_group`` (by default all ranks) call its methods in the same order.
    Gradients may be on any device, also in host memory while the loss is on a GPU, and in any
    precision. A rank may have no gradients. On a machine without a GPU pass ``device="cpu"``: with
    the default device the scaler disables itself there, as torch's does.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Any = None,
    ) -> None:
        super().__init__(
            device,
            init_scale=init_scale,
            backoff_factor=backoff_factor,
            growth_factor=growth_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self.process_group = process_group

    def scale(self, outputs: Any) -> Any:
        """Multiply ``outputs``, a tensor or an iterable of tensors, by the scale.

        Each result has the dtype of its output: a float16 loss is scaled in float16.
        """
        if not self.is_enabled():
            return outputs
        if isinstance(outputs, Iterable) and not isinstance(outputs, torch.Tensor):
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled
        return super().scale(outputs).to(outputs.dtype)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool = True,
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale gradients in place; return, by device, a tensor that says whether a rank found
        inf.

        Gradients in float16 are unscaled even if ``allow_fp16`` is False:
        ``keep_low_precision_grads`` produces them.
        """
        with torch.no_grad():
            for (device, _), gradients in _gradients(optimizer).items():
                # These copies are synchronous, because the host may read what a device computes.
                found = found_inf.to(device)
                torch._amp_foreach_non_finite_check_and_unscale_(
                    gradients, found, inv_scale.to(device)
                )
                found_inf.copy_(found)
            self._share(found_inf)
        return {found_inf.device: found_inf}

    def _share(self, found_inf: torch.Tensor) -> None:
        if self.process_group is None and not dist.is_initialized():
            return
        group = group_for(self.process_group or dist.group.WORLD, found_inf.device)
        group.begin_pass("unscale", _NAME)
        group.all_reduce_max(found_inf, _NAME, "inf check")

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            raise TypeError(
                "A ShardedGradScaler with a process_group cannot be pickled, because another "
                "process does not have the group. Save state_dict(), or use the default group"
            )
        return super().__getstate__()


def _gradients(
    optimizer: torch.optim.Optimizer,
) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """The optimizer's gradients, grouped by device and dtype."""
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    parameters: Iterable[torch.Tensor] = (
        parameter for group in optimizer.param_groups for parameter in group["params"]
    )
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            # Coalesced first: adding up duplicate indices may overflow.
            parameter.grad = parameter.grad.coalesce()
            values = parameter.grad._values()
        else:
            values = as_real(parameter.grad)
        found.setdefault((values.device, values.dtype), []).append(values)
    return found
