"""A wrapper's ``state_dict`` and ``load_state_dict``, and the choice of the state dict type."""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Generator, Iterable, Mapping
from typing import Any

from torch import nn

from ...api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    adopt,
)
from ...engine.params.locations import WRAPPED_MODULE
from .hooks import Order, UnitHooks, load_last
from .sharded_tensors import SharedMesh
from .unit_state import UnitState

_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


class StateDicts(nn.Module):
    """The state-dict methods of a wrapper."""

    _unit_state: UnitState
    _unit_hooks: UnitHooks
    _load_errors: list[str]

    def _keep_state(
        self, modules: Iterable[nn.Module], order: Order, nested: Iterable[Any]
    ) -> None:
        """Take part in state dicts; ``order`` is that of the parameters before flattening."""
        known: dict[nn.Module, tuple[str, ...]] = {}
        below: list[StateDicts] = list(nested)
        for wrapper in below:
            known.update(wrapper._unit_hooks.order)
        known.update(order)
        state = UnitState(self, [wrapper._unit_state for wrapper in below])
        hooks = UnitHooks(state, modules, known)
        # Past nn.Module.__setattr__, which is slow and has nothing to register here.
        self.__dict__.update(_unit_state=state, _unit_hooks=hooks, _load_errors=[])
        self.register_load_state_dict_post_hook(_report_clean_names)

    def _keep_mesh(self, mesh: Any, nested: Iterable[Any]) -> None:
        """Save DTensors on ``mesh``, as do the nested units that use the same ranks."""
        if mesh is None:
            return
        shared, own = SharedMesh(mesh), self._unit_state.unit
        for wrapper in (self, *nested):
            state: UnitState = wrapper._unit_state
            if state.unit.shards is own.shards and state.unit.copies is own.copies:
                state.use_mesh(shared)

    @property
    def _device_mesh(self) -> Any:
        """The mesh that the wrapper was given, or None."""
        shared = self._unit_state.mesh
        return None if shared is None else shared.mesh

    # -- the types ----------------------------------------------------------------------------

    @property
    def _state_dict_type(self) -> StateDictType:
        return self._unit_state.settings.state_dict_type

    @property
    def _state_dict_config(self) -> StateDictConfig:
        return self._unit_state.settings.state_dict_config

    @property
    def _optim_state_dict_config(self) -> OptimStateDictConfig:
        return self._unit_state.settings.optim_state_dict_config

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: Any,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> StateDictSettings:
        """Set the state dict type of all units in ``module``; return the previous settings."""
        settings = _settings(state_dict_type, state_dict_config, optim_state_dict_config)
        before = StateDicts.get_state_dict_type(module)
        for state in _states(module):
            state.use_settings(settings)
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """Return the state dict settings of the units in ``module``."""
        found = [state.settings for state in _states(module)]
        for other in found[1:]:
            if other != found[0]:
                raise AssertionError(
                    "All FSDP modules must have the same state dict settings. Got "
                    f"{other} and {found[0]}; set them on the outermost module"
                )
        return found[0] if found else _settings(StateDictType.FULL_STATE_DICT)

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: Any,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> Generator[None, None, None]:
        """Set the state dict type of all units in ``module`` for the duration of the context.

        >>> with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        ...     state = model.state_dict()
        """
        settings = _settings(state_dict_type, state_dict_config, optim_state_dict_config)
        before = [(state, state.settings) for state in _states(module)]
        for state, _ in before:
            state.use_settings(settings)
        try:
            yield
        finally:
            for state, old in before:
                state.use_settings(old)

    # -- saving -------------------------------------------------------------------------------

    def state_dict(  # type: ignore[override]
        self,
        *args: Any,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Return the state by the names of the unwrapped model, in the type that is set."""
        given = dict(zip(("destination", "prefix", "keep_vars"), args, strict=False))
        destination = given.get("destination", destination)
        prefix, keep_vars = given.get("prefix", prefix), given.get("keep_vars", keep_vars)
        if destination is None:
            destination = _empty()
        for before in self._state_dict_pre_hooks.values():
            before(self, prefix, keep_vars)
        hooks = self._unit_hooks
        found = _empty()
        session = hooks.open(None, sys._getframe())
        try:
            self._save_to_state_dict(found, prefix, keep_vars)
            wrapped: nn.Module = self._modules[WRAPPED_MODULE]  # type: ignore[assignment]
            wrapped.state_dict(destination=found, prefix=prefix, keep_vars=keep_vars)
        finally:
            hooks.close(session)
        hooks.finish(found, prefix)
        destination.update(found)
        if self._unit_state.is_visible and hasattr(destination, "_metadata"):
            destination._metadata.update(found._metadata)
        for after in self._state_dict_hooks.values():
            changed = after(self, destination, prefix, {"version": self._version})
            # As in nn.Module, a hook may return another state dict.
            destination = destination if changed is None else changed
        return destination

    # -- loading ------------------------------------------------------------------------------

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state dict of the type that is set; every rank loads its own part of it."""
        given: Any = OrderedDict(state_dict)
        metadata = getattr(state_dict, "_metadata", None)
        if metadata is not None:
            # nn.Module looks up the versions of modules by their names in the wrapped model.
            paths = (path for path, _ in self.named_modules())
            known = {path: f"{path}.".replace(f"{WRAPPED_MODULE}.", "")[:-1] for path in paths}
            given._metadata = {p: metadata[n] for p, n in known.items() if n in metadata}
        return super().load_state_dict(given, strict, assign)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # Parameters and buffers of the wrapper itself have no prefix.
        own = {prefix + name for name in (*self._parameters, *self._buffers)}
        renamed = {
            prefix + f"{WRAPPED_MODULE}." + key[len(prefix) :]
            if key.startswith(prefix) and key not in own
            else key: value
            for key, value in state_dict.items()
        }
        state_dict.clear()
        state_dict.update(renamed)
        self._load_errors = error_msgs
        load_last(self.children())
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )


def _settings(
    state_dict_type: Any, config: Any = None, optim_config: Any = None
) -> StateDictSettings:
    """Settings of a state dict type, with its default configs where none are given."""
    kind = adopt(state_dict_type, StateDictType, "state_dict_type")
    model_kind, optim_kind = _CONFIGS[kind]
    return StateDictSettings(
        kind,
        _config(config, model_kind, "state_dict_config"),
        _config(optim_config, optim_kind, "optim_state_dict_config"),
    )


def _config(given: Any, kind: type[Any], argument: str) -> Any:
    if given is None:
        return kind()
    try:
        return adopt(given, kind, argument)
    except TypeError:
        raise RuntimeError(
            f"Expected {argument} of type {kind} but got {type(given)}. Each state dict type has "
            "its own config class"
        ) from None


def _states(module: nn.Module) -> list[UnitState]:
    return [m._unit_state for m in module.modules() if isinstance(m, StateDicts)]


def _empty() -> Any:
    empty: Any = OrderedDict()
    empty._metadata = OrderedDict()
    return empty


def _report_clean_names(wrapper: Any, incompatible: Any) -> None:
    """Remove the wrappers' prefixes from the names in errors, after everything was loaded."""
    for names in (*incompatible, wrapper._load_errors):
        names[:] = [name.replace(f"{WRAPPED_MODULE}.", "") for name in names]
    wrapper._load_errors = []
