"""The hooks by which units take part when modules are saved and loaded."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from .state_hooks import ModelState

#: The units that take part when a module is saved or loaded. Outside of the modules, so that they
#: can be copied and pickled without the units around them.
_taking_part: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[ModelState]]] = (
    weakref.WeakKeyDictionary()
)


def attach(module: nn.Module, state: ModelState) -> None:
    """Let ``state`` take part when ``module`` is saved or loaded."""
    _taking_part.setdefault(module, []).append(weakref.ref(state))
    if _after_save in module._state_dict_hooks.values():
        return
    module.register_state_dict_pre_hook(_before_save)
    hook = module._register_state_dict_hook(_after_save)
    # Before the user's: theirs are to see what they would see in the bare model.
    module._state_dict_hooks.move_to_end(hook.id, last=False)  # type: ignore[attr-defined]
    module.register_load_state_dict_pre_hook(_before_load)


def load_last(modules: Iterable[nn.Module]) -> None:
    """Let units take values after all other hooks, which may rename or change them.

    Those that were registered after wrapping would come too late otherwise.
    """
    for module in modules:
        hooks = module._load_state_dict_pre_hooks
        ours = next((key for key, hook in hooks.items() if _is_ours(hook)), None)
        if ours is not None:
            hooks.move_to_end(ours)  # type: ignore[attr-defined]


def _is_ours(hook: Any) -> bool:
    return getattr(hook, "hook", hook) is _before_load


def _states_at(module: nn.Module) -> list[ModelState]:
    found = (reference() for reference in _taking_part.get(module, ()))
    return [state for state in found if state is not None]


def _before_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    call = sys._getframe(1)
    for state in _states_at(module):
        state.before_save(module, call)


def _after_save(module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any) -> None:
    call = sys._getframe(1)
    for state in _states_at(module):
        state.after_save(module, state_dict, prefix, call)


def _before_load(module: nn.Module, *args: Any) -> None:
    load_last(module.children())
    for state in _states_at(module):
        state.before_load(module, *args)
