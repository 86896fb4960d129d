"""``fully_shard.state(module)``: those attributes of torch's state objects that others read.

They are private names of torch's, which have no public counterpart. Torch's pipeline schedules read
them to have the gradients of all microbatches reduced at the end of a step.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from ..engine.params.handle import FlatParamHandle
    from .module_unit import ModuleUnit


class ParameterState:
    """One parameter of a module; ``_param_fqn`` is its name from the first forward on."""

    def __init__(self, of: ModuleUnit, handle: FlatParamHandle, index: int) -> None:
        self._handle, self._index = handle, index
        self._places = handle.places[index]
        path = self._places[0].path
        self._param_fqn = None if of.path is None else f"{of.path}.{path}".lstrip(".")

    @property
    def sharded_param(self) -> nn.Parameter:
        return self._handle.params[self._index]

    @property
    def orig_dtype(self) -> torch.dtype:
        return self._handle.dtypes.shard

    @property
    def _orig_size(self) -> torch.Size:
        return torch.Size(self._handle.layout.slots[self._index].shape)

    @property
    def _module_info(self) -> Any:
        first, *others = self._places
        return SimpleNamespace(
            module=first.module,
            param_name=first.name,
            shared_modules=[place.module for place in others],
            shared_param_names=[place.name for place in others],
        )


class GroupState:
    """The parameters of one module, or of several that were given to ``fully_shard`` together."""

    def __init__(self, of: ModuleUnit) -> None:
        self._of = of

    def post_backward(self, *_: Any) -> None:
        """Reduce the gradients that backwards kept, of all units that synchronize gradients.

        Units whose gradients are reduced already are left alone, so each group may be asked.
        """
        schedule = self._of.schedule or self._of.start()
        schedule.reduce_kept()

    @property
    def fsdp_params(self) -> list[ParameterState]:
        """In the order in which the modules have them; handles have them by dtype."""
        by_place = {
            (places[0].module, places[0].name): ParameterState(self._of, handle, index)
            for handle in self._of.unit.handles
            for index, places in enumerate(handle.places)
        }
        everything = (module for each in self._of.modules for module in each.modules())
        order = ((module, name) for module in everything for name in module._parameters)
        return [by_place[place] for place in order if place in by_place]

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return tuple(self._of.modules)

    @property
    def mp_policy(self) -> Any:
        return self._of.precision

    @property
    def device(self) -> torch.device:
        return self._of.unit.device

    @property
    def mesh_info(self) -> Any:
        groups, mesh = self._of.mesh.groups, self._of.mesh.mesh
        shards: Any = groups.shards
        return SimpleNamespace(
            mesh=mesh,
            shard_mesh_size=shards.size(),
            shard_mesh_rank=shards.rank(),
            shard_process_group=shards,
            replicate_process_group=groups.copies,
        )

    @property
    def is_sharded(self) -> bool:
        return not self._of.unit.shows_full

    @property
    def is_unsharded(self) -> bool:
        return self._of.unit.shows_full

    @property
    def _module_fqn(self) -> str | None:
        return self._of.path

    @property
    def _reshard_after_forward(self) -> bool:
        return self._of.unit.options.frees_after_forward

    def unshard(self, async_op: bool = False) -> None:
        """As ``FSDPModule.unshard``."""
        self._of.modules[0].unshard(async_op)  # type: ignore[operator]

    def reshard(self) -> None:
        """As ``FSDPModule.reshard``."""
        self._of.modules[0].reshard()  # type: ignore[operator]


class ModuleState:
    """The state of one module, or of several that were given to ``fully_shard`` together."""

    def __init__(self, of: ModuleUnit) -> None:
        self._of = of
        self._fsdp_param_groups = [GroupState(of)] if of.unit.handles else []

    @property
    def _fsdp_param_group(self) -> GroupState | None:
        return next(iter(self._fsdp_param_groups), None)

    @property
    def _modules(self) -> tuple[nn.Module, ...]:
        return tuple(self._of.modules)

    @property
    def _mp_policy(self) -> Any:
        return self._of.precision

    @property
    def _device(self) -> torch.device:
        return self._of.unit.device

    @property
    def _is_root(self) -> bool | None:
        return self._of.is_root

    @property
    def _state_ctx(self) -> Any:
        return SimpleNamespace(all_states=[other.state for _, other in self._of.below()])

    def _lazy_init(self) -> None:
        if self._of.schedule is None:
            self._of.start()

    def _root_post_backward_final_callback(self) -> None:
        """Nothing is left to do: whatever was reduced is there."""
