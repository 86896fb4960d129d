"""Wrapping: choosing the modules that become units, and replacing them by wrappers.

Policies (``policies.py``) choose modules. :func:`decide` turns a policy's choice into a plan
without changing the model, :func:`describe` prints the plan, and ``apply.py``, alone, wraps.
Nothing here imports the wrapper class or the engine. The public names are those of
``torch.distributed.fsdp.wrap``.
"""

from fullshard.wrap.apply import apply_plan, collector_paused, wrap_submodules
from fullshard.wrap.batch_norm import (
    find_norms_needing_full_precision,
    needs_full_precision,
    warn_of_full_precision,
)
from fullshard.wrap.describe import describe
from fullshard.wrap.description import Description, UnitDescription
from fullshard.wrap.frozen import (
    _validate_frozen_params,
    check_flat_unit_is_uniform,
    check_unit_is_uniform,
)
from fullshard.wrap.ignored import Ignored, resolve_ignored
from fullshard.wrap.manual import enable_wrap, wrap
from fullshard.wrap.marker import is_in_place, is_unit
from fullshard.wrap.plan import Attribute, Decision, Plan, decide
from fullshard.wrap.policies import (
    CustomPolicy,
    ModuleWrapPolicy,
    _or_policy,
    _Policy,
    _wrap_module_cls_individually,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

__all__ = [
    "Attribute",
    "CustomPolicy",
    "Decision",
    "Description",
    "Ignored",
    "ModuleWrapPolicy",
    "Plan",
    "UnitDescription",
    "_Policy",
    "_or_policy",
    "_validate_frozen_params",
    "_wrap_module_cls_individually",
    "always_wrap_policy",
    "apply_plan",
    "check_flat_unit_is_uniform",
    "check_unit_is_uniform",
    "collector_paused",
    "decide",
    "describe",
    "enable_wrap",
    "find_norms_needing_full_precision",
    "is_in_place",
    "is_unit",
    "lambda_auto_wrap_policy",
    "needs_full_precision",
    "resolve_ignored",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "warn_of_full_precision",
    "wrap",
    "wrap_submodules",
]
