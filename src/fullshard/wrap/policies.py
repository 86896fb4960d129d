"""Wrapping policies: they choose the modules that become units, and never change a module.

A policy comes in two forms. A *policy object* (:class:`_Policy`) looks at the whole module tree and
returns the modules to wrap. A *policy function* is called for one module at a time::

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool: ...

Called with ``recurse=True``, it returns True to continue with the children of ``module``; a module
for which it returns False is not wrapped either. Called with ``recurse=False``, it returns True to
wrap ``module`` itself; ``nonwrapped_numel`` counts the elements below it that are in no nested unit
yet. Bind further arguments with ``functools.partial``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from fullshard.wrap.graph import walk

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "PolicyFunction",
    "_Policy",
    "_or_policy",
    "_wrap_module_cls_individually",
    "always_wrap_policy",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
]

PolicyFunction = Callable[..., bool]


def module_classes_from(given: object, argument: str) -> tuple[type[nn.Module], ...]:
    """Return the classes in ``given`` (an iterable of classes, or one class) as a tuple.

    Anything that is not a class raises a ``TypeError`` that names ``argument``. Without this check,
    a class given as a string would silently match nothing.
    """
    if isinstance(given, type):
        return (given,)
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(_not_a_class(given, argument))
    classes = tuple(given)
    for entry in classes:
        if not isinstance(entry, type):
            raise TypeError(_not_a_class(entry, argument))
    return classes


def _not_a_class(entry: object, argument: str) -> str:
    expected = f"{argument} expects module classes"
    if isinstance(entry, str):
        return (
            f"{expected}, but got the string {entry!r}. Pass the class itself "
            f"({{{entry}}}, imported from its module) instead of its name ({{{entry!r}}})."
        )
    if isinstance(entry, nn.Module):
        name = type(entry).__name__
        return (
            f"{expected}, but got an instance of {name}. Pass its class ({{{name}}}), or "
            f"pick single modules with CustomPolicy(lambda module: module is ...)."
        )
    return f"{expected} such as {{nn.TransformerEncoderLayer}}, but got {entry!r}."


class _Policy(ABC):
    """A policy that looks at the whole module tree at once."""

    @abstractmethod
    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: set[nn.Module],
        root_kwargs: dict[str, Any],
    ) -> dict[nn.Module, dict[str, Any]]:
        """Return the modules to wrap, each with its constructor arguments.

        ``root_kwargs`` are the constructor arguments of the outermost unit, which every module
        inherits unless the policy overrides them. The result must not contain modules of
        ``ignored_modules``. It may contain the root, which the caller wraps in any case.
        """


class ModuleWrapPolicy(_Policy):
    """Wrap every module that is an instance of one of the classes.

    It can also be called as a policy function, for example inside :func:`_or_policy`.

    >>> ModuleWrapPolicy({nn.TransformerEncoderLayer})
    ModuleWrapPolicy({TransformerEncoderLayer})
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._module_classes = module_classes_from(module_classes, "ModuleWrapPolicy")

    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: set[nn.Module],
        root_kwargs: dict[str, Any],
    ) -> dict[nn.Module, dict[str, Any]]:
        return {
            module: dict(root_kwargs)
            for module in walk(root_module, ignored_modules)
            if module not in ignored_modules and isinstance(module, self._module_classes)
        }

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        """Behave as a policy function."""
        return recurse or isinstance(module, self._module_classes)

    def __repr__(self) -> str:
        names = sorted(module_class.__name__ for module_class in self._module_classes)
        return f"{type(self).__name__}({{{', '.join(names)}}})"


class CustomPolicy(_Policy):
    """Wrap the modules that a function picks, with the constructor arguments that it returns.

    ``lambda_fn(module)`` returns ``False`` (or an empty dict) to leave the module alone,
    ``True`` to wrap it with the root's arguments, or a dict of constructor arguments that
    override the root's for this module:

    >>> def pick(module):
    ...     if isinstance(module, nn.Embedding):
    ...         return {"forward_prefetch": True}
    ...     return isinstance(module, nn.TransformerEncoderLayer)
    >>> policy = CustomPolicy(pick)
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        if not callable(lambda_fn):
            raise TypeError(f"CustomPolicy expects a function of one module, but got {lambda_fn!r}")
        self._lambda_fn = lambda_fn

    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: set[nn.Module],
        root_kwargs: dict[str, Any],
    ) -> dict[nn.Module, dict[str, Any]]:
        picked: dict[nn.Module, dict[str, Any]] = {}
        for module in walk(root_module, ignored_modules):
            if module in ignored_modules:
                continue
            answer = self._lambda_fn(module)
            if not isinstance(answer, (bool, dict)):
                raise ValueError(
                    "The lambda_fn passed to CustomPolicy should return False/True or a kwarg "
                    f"dict, but it returned {answer} for a module of class "
                    f"{type(module).__name__}"
                )
            if isinstance(answer, dict) and answer:
                picked[module] = {**root_kwargs, **answer}
            elif answer:
                picked[module] = dict(root_kwargs)
        return picked

    def __repr__(self) -> str:
        name = getattr(self._lambda_fn, "__name__", repr(self._lambda_fn))
        return f"{type(self).__name__}({name})"


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Wrap every module. Useful in tests; in training it makes many tiny units."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    lambda_fn: Callable[[nn.Module], bool],
) -> bool:
    """Wrap the modules for which ``lambda_fn(module)`` is true, at any depth."""
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    transformer_layer_cls: set[type[nn.Module]],
) -> bool:
    """Wrap the instances of ``transformer_layer_cls``, at any depth.

    :class:`ModuleWrapPolicy` is the same as a policy object.
    """
    classes = module_classes_from(transformer_layer_cls, "transformer_layer_cls")
    return recurse or isinstance(module, classes)


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Wrap a module if at least ``min_num_params`` elements below it are in no nested unit.

    Instances of ``force_leaf_modules`` and all modules below them are never wrapped. Instances of
    ``exclude_wrap_modules`` are not wrapped, but their children may be. The defaults are the
    attributes ``FORCE_LEAF_MODULES`` and ``EXCLUDE_WRAP_MODULES`` of this function.
    """
    if nonwrapped_numel < min_num_params:
        return False
    defaults: Any = size_based_auto_wrap_policy
    if recurse:
        leaves = defaults.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
        return not isinstance(module, module_classes_from(leaves, "force_leaf_modules"))
    kept = defaults.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    return not isinstance(module, module_classes_from(kept, "exclude_wrap_modules"))


# A unit all-gathers its parameters when its forward is called. Multi-head attention reads the
# weight of its projection without calling it, and lists and dicts of modules have no forward.
size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {  # type: ignore[attr-defined]
    nn.MultiheadAttention
}
size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {  # type: ignore[attr-defined]
    nn.ModuleList,
    nn.ModuleDict,
}


def _wrap_module_cls_individually(
    module: nn.Module, module_classes: Sequence[type], recurse: bool, *args: Any, **kwargs: Any
) -> bool:
    """Wrap the instances of ``module_classes``, at any depth."""
    return recurse or isinstance(module, module_classes_from(module_classes, "module_classes"))


def _or_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    policies: Iterable[PolicyFunction],
) -> bool:
    """Wrap a module, or recurse into it, if any of ``policies`` would."""
    return any(
        policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)
        for policy in policies
    )
