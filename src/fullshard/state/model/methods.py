"""What a wrapper adds to ``state_dict`` and ``load_state_dict``, and the types to choose from."""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Generator, Iterable, Mapping
from typing import Any

from torch import nn

from ...api import OptimStateDictConfig, StateDictConfig, StateDictSettings, StateDictType
from ...engine.params.locations import WRAPPED_MODULE
from .module_hooks import load_last
from .sharded_tensors import SharedMesh
from .state_hooks import ModelState, Order
from .state_types import default_settings, make_settings


class StateDicts(nn.Module):
    """The state-dict methods of a wrapper."""

    _model_state: ModelState
    _load_errors: list[str]

    def _keep_state(
        self, modules: Iterable[nn.Module], order: Order, nested: Iterable[Any]
    ) -> None:
        """Take part in state dicts; the unit's parameters were in ``order`` before flattening."""
        known: dict[nn.Module, tuple[str, ...]] = {}
        below: list[ModelState] = [wrapper._model_state for wrapper in nested]
        for state in below:
            known.update(state.order)
        known.update(order)
        state = ModelState(self, modules, known)
        if below:
            state.include_part_groups(below)
        self.__dict__.update(_model_state=state, _load_errors=[])
        self.register_load_state_dict_post_hook(_report_by_known_names)

    def _keep_mesh(self, mesh: Any, nested: Iterable[Any]) -> None:
        """Hand out DTensors over ``mesh``, as do the nested units that use the same ranks."""
        if mesh is None:
            return
        shared, own = SharedMesh(mesh), self._model_state.unit
        for wrapper in (self, *nested):
            state: ModelState = wrapper._model_state
            same = state.unit.shards is own.shards and state.unit.copies is own.copies
            if same and state.mesh is None:
                state.mesh = shared

    @property
    def _device_mesh(self) -> Any:
        """The mesh that the wrapper was given; None without one."""
        shared = self._model_state.mesh
        return None if shared is None else shared.mesh

    # -- the types ----------------------------------------------------------------------------

    @property
    def _state_dict_type(self) -> StateDictType:
        return self._model_state.settings.state_dict_type

    @property
    def _state_dict_config(self) -> StateDictConfig:
        return self._model_state.settings.state_dict_config

    @property
    def _optim_state_dict_config(self) -> OptimStateDictConfig:
        return self._model_state.settings.optim_state_dict_config

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: Any,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> StateDictSettings:
        """Choose what the units in ``module`` hand out; returns what they handed out before."""
        settings = make_settings(state_dict_type, state_dict_config, optim_state_dict_config)
        before = StateDicts.get_state_dict_type(module)
        for state in _states(module):
            state.settings = settings
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """What the units in ``module`` hand out now."""
        found = [state.settings for state in _states(module)]
        for other in found[1:]:
            if other != found[0]:
                raise AssertionError(
                    "All FSDP modules must have the same state dict settings. Got "
                    f"{other} and {found[0]}; set them on the outermost module"
                )
        return found[0] if found else default_settings()

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: Any,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> Generator[None, None, None]:
        """Inside the context the units in ``module`` hand out another type of state dict.

        >>> with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        ...     state = model.state_dict()
        """
        settings = make_settings(state_dict_type, state_dict_config, optim_state_dict_config)
        before = [(state, state.settings) for state in _states(module)]
        for state, _ in before:
            state.settings = settings
        try:
            yield
        finally:
            for state, old in before:
                state.settings = old

    # -- saving -------------------------------------------------------------------------------

    def state_dict(  # type: ignore[override]
        self,
        *args: Any,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """The state under the names of the unwrapped model, in the type that was chosen."""
        given = dict(zip(("destination", "prefix", "keep_vars"), args, strict=False))
        destination = given.get("destination", destination)
        prefix, keep_vars = given.get("prefix", prefix), given.get("keep_vars", keep_vars)
        if destination is None:
            destination = _empty()
        for before in self._state_dict_pre_hooks.values():
            before(self, prefix, keep_vars)
        state = self._model_state
        found = _empty()
        session = state.open(None, sys._getframe())
        try:
            self._save_to_state_dict(found, prefix, keep_vars)
            wrapped: nn.Module = self._modules[WRAPPED_MODULE]  # type: ignore[assignment]
            wrapped.state_dict(destination=found, prefix=prefix, keep_vars=keep_vars)
        finally:
            state.close(session)
        state.finish(found, prefix)
        destination.update(found)
        if state.is_visible and hasattr(destination, "_metadata"):
            destination._metadata.update(found._metadata)
        for after in self._state_dict_hooks.values():
            changed = after(self, destination, prefix, {"version": self._version})
            # As in nn.Module, a hook may answer with another state dict.
            destination = destination if changed is None else changed
        return destination

    # -- loading ------------------------------------------------------------------------------

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state dict of the type that was chosen; every rank takes its own part of it."""
        given: Any = OrderedDict(state_dict)
        metadata = getattr(state_dict, "_metadata", None)
        if metadata is not None:
            # Versions of modules are looked up by the names that they have here.
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
        # What was registered on the wrapper itself has no other name.
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


def _states(module: nn.Module) -> list[ModelState]:
    return [m._model_state for m in module.modules() if isinstance(m, StateDicts)]


def _empty() -> Any:
    empty: Any = OrderedDict()
    empty._metadata = OrderedDict()
    return empty


def _report_by_known_names(wrapper: Any, incompatible: Any) -> None:
    """Hook: everything below a wrapper was loaded; say what was wrong by the users' names."""
    for names in (*incompatible, wrapper._load_errors):
        names[:] = [name.replace(f"{WRAPPED_MODULE}.", "") for name in names]
    wrapper._load_errors = []
