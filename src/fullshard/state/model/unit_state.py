"""The values of one unit in a state dict: full, sharded or local, by module and parameter name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ...api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from ...engine.comm.collectives import Group
from ...engine.params.handle import FlatParamHandle
from ...engine.params.tensor_parallel import Distribution, local_part
from ...engine.runtime.forward import Schedule
from ...engine.runtime.unit import Unit
from . import gathering, sharded_tensors
from .distributed_values import as_joint_dtensor

#: The name of a group's shard in a local state dict.
FLAT_NAME = "_flat_param"

Values = dict[nn.Module, dict[str, Any]]


class UnitState:
    """One unit's state dict settings, and the values that it saves; its wrapper owns it."""

    def __init__(self, wrapper: Any, nested: Iterable[UnitState]) -> None:
        self.settings = StateDictSettings(
            StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
        )
        self.mesh: sharded_tensors.SharedMesh | None = None
        self._own_mesh: sharded_tensors.SharedMesh | None = None
        self._wrapper = wrapper
        #: The unit's parameters by module and name: the group and the parameter's index in it.
        self.managed: dict[nn.Module, dict[str, tuple[FlatParamHandle, int]]] = {}
        for handle in self.unit.handles:
            for index, places in enumerate(handle.places):
                for place in places:
                    self.managed.setdefault(place.module, {})[place.name] = (handle, index)
        groups = [
            group
            for handle in self.unit.handles
            for distribution in handle.distributions
            if distribution is not None
            for group in distribution.groups
        ]
        for state in nested:
            groups += state.part_groups
        #: The process groups of tensor parallelism, of this unit's parameters and nested units'.
        self.part_groups: tuple[Group, ...] = tuple(dict.fromkeys(groups))

    def use_settings(self, settings: StateDictSettings) -> None:
        """Save and load state dicts of another type from now on."""
        self.settings = settings

    def use_mesh(self, mesh: sharded_tensors.SharedMesh) -> None:
        """Save DTensors on ``mesh`` from now on, unless the unit has a mesh already."""
        self.mesh = self.mesh or mesh

    @property
    def unit(self) -> Unit:
        unit: Unit = self._wrapper._unit
        return unit

    def refuse_inside_pass(self, what: str) -> None:
        """Raise RuntimeError in the middle of a step, where full parameters come and go."""
        schedule: Schedule | None = self._wrapper._schedule
        if schedule is not None and not schedule.wait_until_idle():
            raise RuntimeError(
                f"{what} of unit {self.unit.name!r} was called in the middle of a forward or "
                "backward, while parameters are unsharded and resharded. Call it between steps"
            )

    # -- ranks --------------------------------------------------------------------------------

    @property
    def is_visible(self) -> bool:
        """True if this rank's state dict has the values."""
        return self.is_first or not self._only_first

    @property
    def _only_first(self) -> bool:
        """True if the first rank alone gets a full state dict."""
        config = self.settings.state_dict_config
        return isinstance(config, FullStateDictConfig) and config.rank0_only

    @property
    def is_first(self) -> bool:
        """True on the first rank, which alone has the values with ``rank0_only``."""
        return self.leads and all(group.rank == 0 for group in self.part_groups)

    @property
    def leads(self) -> bool:
        """True on the first of the ranks that share, or copy, the same tensor-parallel part."""
        return self.unit.shards.rank == 0 and self.is_first_copy

    @property
    def is_first_copy(self) -> bool:
        """True on the ranks that hold the first copy of the unit (hybrid sharding)."""
        return self.unit.copies is None or self.unit.copies.rank == 0

    # -- values -------------------------------------------------------------------------------

    def values(self, owner: nn.Module | None, below: set[nn.Module]) -> Values:
        """Copy the values of the modules in ``below`` out of the unit, for a state dict.

        The state dict is that of ``owner``, or of the wrapper if that is None. Ranks that do not
        get the values take part in the communication and return nothing.
        """
        wanted = {m: names for m, names in self.managed.items() if m in below}
        unit = self.unit
        if not wanted:
            return {}
        if unit.shows_full and not unit.summoned:
            unit.keep_changes_so_far()
        elif not unit.summoned:
            unit.write_back()
        if self.settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
            if owner is not None and unit.module not in below:
                raise RuntimeError(
                    f"A local state dict consists of whole units, and {type(owner).__name__} is a "
                    f"part of unit {unit.name!r}. Call state_dict() on the unit, or use another "
                    "state_dict_type"
                )
            shards = [self._local_value(handle) for handle in unit.handles]
            return {unit.module: dict(zip(self.flat_names(), shards, strict=True))}
        full = self._full_parameters()
        config = self.settings.state_dict_config
        # Shared parameters are copied once.
        copies: dict[tuple[FlatParamHandle, int], Any] = {}
        for handle, index in dict.fromkeys(p for names in wanted.values() for p in names.values()):
            if handle in full:
                distribution = handle.distribution(index)
                copy = self.saved_copy(full[handle][index], config, distribution)
                if not sharded_tensors.is_sharded(copy):
                    copy = handle.saved(index, copy)
                copies[handle, index] = copy
        return {
            module: {name: copies[place] for name, place in names.items() if place in copies}
            for module, names in wanted.items()
        }

    def flat_names(self) -> list[str]:
        """The names of the unit's shards in a local state dict."""
        return [f"{FLAT_NAME}_{i}" if i else FLAT_NAME for i in range(len(self.unit.handles))]

    def _local_value(self, handle: FlatParamHandle) -> Any:
        """This rank's shard, not copied, as a ShardedTensor if other ranks have other shards.

        Programs that save the state dicts of many ranks take a plain tensor to be the same on all
        of them. A shard in pinned memory is copied, since a ShardedTensor cannot hold it.
        """
        shard = handle.shard_tensor.detach()
        if self.settings.state_dict_config.offload_to_cpu:
            shard = shard.to("cpu")
        if shard.is_pinned():
            shard = shard.clone()
        shape = (handle.layout.numel,)
        if not handle.is_sharded or not sharded_tensors.has_rows(shape):
            return shard
        return sharded_tensors.as_sharded_tensor(shard, shape, self.unit.shards)

    def _full_parameters(self) -> dict[FlatParamHandle, list[torch.Tensor]]:
        """Views of each group's full parameters; empty on ranks that do not get the values."""
        unit = self.unit
        if unit.summoned_everywhere:
            takes_part = self.leads or not self._only_first
            return {handle: _summoned(handle) for handle in unit.handles} if takes_part else {}
        shards = [handle.shard_tensor for handle in unit.handles]
        if self._only_first:
            if not self.is_first_copy:
                return {}
            unit.shards.begin_pass("state dict on the first rank", unit.name)
            full = gathering.gather_shards_to_first(unit, unit.handles, shards)
        else:
            unit.shards.begin_pass("state dict", unit.name)
            full = gathering.gather_shards(unit, unit.handles, shards)
        return {h: gathering.full_views(h, f) for h, f in zip(unit.handles, full, strict=False)}

    def saved_copy(
        self,
        full: torch.Tensor,
        config: StateDictConfig | OptimStateDictConfig,
        distribution: Distribution | None = None,
    ) -> Any:
        """Copy a full parameter, or state of its shape, into the tensor that ``config`` asks for.

        With a ``distribution``, ``full`` is this rank's part of a tensor-parallel parameter, and
        all ranks of its mesh call this.
        """
        unit = self.unit
        shape = full.shape if distribution is None else distribution.shape
        if (
            isinstance(config, ShardedStateDictConfig | ShardedOptimStateDictConfig)
            and sharded_tensors.has_rows(shape)
            and (distribution is not None or self._saves_chunks(config._use_dtensor))
        ):
            local = sharded_tensors.chunk(full, unit.shards, config.offload_to_cpu)
            if distribution is not None:
                return as_joint_dtensor(local, unit, distribution)
            mesh = self._mesh_for(config._use_dtensor)
            if mesh is not None:
                return sharded_tensors.as_dtensor(local, full.shape, mesh)
            return sharded_tensors.as_sharded_tensor(local, full.shape, unit.shards)
        if distribution is not None:
            full = distribution.whole(full.to(unit.device))
        device = torch.device("cpu") if config.offload_to_cpu else full.device
        return full.detach().to(device, copy=True)

    def _saves_chunks(self, use_dtensor: bool) -> bool:
        """True if each rank saves a chunk of rows in a sharded state dict.

        A single rank saves plain tensors, which need no process group to be loaded, unless there
        is a device mesh.
        """
        return self.unit.world_size > 1 or self.mesh is not None or use_dtensor

    def _mesh_for(self, use_dtensor: bool) -> Any:
        """The mesh that the user gave, or one over the unit's ranks if DTensors are asked for."""
        if self.mesh is None and use_dtensor and self._own_mesh is None:
            self._own_mesh = sharded_tensors.SharedMesh(sharded_tensors.mesh_of(self.unit))
        shared = self.mesh or (self._own_mesh if use_dtensor else None)
        return None if shared is None else shared.mesh

    # -- loading ------------------------------------------------------------------------------

    def prepare_to_load(self) -> None:
        """Reshard the unit, and take over what the user has replaced, before values are loaded."""
        self.refuse_inside_pass("load_state_dict()")
        if not self.unit.summoned:
            if self._wrapper._schedule is not None:
                self._wrapper._schedule.rest(self.unit)
            self.unit.write_back()
        self._wrapper._buffer_precision.restore()

    def buffer_dtypes(self, module: nn.Module) -> dict[str, torch.dtype]:
        """The dtypes in which the module's buffers were registered, where they have changed."""
        dtypes: dict[str, torch.dtype] = self._wrapper._buffer_precision.registered(module)
        return dtypes


def _summoned(handle: FlatParamHandle) -> list[torch.Tensor]:
    """The full parameters that ``summon_full_params`` shows now, with the user's changes."""
    found = [places[0].module._parameters[places[0].name] for places in handle.places]
    return [
        handle.packed(index, local_part(parameter.detach()))
        for index, parameter in enumerate(found)
        if parameter is not None
    ]
