"""Read-only attributes of a wrapper: the options it was given and the parts it is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import nn

from .api import BackwardPrefetch, ShardingStrategy
from .engine.params.flat_parameter import FlatParameter
from .engine.params.handle import FlatParamHandle
from .engine.runtime.forward import Schedule
from .engine.runtime.unit import Unit


class TrainingState(Enum):
    """The state of a wrapper: idle, in a forward or backward, or inside ``summon_full_params``."""

    IDLE = auto()
    FORWARD_BACKWARD = auto()
    SUMMON_FULL_PARAMS = auto()


class Introspection(nn.Module):
    """Read-only attributes of a wrapper's unit, under the names that programs already use."""

    _unit: Unit
    _schedule: Schedule | None
    _full_precision_in_eval: bool

    @property
    def process_group(self) -> Any:
        return self._unit.shards.group

    @property
    def _inter_node_pg(self) -> Any:
        """The group of ranks that hold replicas of the same shard; None unless hybrid."""
        return None if self._unit.copies is None else self._unit.copies.group

    @property
    def rank(self) -> int:
        return self._unit.shards.rank

    @property
    def world_size(self) -> int:
        return self._unit.shards.size

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        return self._unit.options.strategy

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        return self._unit.options.backward_prefetch

    @property
    def forward_prefetch(self) -> bool:
        return self._unit.options.forward_prefetch

    @property
    def limit_all_gathers(self) -> bool:
        return self._unit.options.limit_all_gathers

    @property
    def compute_device(self) -> torch.device:
        return self._unit.device

    @property
    def _use_orig_params(self) -> bool:
        return self._unit.options.use_orig_params

    @property
    def _handle(self) -> FlatParamHandle | None:
        return self._unit.handles[0] if self._unit.handles else None

    @property
    def _has_params(self) -> bool:
        return bool(self._unit.handles)

    @property
    def _flat_param(self) -> FlatParameter | None:
        return self._unit.handles[0].flat_param if self._unit.handles else None

    @property
    def _all_handles(self) -> list[FlatParamHandle]:
        """The handles of this wrapper's unit and of the units nested in it."""
        return [h for m in self.modules() if isinstance(m, Introspection) for h in m._unit.handles]

    @property
    def _sync_gradients(self) -> bool:
        """True if backward reduces gradients across ranks; False inside ``no_sync``."""
        return self._unit.syncs_gradients

    @property
    def _comm_hook(self) -> Callable[..., Any] | None:
        """The hook passed to ``register_comm_hook``."""
        hook = self._unit.reduction.comm_hook
        return None if hook is None else hook.given

    @property
    def _comm_hook_state(self) -> object:
        """The state passed to ``register_comm_hook``, the first argument of the hook."""
        hook = self._unit.reduction.comm_hook
        return None if hook is None else hook.state

    @property
    def _use_full_prec_in_eval(self) -> bool:
        return self._full_precision_in_eval

    @property
    def _is_summoned(self) -> bool:
        """True inside ``summon_full_params``, even for a unit without parameters."""
        return self._unit.summoning > 0

    @property
    def training_state(self) -> TrainingState:
        if self._is_summoned:
            return TrainingState.SUMMON_FULL_PARAMS
        if self._schedule is not None and not self._schedule.is_idle:
            return TrainingState.FORWARD_BACKWARD
        return TrainingState.IDLE

    def _assert_idle(self) -> None:
        self._assert_state(TrainingState.IDLE)

    def _assert_state(self, state: TrainingState | Sequence[TrainingState]) -> None:
        expected = [state] if isinstance(state, TrainingState) else list(state)
        if self.training_state not in expected:
            raise ValueError(
                f"Unit {self._unit.name!r} is expected to be in states {expected} but current "
                f"state is {self.training_state}"
            )
