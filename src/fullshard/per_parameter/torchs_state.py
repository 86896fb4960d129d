"""``fully_shard.state(module)``: those attributes of torch's state objects that others read.

They are private names of torch's, which have no public counterpart. Torch's pipeline schedules read
them to have the gradients of all microbatches reduced at the end of a step.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from .module_unit import ModuleUnit


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
