"""Collecting tests without pytest: modules, test functions, and their parametrised cases."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from .errors import RankSetupError

_FIXTURES = ("tmp_path",)


@dataclass(frozen=True)
class Case:
    """One test with one set of arguments."""

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    fixtures: list[str]
    skip_reason: str | None


@dataclass(frozen=True)
class _Parameters:
    """One set of arguments of one parametrisation."""

    arguments: dict[str, Any]
    id: str
    marks: list[Any] = field(default_factory=list)


def test_files(paths: list[Path]) -> list[Path]:
    """The given files, and the test_*.py files in the given folders."""
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise RankSetupError(f"{path} does not exist: pass a test file or a folder with tests")
        found += sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
    return found


def load_module(file: Path) -> ModuleType:
    """Import a test file under a name derived from its path, so that file names may repeat."""
    file = file.resolve()
    here = Path.cwd()
    parts = file.relative_to(here).parts if file.is_relative_to(here) else (file.name,)
    name = ".".join(parts).removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise RankSetupError(
            f"{file} is not a Python file: pass a test file or a folder with tests"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def cases_of(module: ModuleType) -> Iterator[Case]:
    """The cases of every function in the module whose name begins with test_."""
    module_marks = getattr(module, "pytestmark", [])
    if not isinstance(module_marks, list):
        module_marks = [module_marks]
    for name, function in list(vars(module).items()):
        if name.startswith("test_") and isinstance(function, FunctionType):
            yield from _cases_of_function(name, function, module_marks)


def _cases_of_function(
    name: str, function: Callable[..., Any], module_marks: list[Any]
) -> Iterator[Case]:
    marks = [*module_marks, *getattr(function, "pytestmark", [])]
    parametrisations = [_parameters(mark) for mark in marks if mark.name == "parametrize"]
    wanted = list(inspect.signature(function).parameters)
    for chosen in itertools.product(*parametrisations):
        arguments = {key: value for one in chosen for key, value in one.arguments.items()}
        identifier = "-".join(one.id for one in chosen)
        case_marks = marks + [mark for one in chosen for mark in one.marks]
        fixtures = [parameter for parameter in wanted if parameter not in arguments]
        yield Case(
            name=f"{name}[{identifier}]" if identifier else name,
            function=function,
            arguments=arguments,
            fixtures=fixtures,
            skip_reason=_skip_reason(case_marks, fixtures),
        )


def _parameters(mark: Any) -> list[_Parameters]:
    names, sets = mark.args[0], mark.args[1]
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",") if name.strip()]
    given_ids = mark.kwargs.get("ids")
    if given_ids is not None and not callable(given_ids):
        given_ids = list(given_ids)
    found = []
    for position, one in enumerate(sets):
        marks: list[Any] = []
        identifier = None
        if hasattr(one, "marks") and hasattr(one, "values"):
            marks, identifier, values = list(one.marks), one.id, one.values
        else:
            values = (one,) if len(names) == 1 else tuple(one)
        if identifier is None and given_ids is not None:
            identifier = given_ids(one) if callable(given_ids) else given_ids[position]
        identifier = identifier or "-".join(map(_id_of, values))
        found.append(_Parameters(dict(zip(names, values, strict=True)), identifier, marks))
    return found


def _id_of(value: object) -> str:
    if isinstance(value, str | int | float | bool | None):
        return str(value)
    return getattr(value, "__name__", None) or str(value)


def _skip_reason(marks: list[Any], fixtures: list[str]) -> str | None:
    for mark in marks:
        if mark.name == "skip":
            return str(mark.kwargs.get("reason", mark.args[0] if mark.args else "skipped"))
        if mark.name == "skipif" and mark.args[0]:
            return str(mark.kwargs.get("reason", "condition holds"))
    missing = [name for name in fixtures if name not in _FIXTURES]
    if missing:
        return f"it uses {', '.join(missing)}, and fixtures need pytest"
    return None
