"""Memory for a checkpoint's optimizer state, for an optimizer that was never stepped.

``torch.distributed.checkpoint`` loads into tensors that are there. What there is to load is
written in the checkpoint; so state is laid out from that, whatever the optimizer would make.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from ...api import ShardedOptimStateDictConfig
from ..model.sharded_tensors import Rows
from .groups import named_groups
from .params import Original, Owned, owned_groups, parameter_groups_of


def optim_state_template(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    metadata: Any,
    root: tuple[str, ...] = ("optim",),
    config: ShardedOptimStateDictConfig | None = None,
) -> dict[str, Any]:
    """A sharded state dict for ``dcp.load``, shaped by a checkpoint's ``metadata``.

    ``root`` is where the optimizer's state dict was put in what ``dcp.save`` was given. Entries of
    parameters that ``optim`` does not have are left out.

    >>> reader = dcp.FileSystemReader(path)
    >>> state = {"optim": optim_state_template(model, optimizer, reader.read_metadata())}
    >>> dcp.load(state, storage_reader=reader)
    >>> loaded = FSDP.optim_state_dict_to_load(model, optimizer, state["optim"])
    >>> optimizer.load_state_dict(loaded)
    """
    config = config or ShardedOptimStateDictConfig()
    groups = owned_groups(model, parameter_groups_of(model, optim))
    places = {
        name: (owned, original)
        for group in groups
        for owned in group
        for original in owned.originals
        for name in original.names
    }
    state: dict[str, dict[str, Any]] = {}
    for (name, key), facts in _saved_entries(metadata, root).items():
        if name in places:
            owned, original = places[name]
            state.setdefault(name, {})[key] = _memory(owned, original, facts, config)
    return {"state": state, "param_groups": named_groups(optim.param_groups, groups)}


def _saved_entries(metadata: Any, root: tuple[str, ...]) -> dict[tuple[str, str], Any]:
    """(parameter, entry) → what the checkpoint says about it."""
    depth = len(root)
    found: dict[tuple[str, str], Any] = {}
    for flat, path in metadata.planner_data.items():
        if path[:depth] == root and path[depth : depth + 1] == ("state",):
            name, key = path[depth + 1], path[depth + 2]
            found[name, key] = metadata.state_dict_metadata[flat]
    return found


def _memory(
    owned: Owned, original: Original, facts: Any, config: ShardedOptimStateDictConfig
) -> Any:
    if not hasattr(facts, "size"):
        return None  # Not a tensor: the value itself is put here.
    dtype, shape = facts.properties.dtype, tuple(facts.size)
    if owned.unit is None or shape != owned.shape_of(original) or shape == ():
        return torch.zeros(shape, dtype=dtype)
    group = owned.unit.unit.shards
    last = Rows.of(shape[0], group.size - 1, group.size)
    if last.start == last.end:
        # torch.distributed.checkpoint overlooks a ShardedTensor on ranks that have no shard of it,
        # and takes the checkpoint for one of an older format that nests parameter groups.
        config = dataclasses.replace(config, _use_dtensor=True)
    # A tensor of any size without its memory: only this rank's chunk of it comes to exist.
    whole = torch.zeros((), dtype=dtype, device=owned.unit.unit.device).expand(shape)
    distribution = owned.distribution(original)
    if distribution is not None:
        whole = distribution.part(whole)
    return owned.unit.presented(whole, config, distribution)
