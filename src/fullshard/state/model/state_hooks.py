"""A unit's part in ``state_dict()`` and ``load_state_dict()``: hooks on the modules it manages.

Note: hooks, not swaps
    ``nn.Module`` walks the tree and writes down what it finds: pieces, or nothing where only a
    flat parameter is registered. After each module a hook puts the right values in their places.
    Nothing of the model is changed meanwhile, so an exception in the middle leaves nothing
    behind, and what users hook onto their modules sees what it would see in the bare model. The
    first module that is entered opens a session: the unit is gathered once, what is wanted is
    copied, and the whole buffer goes before the walk reaches the next unit. It does not matter
    where the walk began: at the root, at a unit, at a module inside one, or outside.

    Loading meets the same hooks before each module: a rank copies its own part of every value
    into its shard, then leaves the current piece in the value's place, which ``nn.Module`` copies
    onto itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from types import FrameType
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
from ...engine.params.handle import FlatParamHandle
from ...engine.params.locations import WRAPPED_MODULE
from ...engine.params.tensor_parallel import Distribution, local_part
from ...engine.runtime.forward import Schedule
from ...engine.runtime.unit import Unit
from . import gathering, sharded_tensors
from .distributed_values import as_joint_dtensor
from .loading import Arrivals, LoadReport
from .module_hooks import attach

#: What a local state dict calls a group's shard.
FLAT_NAME = "_flat_param"

Order = dict[nn.Module, tuple[str, ...]]


@dataclasses.dataclass
class Session:
    """The values that one ``state_dict()`` call takes from a unit.

    ``modules`` are those it has values of. ``around`` is that of a call that is not at its end yet:
    a user's hook may ask for a state dict in the middle of another one.
    """

    modules: set[nn.Module]
    values: dict[nn.Module, dict[str, Any]]
    call: FrameType
    around: Session | None

    def is_around(self, entering: FrameType | None) -> bool:
        """Whether the call ``entering`` a module was made by the one that opened the session.

        One that was broken off left its session open, with values of then.
        """
        while entering is not None and entering is not self.call:
            entering = entering.f_back
        return entering is not None


class ModelState:
    """Saves and loads one unit's parameters; made and kept by its wrapper."""

    def __init__(self, wrapper: Any, modules: Iterable[nn.Module], order: Order) -> None:
        self.settings = StateDictSettings(
            StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
        )
        self.mesh: sharded_tensors.SharedMesh | None = None
        self._own_mesh: sharded_tensors.SharedMesh | None = None
        self.order = order
        self._wrapper = wrapper
        self._session: Session | None = None
        self._managed: dict[nn.Module, dict[str, tuple[FlatParamHandle, int]]] = {}
        for handle in self.unit.handles:
            for index, places in enumerate(handle.places):
                for place in places:
                    self._managed.setdefault(place.module, {})[place.name] = (handle, index)
        #: The groups of ranks over which tensor parallelism spreads parameters, here or below.
        self.part_groups = tuple(
            dict.fromkeys(
                group
                for handle in self.unit.handles
                for distribution in handle.distributions
                if distribution is not None
                for group in distribution.groups
            )
        )
        self._modules = list(dict.fromkeys([*modules, *self._managed]))
        self._attach()

    def include_part_groups(self, below: Iterable[ModelState]) -> None:
        """Count the groups of nested units as this one's."""
        groups = [*self.part_groups, *(group for state in below for group in state.part_groups)]
        self.part_groups = tuple(dict.fromkeys(groups))

    def _attach(self) -> None:
        for module in self._modules:
            attach(module, self)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_session": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._attach()

    @property
    def unit(self) -> Unit:
        unit: Unit = self._wrapper._unit
        return unit

    @property
    def is_visible(self) -> bool:
        """Whether this rank is to have what it saves."""
        return self.is_first or not self._is_for_one

    @property
    def _is_for_one(self) -> bool:
        """Whether only one rank is to have it."""
        config = self.settings.state_dict_config
        return isinstance(config, FullStateDictConfig) and config.rank0_only

    @property
    def _takes_part(self) -> bool:
        """Whether this rank is among those that put whole parameters together."""
        return self.leads or not self._is_for_one

    @property
    def is_first(self) -> bool:
        """Whether this is the one rank that has what only one is to have."""
        return self.leads and all(group.rank == 0 for group in self.part_groups)

    @property
    def leads(self) -> bool:
        """Whether this is the first of the ranks that share, or copy, the same parts."""
        return self.unit.shards.rank == 0 and self.is_first_copy

    @property
    def is_first_copy(self) -> bool:
        """Whether this rank is among those that hold the first copy of the unit."""
        return self.unit.copies is None or self.unit.copies.rank == 0

    def refuse_inside_pass(self, what: str) -> None:
        schedule: Schedule | None = self._wrapper._schedule
        if schedule is not None and not schedule.wait_until_idle():
            raise RuntimeError(
                f"{what} of unit {self.unit.name!r} in the middle of a forward or backward: "
                "parameters come and go there. Call it between steps"
            )

    # -- saving -------------------------------------------------------------------------------

    def open(self, owner: nn.Module | None, call: FrameType) -> Session:
        """Take from the unit what a ``call`` needs that began at ``owner`` (None: the wrapper)."""
        self.refuse_inside_pass("state_dict()")
        around = self._current(call)
        below = set(self._managed) if owner is None else set(owner.modules())
        with torch.no_grad():
            self._session = Session(below, self._take(owner, below), call, around)
        return self._session

    def close(self, session: Session) -> None:
        """End the call that opened the session."""
        self._session = session.around

    def _current(self, call: FrameType) -> Session | None:
        """The session that ``call`` is a part of; those of calls that were broken off go."""
        while self._session is not None and not self._session.is_around(call):
            self._session = self._session.around
        return self._session

    def _take(
        self, owner: nn.Module | None, below: set[nn.Module]
    ) -> dict[nn.Module, dict[str, Any]]:
        wanted = {m: names for m, names in self._managed.items() if m in below}
        unit = self.unit
        if not unit.handles or not wanted:
            return {}
        if unit.shows_full and not unit.summoned:
            unit.keep_changes_so_far()
        elif not unit.summoned:
            unit.write_back()
        if self.settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
            if owner is not None and unit.module not in below:
                raise RuntimeError(
                    f"A local state dict is made of whole units, and {type(owner).__name__} is a "
                    f"part of unit {unit.name!r}: call state_dict() on the unit, or use another "
                    "state_dict_type"
                )
            return {unit.module: self._local_values()}
        whole = self._whole()
        made: dict[tuple[FlatParamHandle, int], Any] = {}
        for places in wanted.values():
            for handle, index in places.values():
                if handle in whole and (handle, index) not in made:
                    made[handle, index] = self.presented(
                        whole[handle][index],
                        self.settings.state_dict_config,
                        handle.distribution(index),
                    )
        return {
            module: {name: made[place] for name, place in names.items() if place in made}
            for module, names in wanted.items()
        }

    def _local_values(self) -> dict[str, Any]:
        shards = [self._local_value(handle) for handle in self.unit.handles]
        return dict(zip(self._flat_names(), shards, strict=True))

    def _local_value(self, handle: FlatParamHandle) -> Any:
        """This rank's shard, not copied; where others have other shards, as a part of the whole.

        What saves state dicts of many ranks takes plain tensors for the same on all of them. A
        shard that is pinned for an accelerator is copied: no ShardedTensor of it can be.
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

    def _flat_names(self) -> list[str]:
        return [f"{FLAT_NAME}_{i}" if i else FLAT_NAME for i in range(len(self.unit.handles))]

    def _whole(self) -> dict[FlatParamHandle, list[torch.Tensor]]:
        """Whole parameters of each group, as views; nothing on ranks that are to have nothing."""
        unit = self.unit
        if unit.summoned_everywhere:
            return {handle: _shown(handle) for handle in unit.handles} if self._takes_part else {}
        shards = [handle.shard_tensor for handle in unit.handles]
        if self._is_for_one:
            if not self.is_first_copy:
                return {}
            unit.shards.begin_pass("state dict on the first rank", unit.name)
            whole = gathering.gather_shards_to_first(unit, unit.handles, shards)
        else:
            unit.shards.begin_pass("state dict", unit.name)
            whole = gathering.gather_shards(unit, unit.handles, shards)
        return {h: gathering.whole_views(h, f) for h, f in zip(unit.handles, whole, strict=False)}

    def presented(
        self,
        whole: torch.Tensor,
        config: StateDictConfig | OptimStateDictConfig,
        distribution: Distribution | None = None,
    ) -> Any:
        """A copy of a whole parameter (or of state shaped like it) as ``config`` asks for it.

        With a ``distribution``, ``whole`` is this rank's part, and all ranks of its mesh call this.
        """
        unit = self.unit
        shape = whole.shape if distribution is None else distribution.shape
        if isinstance(
            config, ShardedStateDictConfig | ShardedOptimStateDictConfig
        ) and sharded_tensors.has_rows(shape):
            local = sharded_tensors.chunk(whole, unit.shards, config.offload_to_cpu)
            if distribution is not None:
                return as_joint_dtensor(local, unit, distribution)
            mesh = self._mesh_for(config._use_dtensor)
            if mesh is not None:
                return sharded_tensors.as_dtensor(local, whole.shape, mesh)
            return sharded_tensors.as_sharded_tensor(local, whole.shape, unit.shards)
        if distribution is not None:
            whole = distribution.whole(whole.to(unit.device))
        device = torch.device("cpu") if config.offload_to_cpu else whole.device
        return whole.detach().to(device, copy=True)

    def _mesh_for(self, use_dtensor: bool) -> Any:
        """The mesh that the user gave, or one of our own where DTensors are asked for."""
        if self.mesh is None and use_dtensor and self._own_mesh is None:
            self._own_mesh = sharded_tensors.SharedMesh(sharded_tensors.mesh_of(self.unit))
        shared = self.mesh or (self._own_mesh if use_dtensor else None)
        return None if shared is None else shared.mesh

    def before_save(self, module: nn.Module, call: FrameType) -> None:
        """A module is about to be written down by ``call``, a frame of ``state_dict()``."""
        session = self._current(call)
        if session is None or (module in self._managed and module not in session.modules):
            self.open(module, call)

    def after_save(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, call: FrameType
    ) -> None:
        """A module and all below it were written down, this unit's values still wrong."""
        session = self._current(call)
        if session is None:
            return
        hidden = dict.fromkeys(self._managed.get(module, ()))
        if module is self.unit.module:
            hidden[FLAT_NAME] = None
        values = session.values.get(module, {})
        for name in hidden:
            if name not in values:
                state_dict.pop(prefix + name, None)
        _put(state_dict, prefix, values, self._names(module, values))
        for name, dtype in self._wrapper._buffer_precision.registered(module).items():
            if prefix + name in state_dict:
                state_dict[prefix + name] = state_dict[prefix + name].to(dtype)
        if session.call is call:
            self.close(session)
            self.finish(state_dict, prefix)

    def _names(self, module: nn.Module, values: Mapping[str, Any]) -> tuple[str, ...]:
        flat = (name for name in values if name.startswith(FLAT_NAME))
        return (*flat, *self.order.get(module, values))

    def finish(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Apply to everything below ``prefix`` what is asked of the state dict as a whole."""
        keys = [key for key in state_dict if key.startswith(prefix)]
        for key in keys:
            if not self.is_visible:
                del state_dict[key]
            elif self.settings.state_dict_config.offload_to_cpu:
                value = state_dict[key]
                if isinstance(value, torch.Tensor) and not sharded_tensors.is_sharded(value):
                    state_dict[key] = value.to("cpu")

    # -- loading ------------------------------------------------------------------------------

    def before_load(
        self,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        """A module is about to be loaded; the arguments are those of a hook before it."""
        self._prepare_to_load()
        report = LoadReport(missing, unexpected, errors)
        managed = self._managed.get(module, {})
        if managed:
            # Assigning would put new parameters where the unit's own belong.
            local_metadata.pop("assign_to_params_buffers", None)
        is_local = self.settings.state_dict_type is StateDictType.LOCAL_STATE_DICT
        if module is self.unit.module:
            self._load_flat(state_dict, prefix, report, is_local)
        arrivals = Arrivals(self.unit, report)
        for name in filter(managed.__contains__, self.order.get(module, managed)):
            key = prefix + name
            handle, index = managed[name]
            registered = module._parameters.get(name)
            if is_local:
                if key in state_dict:
                    report.unexpected.append(_clean(key))
            elif key in state_dict:
                # torch.distributed.checkpoint fills up partial state dicts with what is there.
                if not _holds(handle, index, state_dict[key]):
                    arrivals.add(_clean(key), handle, index, state_dict[key])
            elif registered is None:
                report.missing.append(key)
            if self.unit.summoned_everywhere and not is_local:
                distribution = handle.distribution(index)
                if distribution is not None and key in state_dict:
                    # nn.Module copies it onto the DTensor that is shown, from another one.
                    state_dict[key] = distribution.distribute(state_dict[key])
                continue
            if registered is None:
                state_dict.pop(key, None)
            elif key in state_dict or is_local:
                state_dict[key] = registered.detach()
        with torch.no_grad():
            arrivals.store()

    def _prepare_to_load(self) -> None:
        self.refuse_inside_pass("load_state_dict()")
        wrapper = self._wrapper
        if wrapper._schedule is not None and not self.unit.summoned:
            wrapper._schedule.rest(self.unit)
        if not self.unit.summoned:
            self.unit.write_back()
        wrapper._buffer_precision.restore()

    def _load_flat(
        self, state_dict: dict[str, Any], prefix: str, report: LoadReport, is_local: bool
    ) -> None:
        """Load shards by the names of a local state dict; in others such names are unexpected."""
        for name, handle in zip(self._flat_names(), self.unit.handles, strict=True):
            key = prefix + name
            shard = state_dict.pop(key, None)
            if is_local and shard is None:
                report.missing.append(_clean(key))
            elif is_local:
                Arrivals(self.unit, report).store_shard(_clean(key), handle, shard)
            elif shard is not None:
                report.unexpected.append(_clean(key))
        registered = self.unit.module._parameters.get(FLAT_NAME)
        if registered is not None:
            state_dict[prefix + FLAT_NAME] = registered.detach()


def _shown(handle: FlatParamHandle) -> list[torch.Tensor]:
    """The full parameters that ``summon_full_params`` shows now, changes included."""
    found = [places[0].module._parameters[places[0].name] for places in handle.places]
    return [local_part(parameter.detach()) for parameter in found if parameter is not None]


def _holds(handle: FlatParamHandle, index: int, value: Any) -> bool:
    """Whether ``value`` is what this rank holds of a parameter: to load it changes nothing."""
    own = handle.params[index] if handle.use_orig_params else handle.flat_param
    return value is own


def _put(
    state_dict: dict[str, Any], prefix: str, values: Mapping[str, Any], order: tuple[str, ...]
) -> None:
    """Put a module's values in their places, before whatever else the module wrote down."""
    if not values:
        return
    if all(prefix + name in state_dict for name in values):
        state_dict.update({prefix + name: value for name, value in values.items()})
        return
    tail: dict[str, Any] = {}
    for key in reversed(list(state_dict)):
        if not key.startswith(prefix):
            break
        tail[key] = state_dict.pop(key)
    for name in order:
        if name in values:
            tail.pop(prefix + name, None)
            state_dict[prefix + name] = values[name]
        elif prefix + name in tail:
            state_dict[prefix + name] = tail.pop(prefix + name)
    state_dict.update(reversed(tail.items()))


def _clean(key: str) -> str:
    """A key as users know it."""
    return key.replace(f"{WRAPPED_MODULE}.", "")
