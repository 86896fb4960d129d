"""The policies: which modules become units. Pure decisions: they read modules, never change them.

A policy comes in two forms. A *policy object* (:class:`_Policy`) looks at the whole tree and
returns the modules to wrap. A *policy function* is asked about one module at a time::

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool: ...

With ``recurse=True`` it says whether to look below ``module`` (a module whose answer is no is
not wrapped either); with ``recurse=False`` whether to wrap ``module`` itself, whose
``nonwrapped_numel`` elements are in no nested unit yet. ``functools.partial`` binds the rest.
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

    Whatever is not a class raises a ``TypeError`` that names ``argument``: a class given by its
    name would otherwise match nothing, silently.
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
            f"({{{entry}}}, imported from where it is defined) instead of its name ({{{entry!r}}})."
        )
    if isinstance(entry, nn.Module):
        name = type(entry).__name__
        return (
            f"{expected}, but got a module of class {name}. Pass its class ({{{name}}}), or "
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

        ``root_kwargs`` are the arguments of the outermost unit, which every module inherits
        unless the policy changes them. Modules in ``ignored_modules`` must not be returned.
        The root may be returned; it is wrapped by the caller in any case.
        """


class ModuleWrapPolicy(_Policy):
    """Wrap every module that is an instance of one of the classes.

    It may also be called like a policy function, for example inside :func:`_or_policy`.

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
        """Answer as a policy function does."""
        return recurse or isinstance(module, self._module_classes)

    def __repr__(self) -> str:
        names = sorted(module_class.__name__ for module_class in self._module_classes)
        return f"{type(self).__name__}({{{', '.join(names)}}})"


class CustomPolicy(_Policy):
    """Wrap what a function picks, with arguments of its own where the function gives some.

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
    """Wrap the modules for which ``lambda_fn(module)`` is true; look everywhere."""
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    transformer_layer_cls: set[type[nn.Module]],
) -> bool:
    """Wrap the instances of ``transformer_layer_cls``; look everywhere.

    :class:`ModuleWrapPolicy` says the same as an object.
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
    """Wrap a module once the elements below it that are in no nested unit reach a minimum.

    Modules of ``force_leaf_modules`` are left whole: neither they nor anything below them is
    wrapped. Modules of ``exclude_wrap_modules`` are not wrapped, but their children may be.
    The defaults are the attributes ``FORCE_LEAF_MODULES`` and ``EXCLUDE_WRAP_MODULES``.
    """
    if nonwrapped_numel < min_num_params:
        return False
    defaults: Any = size_based_auto_wrap_policy
    if recurse:
        leaves = defaults.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
        return not isinstance(module, module_classes_from(leaves, "force_leaf_modules"))
    kept = defaults.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    return not isinstance(module, module_classes_from(kept, "exclude_wrap_modules"))


# Multi-head attention reads its projection's weight without calling it, so the projection could
# not gather its own; lists and dicts of modules are never called, so they could not either.
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
    """Wrap the instances of ``module_classes``; look everywhere."""
    return recurse or isinstance(module, module_classes_from(module_classes, "module_classes"))


def _or_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    policies: Iterable[PolicyFunction],
) -> bool:
    """Wrap (or look below) a module if any of ``policies`` would."""
    return any(
        policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)
        for policy in policies
    )
