"""The hooks by which a unit takes part in ``state_dict()`` and ``load_state_dict()``.

Note: hooks instead of swapped parameters
    ``nn.Module.state_dict()`` visits all modules and writes what it finds: sharded pieces, or
    nothing where only a flat parameter is registered. After each module a hook replaces these by
    the values to be saved. The model is not changed, so an exception leaves nothing to undo, and
    users' own hooks see what they would see in the unwrapped model. The first module that is
    visited opens a session: the unit is all-gathered once, the values are copied, and the full
    buffer is freed before the next unit is visited. ``state_dict()`` may be called on the root, on
    a unit, on a module inside a unit, or on one around it.

    In loading, a hook runs before each module: every rank copies its part of each value into its
    shard, and leaves the sharded piece in the value's place, which ``nn.Module`` copies onto
    itself.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn

from ...api import StateDictType
from ...engine.params.handle import FlatParamHandle
from ...engine.params.locations import WRAPPED_MODULE
from .loading import LoadReport, ShardLoader
from .sharded_tensors import is_sharded
from .unit_state import FLAT_NAME, UnitState, Values

#: The names of a module's parameters in the order in which it registered them.
Order = dict[nn.Module, tuple[str, ...]]


@dataclasses.dataclass
class Session:
    """The values that one ``state_dict()`` call takes from a unit.

    ``modules`` are those of which the session has the values. ``outer`` is the session of a call
    that has not ended: a user's hook may call ``state_dict()`` in the middle of another one.
    """

    modules: set[nn.Module]
    values: Values
    call: FrameType
    outer: Session | None

    def contains(self, frame: FrameType | None) -> bool:
        """True if ``frame`` was called by the call that opened the session.

        It was not if the session is left over from a call that raised an exception.
        """
        while frame is not None and frame is not self.call:
            frame = frame.f_back
        return frame is not None


class UnitHooks:
    """One unit's hooks on its modules; its wrapper owns them."""

    def __init__(self, state: UnitState, modules: Iterable[nn.Module], order: Order) -> None:
        self.state = state
        self.order = order
        self._session: Session | None = None
        self._modules = list(dict.fromkeys([*modules, *state.managed]))
        self._attach()

    def _attach(self) -> None:
        for module in self._modules:
            _attach(module, self)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_session": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._attach()

    # -- saving -------------------------------------------------------------------------------

    def open(self, owner: nn.Module | None, call: FrameType) -> Session:
        """Take the unit's values for a ``call`` of ``state_dict()`` on ``owner``.

        ``owner`` is None if that is the wrapper.
        """
        self.state.refuse_inside_pass("state_dict()")
        outer = self._current(call)
        below = set(self.state.managed) if owner is None else set(owner.modules())
        with torch.no_grad():
            self._session = Session(below, self.state.values(owner, below), call, outer)
        return self._session

    def close(self, session: Session) -> None:
        """End the session of a call, and go on with that of the call around it."""
        self._session = session.outer

    def _current(self, call: FrameType) -> Session | None:
        """The session that contains ``call``; those of calls that raised are dropped."""
        while self._session is not None and not self._session.contains(call):
            self._session = self._session.outer
        return self._session

    def before_save(self, module: nn.Module, call: FrameType) -> None:
        """Open a session if the module is the first that ``call``, a ``state_dict()``, visits."""
        session = self._current(call)
        if session is None or (module in self.state.managed and module not in session.modules):
            self.open(module, call)

    def after_save(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, call: FrameType
    ) -> None:
        """Replace what ``nn.Module`` wrote for the unit's parameters by the session's values."""
        session = self._current(call)
        if session is None:
            return
        registered = dict.fromkeys(self.state.managed.get(module, ()))
        if module is self.state.unit.module:
            registered[FLAT_NAME] = None
        values = session.values.get(module, {})
        for name in registered:
            if name not in values:
                state_dict.pop(prefix + name, None)
        flat = (name for name in values if name.startswith(FLAT_NAME))
        _insert(state_dict, prefix, values, (*flat, *self.order.get(module, values)))
        for name, dtype in self.state.buffer_dtypes(module).items():
            if prefix + name in state_dict:
                state_dict[prefix + name] = state_dict[prefix + name].to(dtype)
        if session.call is call:
            self.close(session)
            self.finish(state_dict, prefix)

    def finish(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Apply ``rank0_only`` and ``offload_to_cpu`` to everything below ``prefix``."""
        for key in [key for key in state_dict if key.startswith(prefix)]:
            if not self.state.is_visible:
                del state_dict[key]
            elif self.state.settings.state_dict_config.offload_to_cpu:
                value = state_dict[key]
                if isinstance(value, torch.Tensor) and not is_sharded(value):
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
        """Load the unit's parameters of ``module``; the arguments are those of a pre-hook."""
        self.state.prepare_to_load()
        unit, managed = self.state.unit, self.state.managed.get(module, {})
        report = LoadReport(missing, unexpected, errors)
        if managed:
            # Assigning would replace the unit's own parameters by new ones.
            local_metadata.pop("assign_to_params_buffers", None)
        is_local = self.state.settings.state_dict_type is StateDictType.LOCAL_STATE_DICT
        if module is unit.module:
            self._load_flat(state_dict, prefix, report, is_local)
        loader = ShardLoader(unit, report)
        for name in filter(managed.__contains__, self.order.get(module, managed)):
            key = prefix + name
            handle, index = managed[name]
            registered = module._parameters.get(name)
            if is_local:
                if key in state_dict:
                    report.unexpected.append(_clean(key))
            elif key in state_dict:
                # torch.distributed.checkpoint completes a partial state dict with the model's own
                # parameters.
                if not _is_own(handle, index, state_dict[key]):
                    loader.add(_clean(key), handle, index, state_dict[key])
            elif registered is None:
                report.missing.append(key)
            if unit.summoned_everywhere and not is_local:
                distribution = handle.distribution(index)
                if distribution is not None and key in state_dict:
                    # nn.Module copies onto the DTensor that is shown, and needs another one.
                    state_dict[key] = distribution.distribute(state_dict[key])
                continue
            if registered is None:
                state_dict.pop(key, None)
            elif key in state_dict or is_local:
                state_dict[key] = registered.detach()
        with torch.no_grad():
            loader.store()

    def _load_flat(
        self, state_dict: dict[str, Any], prefix: str, report: LoadReport, is_local: bool
    ) -> None:
        """Load shards from a local state dict; in others their names are unexpected."""
        unit = self.state.unit
        for name, handle in zip(self.state.flat_names(), unit.handles, strict=True):
            key = prefix + name
            shard = state_dict.pop(key, None)
            if is_local and shard is None:
                report.missing.append(_clean(key))
            elif is_local:
                ShardLoader(unit, report).store_shard(_clean(key), handle, shard)
            elif shard is not None:
                report.unexpected.append(_clean(key))
        registered = unit.module._parameters.get(FLAT_NAME)
        if registered is not None:
            state_dict[prefix + FLAT_NAME] = registered.detach()


def _is_own(handle: FlatParamHandle, index: int, value: Any) -> bool:
    """True if ``value`` is this rank's own parameter, so that there is nothing to load."""
    own = handle.params[index] if handle.use_orig_params else handle.flat_param
    return value is own


def _insert(
    state_dict: dict[str, Any], prefix: str, values: Mapping[str, Any], order: tuple[str, ...]
) -> None:
    """Insert a module's values in ``order``, before everything else that the module wrote."""
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
    """The key without the wrappers' prefixes."""
    return key.replace(f"{WRAPPED_MODULE}.", "")


# -- registering the hooks ------------------------------------------------------------------------

#: The units that take part when a module is saved or loaded. They are not kept in the modules, so
#: that a module can be copied and pickled without the units around it.
_units_of: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[UnitHooks]]] = (
    weakref.WeakKeyDictionary()
)


def _attach(module: nn.Module, hooks: UnitHooks) -> None:
    _units_of.setdefault(module, []).append(weakref.ref(hooks))
    if _after_save in module._state_dict_hooks.values():
        return
    module.register_state_dict_pre_hook(_before_save)
    hook = module._register_state_dict_hook(_after_save)
    # Before the user's hooks, which are to see what they would see in the unwrapped model.
    module._state_dict_hooks.move_to_end(hook.id, last=False)  # type: ignore[attr-defined]
    module.register_load_state_dict_pre_hook(_before_load)


def load_last(modules: Iterable[nn.Module]) -> None:
    """Move the units' hooks behind all others, which may rename or change values to load.

    Users may have registered hooks after wrapping.
    """
    for module in modules:
        hooks = module._load_state_dict_pre_hooks
        ours = next((key for key, hook in hooks.items() if _is_ours(hook)), None)
        if ours is not None:
            hooks.move_to_end(ours)  # type: ignore[attr-defined]


def _is_ours(hook: Any) -> bool:
    return getattr(hook, "hook", hook) is _before_load


def _hooks_at(module: nn.Module) -> list[UnitHooks]:
    found = (reference() for reference in _units_of.get(module, ()))
    return [hooks for hooks in found if hooks is not None]


def _before_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    call = sys._getframe(1)
    for hooks in _hooks_at(module):
        hooks.before_save(module, call)


def _after_save(module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any) -> None:
    call = sys._getframe(1)
    for hooks in _hooks_at(module):
        hooks.after_save(module, state_dict, prefix, call)


def _before_load(module: nn.Module, *args: Any) -> None:
    load_last(module.children())
    for hooks in _hooks_at(module):
        hooks.before_load(module, *args)
