"""A stand-in for the small part of pytest that test modules use, if it is not installed.

It lets ``python -m fullshard.testing`` run the same test modules as pytest does: marks,
``raises``, ``warns``, ``approx``, ``skip`` and the like. There are no fixtures in it.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def install() -> None:
    """Make ``import pytest`` find this module."""
    sys.modules["pytest"] = sys.modules[__name__]


def __getattr__(name: str) -> Any:
    # Other classes of pytest, such as MonkeyPatch, are named in annotations only.
    if name[0].isupper():
        return Any
    raise AttributeError(f"pytest is not installed, and its stand-in has no {name!r}")


class Skipped(BaseException):
    """Raised by ``skip``; not an Exception, so that a test does not catch it by accident."""


class Failed(AssertionError):
    """Raised by ``fail``, and by ``raises`` and ``warns`` if nothing was raised or warned."""


def skip(reason: str = "", *, allow_module_level: bool = False) -> NoReturn:
    """Skip the test, or the module, that calls this."""
    raise Skipped(reason)


def fail(reason: str = "", pytrace: bool = True) -> NoReturn:
    """Fail the test that calls this."""
    raise Failed(reason)


def importorskip(name: str) -> Any:
    """The named module; skips if it cannot be imported."""
    try:
        return importlib.import_module(name)
    except ImportError:
        skip(f"{name} is not installed")


@dataclass
class ExceptionInfo:
    """The exception that ``raises`` caught; ``value`` is set after the block."""

    value: Any = None

    @property
    def type(self) -> Any:
        """The class of the exception."""
        return type(self.value)

    def match(self, pattern: str) -> None:
        """Fail unless the pattern is found in the exception's message."""
        if not re.search(pattern, str(self.value)):
            fail(f"{pattern!r} is not found in {str(self.value)!r}")


@contextlib.contextmanager
def raises(
    expected: type[BaseException] | tuple[type[BaseException], ...], *, match: str | None = None
) -> Iterator[ExceptionInfo]:
    """Fail unless the block raises one of the expected exceptions."""
    info = ExceptionInfo()
    try:
        yield info
    except expected as error:
        info.value = error
        if match is not None:
            info.match(match)
    else:
        fail(f"DID NOT RAISE {expected!r}")


@contextlib.contextmanager
def warns(
    expected: type[Warning] | tuple[type[Warning], ...] = Warning, *, match: str | None = None
) -> Iterator[list[warnings.WarningMessage]]:
    """Fail unless the block gives a warning of the expected class, with that message."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught
    for warning in caught:
        found = match is None or re.search(match, str(warning.message))
        if issubclass(warning.category, expected) and found:
            return
    fail(f"DID NOT WARN {expected!r} matching {match!r}: {[str(w.message) for w in caught]}")


@dataclass(eq=False)
class approx:
    """Equal to numbers, or sequences of numbers, that differ by rounding only."""

    expected: Any
    rel: float | None = None
    abs: float | None = None

    def __eq__(self, actual: object) -> bool:
        if isinstance(self.expected, Sequence):
            return (
                isinstance(actual, Sequence)
                and len(actual) == len(self.expected)
                and all(
                    approx(one, self.rel, self.abs) == other
                    for one, other in zip(self.expected, actual, strict=True)
                )
            )
        relative = 1e-6 if self.rel is None else self.rel
        absolute = 1e-12 if self.abs is None else self.abs
        return math.isclose(self.expected, float(actual), rel_tol=relative, abs_tol=absolute)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ParameterSet:
    """The return value of ``param``."""

    values: tuple[Any, ...]
    marks: tuple[Any, ...] = ()
    id: str | None = None


def param(*values: Any, marks: Any = (), id: str | None = None) -> ParameterSet:
    """One set of arguments for ``mark.parametrize``."""
    return ParameterSet(values, tuple(marks) if isinstance(marks, list | tuple) else (marks,), id)


@dataclass(frozen=True)
class Mark:
    """A mark with its arguments; decorates a test."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], type):
            return self._decorate(args[0])
        return Mark(self.name, args, kwargs)

    def _decorate(self, function: Decorated) -> Decorated:
        marks = [*getattr(function, "pytestmark", []), self]
        function.pytestmark = marks  # type: ignore[attr-defined]
        return function


class _Marks:
    def __getattr__(self, name: str) -> Mark:
        return Mark(name)


mark = _Marks()


def fixture(*args: Any, **kwargs: Any) -> Any:
    """Leaves the function as it is; tests that ask for a fixture are skipped."""
    return args[0] if args and callable(args[0]) else lambda function: function
