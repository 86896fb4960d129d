"""Warns, at their first step, of optimizers that need more than this rank's shards.

Note: one hook for all optimizers
    Most optimizers update a parameter element by element, so a rank can step its own shards. Some
    first compute norms, dot products or matrix products, of a whole parameter or of all; given
    shards, every rank gets different results, without any error. Nothing in an optimizer says
    which kind it is, so their classes are listed here by name, including those of other
    libraries. The hook is torch's own for all optimizers, registered with the first
    unit that is sharded or flattened. After an optimizer's first step it costs two lookups, a
    fraction of a microsecond per step.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..runtime.unit import Unit

#: Optimizers that compute with all parameters together, by the names of their classes.
OVER_ALL = frozenset({"LBFGS", "FullBatchLBFGS"})
#: Optimizers that compute with each parameter as a whole: its norm, its rows, its matrix.
_OVER_EACH = frozenset(
    {
        "Adafactor",
        "Muon",
        "LAMB",
        "Lamb",
        "FusedLAMB",
        "LARS",
        "Lars",
        "Shampoo",
        "DistributedShampoo",
        "SOAP",
    }
)
#: Optimizers that quantize their state in blocks, which begin elsewhere on shards.
_OVER_BLOCKS = frozenset(
    {
        *("Adam8bit", "AdamW8bit", "PagedAdam8bit", "PagedAdamW8bit", "Lion8bit", "SGD8bit"),
        *("RMSprop8bit", "LAMB8bit", "LARS8bit", "AdEMAMix8bit"),
        *("Adam4bit", "AdamW4bit", "AdamFp8", "AdamWFp8"),
    }
)

#: Classes whose optimizers update element by element, as far as is known.
_elementwise: set[type] = set()
#: Optimizers of the other classes that were looked at.
_seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
#: What :func:`watch_optimizers` has registered: once is enough.
watching: list[Any] = []


def watch_optimizers(unit: Unit) -> None:
    """Check optimizers from now on, if some of them cannot step the parameters of ``unit``.

    Called when the unit is made: an optimizer's first step may run the first forward, in a closure.
    """
    if not watching and any(h.is_cut or not h.use_orig_params for h in unit.handles):
        watching.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # A compiled step is traced with its hooks; there is nothing in this one to compile.
    if torch.compiler.is_compiling() or type(optimizer) in _elementwise or optimizer in _seen:
        return
    names = {cls.__name__ for cls in type(optimizer).__mro__}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if names & OVER_ALL:
        _seen.add(optimizer)
        reason = "computes with all parameters together"
        _warn(optimizer, reason, filter(_is_cut, parameters), "Use an")
    elif names & (_OVER_EACH | _OVER_BLOCKS):
        _seen.add(optimizer)
        reason = "computes with each parameter as a whole"
        if not names & _OVER_EACH:
            reason = "computes with blocks of each parameter"
        found = (p for p in parameters if _is_cut(p) or _is_flat(p))
        _warn(optimizer, reason, found, "Give it whole tensors, with fullshard.optim.whole; use an")
    else:
        _elementwise.add(type(optimizer))


def _is_cut(parameter: Any) -> bool:
    return getattr(parameter, "_fullshard_is_cut", False)


def _is_flat(parameter: Any) -> bool:
    return getattr(parameter, "_is_flat_param", False)


def _warn(
    optimizer: torch.optim.Optimizer, reason: str, parameters: Iterable[Any], advice: str
) -> None:
    found = list(parameters)
    if not found:
        return
    what = "shards, which differ between ranks"
    if not any(map(_is_cut, found)):
        what = "flat parameters, which contain several parameters of the model"
    warnings.warn(
        f"{type(optimizer).__name__} {reason}, but {len(found)} of the tensors it was given are "
        f"{what}. It will train differently than on the whole model, or fail. "
        f"{advice} optimizer that updates element by element, such as AdamW or SGD; or let every "
        "rank keep whole parameters, with sharding_strategy=NO_SHARD and use_orig_params=True, or "
        "with ignored_states for those of this optimizer",
        UserWarning,
        stacklevel=4,
    )
