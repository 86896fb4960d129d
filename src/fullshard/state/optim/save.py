"""Optimizer state of a sharded model as that of the unwrapped one: full or in sharded tensors.

Note: what is sent
    Facts first (see ``consensus.py``), once per process group. Then, for each unit and each entry
    that has a value per element, one gather of what all parameters of the unit have under it. The
    whole buffer goes before the next one comes, so the device holds one of them at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ...api import FullOptimStateDictConfig, OptimStateDictConfig
from ...engine.comm.collectives import Group
from ...engine.params.handle import FlatParamHandle
from ..model import gathering
from ..model.state_hooks import ModelState
from .consensus import (
    Entry,
    Forms,
    Kind,
    States,
    check_beside,
    check_same_parameters,
    facts_beside,
    facts_here,
    resolve,
    with_digests,
)
from .params import Groups, Owned, in_model_order, units_of

Saved = dict[str, dict[str, Any]]


class Saving:
    """One call that turns the optimizer's state into that of the unwrapped model."""

    def __init__(self, groups: Groups, states: States, config: OptimStateDictConfig) -> None:
        self._groups = groups
        self._states = states
        self._config = config
        self._to_first = isinstance(config, FullOptimStateDictConfig) and config.rank0_only
        self._found: Saved = {}

    def run(self) -> Saved:
        """The state of each parameter by its name; what other ranks are to have is left out."""
        units = units_of(self._groups)
        if self._to_first:
            units = {unit: owns for unit, owns in units.items() if unit.is_first_copy}
        entries = self._agree(owned for owns in units.values() for owned in owns if owned.is_spread)
        for unit, owns in units.items():
            self._take_unit(unit, owns, entries)
        for owned in in_model_order(self._groups):
            if owned.handle is None or owned.unit in units:
                self._take_unsharded(owned, entries.get(owned))
        return self._in_order()

    def _agree(self, owns: Iterable[Owned]) -> dict[Owned, dict[str, Entry]]:
        sharing: dict[Group, list[Owned]] = {}
        for owned in owns:
            assert owned.unit is not None
            sharing.setdefault(owned.unit.unit.shards, []).append(owned)
        entries: dict[Owned, dict[str, Entry]] = {}
        for group, members in sharing.items():
            group.begin_pass("optimizer state", "(all)")
            mine = facts_here(members, self._states)
            beside = facts_beside(members, self._states)
            told = ([owned.path for owned in members], mine, beside)
            paths, reports, besides = zip(*group.gather_objects(told, "(all)"), strict=True)
            check_same_parameters(paths)
            forms = Forms.of(reports)
            if by_accident := forms.by_accident():
                mine = with_digests(mine, members, self._states, by_accident)
                reports = tuple(group.gather_objects(mine, "(all)"))
            check_beside(members, reports, besides)
            entries.update(zip(members, resolve(members, reports, forms), strict=True))
        self._agree_between_parts(entries)
        return entries

    def _agree_between_parts(self, entries: dict[Owned, dict[str, Entry]]) -> None:
        """Let ranks with an empty part of a parameter, which have no state for it, know of others'.

        All ranks of a mesh put a tensor-parallel parameter's state together.
        """
        sharing: dict[Group, list[Owned]] = {}
        for owned in entries:
            parts = (d.parts for o in owned.originals if (d := owned.distribution(o)) is not None)
            for group in dict.fromkeys(group for groups in parts for group in groups):
                sharing.setdefault(group, []).append(owned)
        for group, members in sharing.items():
            group.begin_pass("optimizer state of parts", "(all)")
            reports = group.gather_objects([entries[owned] for owned in members], "(all)")
            for owned, *found in zip(members, *reports, strict=True):
                entries[owned] = next(filter(None, found), {})

    # -- entries with a value per element -----------------------------------------------------

    def _take_unit(
        self, unit: ModelState, owns: Sequence[Owned], entries: dict[Owned, dict[str, Entry]]
    ) -> None:
        wanted: dict[tuple[FlatParamHandle, str, torch.dtype], list[Owned]] = {}
        for owned in owns:
            handle = owned.handle
            assert handle is not None
            for key, entry in entries.get(owned, {}).items():
                if entry.kind is Kind.PER_ELEMENT:
                    assert entry.fact.dtype is not None
                    wanted.setdefault((handle, key, entry.fact.dtype), []).append(owned)
        # Ranks with another first holder may have met the entries in another order.
        order = {handle: position for position, handle in enumerate(unit.unit.handles)}
        for (handle, key, dtype), members in sorted(
            wanted.items(), key=lambda item: (order[item[0][0]], item[0][1], str(item[0][2]))
        ):
            self._take_entry(unit, handle, key, dtype, members)

    def _take_entry(
        self,
        unit: ModelState,
        handle: FlatParamHandle,
        key: str,
        dtype: torch.dtype,
        members: Sequence[Owned],
    ) -> None:
        shard = self._shard(handle, key, dtype, members)
        whole = self._gather(unit, handle, shard)
        if whole is None:
            return
        views = gathering.whole_views(handle, whole)
        for owned in members:
            for original in owned.originals:
                value = unit.presented(
                    views[original.index], self._config, owned.distribution(original)
                )
                self._found.setdefault(original.name, {})[key] = value

    def _shard(
        self, handle: FlatParamHandle, key: str, dtype: torch.dtype, members: Sequence[Owned]
    ) -> torch.Tensor:
        """One entry of all ``members`` as it would lie in this rank's shard."""
        here = [owned for owned in members if owned.is_here]
        if not handle.use_orig_params:
            flat: torch.Tensor = self._states[here[0]][key]
            return flat.detach().contiguous()
        shard = torch.zeros(handle.layout.shard_numel, dtype=dtype, device=handle.device)
        for owned in here:
            piece = owned.piece(owned.originals[0])
            if not piece.numel:
                continue
            shard[piece.offset : piece.offset + piece.numel].copy_(self._states[owned][key])
        return shard

    def _gather(
        self, unit: ModelState, handle: FlatParamHandle, shard: torch.Tensor
    ) -> torch.Tensor | None:
        # Backends know few of the types that are a byte wide.
        sent = shard.view(torch.uint8) if shard.dtype.itemsize == 1 else shard
        if self._to_first:
            whole = gathering.gather_shards_to_first(unit.unit, [handle], [sent])
        else:
            whole = gathering.gather_shards(unit.unit, [handle], [sent])
        return whole[0].view(shard.dtype) if whole else None

    # -- everything else ------------------------------------------------------------------------

    def _take_unsharded(self, owned: Owned, entries: dict[str, Entry] | None) -> None:
        if entries is None:
            for key, value in self._states.get(owned, {}).items():
                self._take_whole(owned, key, value)
            return
        for key, entry in entries.items():
            if entry.kind is not Kind.PER_ELEMENT:
                value = self._common(owned, key, entry)
                for original in owned.originals:
                    self._found.setdefault(original.name, {})[key] = self._copied(value)

    def _take_whole(self, owned: Owned, key: str, value: Any) -> None:
        """Take an entry of a parameter that every rank has all of."""
        fits = isinstance(value, torch.Tensor) and tuple(value.shape) == owned.local_shape
        views = [value] * len(owned.originals)
        if fits and owned.is_flat:
            assert owned.handle is not None
            views = gathering.whole_views(owned.handle, value.detach().contiguous())
        for original in owned.originals:
            view = views[original.index if owned.is_flat else 0]
            if fits and owned.unit is not None:
                saved = owned.unit.presented(view, self._config, owned.distribution(original))
            else:
                saved = self._copied(view)
            self._found.setdefault(original.name, {})[key] = saved

    def _common(self, owned: Owned, key: str, entry: Entry) -> Any:
        """An entry that is the same on all ranks, also on those that have no state for it."""
        fact = entry.fact
        assert owned.unit is not None
        unit = owned.unit.unit
        on_host = fact.on_host or self._config.offload_to_cpu
        device = torch.device("cpu") if on_host else unit.device
        if entry.kind is Kind.NUMBER:
            return torch.tensor(fact.value, dtype=fact.dtype, device=device)
        mine: Any = self._states.get(owned, {}).get(key)
        if entry.kind is Kind.OTHER:
            return fact.value
        if entry.kind is Kind.NESTED:
            is_holder = unit.shards.rank == entry.holder
            sent = tree_map(_on_host, mine) if is_holder else None
            return unit.shards.gather_objects(sent, unit.name)[entry.holder]
        assert fact.shape is not None
        sent = torch.zeros(fact.shape, dtype=fact.dtype, device=unit.device)
        if unit.shards.rank == entry.holder:
            sent.copy_(mine)
        # A sum with zeros, of bytes: every bit arrives as it was.
        unit.shards.all_reduce(sent.reshape(-1).view(torch.uint8), unit.name, "optimizer state")
        return sent.to(device)

    def _copied(self, value: Any) -> Any:
        to_cpu = self._config.offload_to_cpu

        def copied(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            device = torch.device("cpu") if to_cpu else leaf.device
            return leaf.detach().to(device, copy=True)

        return tree_map(copied, value)

    # -- the result -----------------------------------------------------------------------------

    def _in_order(self) -> Saved:
        """By the order of the optimizer's parameters, as the unwrapped model's has it."""
        originals = (o for group in self._groups for owned in group for o in owned.originals)
        return {o.name: self._found[o.name] for o in originals if o.name in self._found}


def _on_host(leaf: Any) -> Any:
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else leaf
