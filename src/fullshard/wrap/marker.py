"""Recognising wrapped modules by a class attribute. Imports nothing of fullshard.

The wrapper class is defined in a layer above this package, which therefore cannot import it.
"""

from __future__ import annotations

from typing import TypeGuard

from torch import nn

__all__ = ["IN_PLACE_ATTRIBUTE", "UNIT_ATTRIBUTE", "WRAPPED_MODULE_NAME", "is_in_place", "is_unit"]

#: The class attribute that marks a wrapper class: ``_is_fullshard_unit = True``.
UNIT_ATTRIBUTE = "_is_fullshard_unit"

#: Where a module that ``fully_shard`` was applied to has what stands behind it.
IN_PLACE_ATTRIBUTE = "_fullshard_module_unit"

#: The name under which a unit registers the module that it wraps.
WRAPPED_MODULE_NAME = "_fsdp_wrapped_module"


def is_unit(module: object) -> TypeGuard[nn.Module]:
    """Return True if ``module`` is a wrapper, or was sharded in place."""
    # Read from the class: an instance forwards unknown attributes to the module it wraps.
    return isinstance(module, nn.Module) and getattr(type(module), UNIT_ATTRIBUTE, False) is True


def is_in_place(module: object) -> bool:
    """Return True if ``fully_shard`` was applied to ``module``."""
    return is_unit(module) and IN_PLACE_ATTRIBUTE in vars(module)
