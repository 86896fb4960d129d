"""Sending a function and its arguments from the test process to a rank.

Note [How functions are sent]
A function or class of an installed package is pickled as usual, by name. One that is defined in
another file, such as a test module, is sent as a file and a name: the rank loads the file once,
under the module's name, and looks the name up. A lambda or a function defined inside another one is
sent as its code, with the values it closes over and the globals of its file.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import marshal
import pickle
import sys
import sysconfig
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import RankSetupError

_INSTALLED = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)

# Functions decorated with @ranks: looking their name up finds the test that replaced them.
declared_functions: dict[tuple[str, str], Callable[..., Any]] = {}


@dataclass(frozen=True)
class ModuleSource:
    """The file of a module that a rank may not be able to import by name."""

    name: str
    file: str
    code: bytes | None
    """The marshalled code, when the test process runs another one than the file's own."""

    def load(self) -> types.ModuleType:
        """The module, loaded at the first call."""
        module = sys.modules.get(self.name)
        if self._is_this(module):
            assert module is not None
            return module
        if self.code is None and self.name != "__main__":
            try:
                module = importlib.import_module(self.name)
            except ImportError:
                module = None
            if self._is_this(module):
                assert module is not None
                return module
        return self._load_file()

    def _is_this(self, module: types.ModuleType | None) -> bool:
        return getattr(module, "__file__", None) == self.file

    def _load_file(self) -> types.ModuleType:
        # A script's own start must not run again. Under the name that multiprocessing has for a
        # script in another process, and without a spec, as a script's is: so what the script
        # defines is found by the test process, and by processes that the rank starts.
        is_script = self.name == "__main__"
        name = "__mp_main__" if is_script else self.name
        spec = importlib.util.spec_from_file_location(name, self.file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{self.file} is no Python file")
        module = importlib.util.module_from_spec(spec)
        if is_script:
            module.__spec__ = None
        before = {known: sys.modules[known] for known in (name, self.name) if known in sys.modules}
        sys.modules[self.name] = sys.modules[name] = module
        try:
            if self.code is None:
                spec.loader.exec_module(module)
            else:
                exec(marshal.loads(self.code), module.__dict__)
        except BaseException:
            del sys.modules[name]
            sys.modules.pop(self.name, None)
            sys.modules.update(before)
            raise
        return module


def pack_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle a call for a rank; raises RankSetupError with one line if that is impossible."""
    buffer = io.BytesIO()
    try:
        _CallPickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump((function, args, kwargs))
    except RankSetupError:
        raise
    except RecursionError:
        raise RankSetupError(
            f"{_name_of(function)} cannot be sent to the ranks, because it refers to itself "
            "from inside another function: define it at the top level of its file"
        ) from None
    except Exception as error:
        raise RankSetupError(
            f"{_name_of(function)} cannot be sent to the ranks with these arguments "
            f"({error}): pass values that can be pickled, or create them on the rank"
        ) from None
    return buffer.getvalue()


def unpack_call(call: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The function and arguments of a packed call, on the rank."""
    function, args, kwargs = pickle.loads(call)
    return function, args, kwargs


class _CallPickler(pickle.Pickler):
    """See Note [How functions are sent]."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            return _reduce_function(value)
        if isinstance(value, type) and not _is_local(value.__qualname__):
            source = _source_of(value.__module__)
            if source is not None:
                return _look_up, (source, value.__qualname__)
        return NotImplemented


def _reduce_function(function: types.FunctionType) -> Any:
    key = (function.__module__, function.__qualname__)
    source = _source_of(function.__module__)
    is_declared = declared_functions.get(key) is function and not _is_local(key[1])
    if is_declared and source is not None:
        return _look_up_declared, (source, function.__qualname__)
    if source is None and function.__module__ == "__main__":
        raise RankSetupError(
            f"{_name_of(function)} cannot be sent to the ranks, because it is not in a file: "
            "save it as one"
        )
    if _is_found_by_name(function):
        return NotImplemented if source is None else (_look_up, (source, function.__qualname__))
    values = tuple(cell.cell_contents for cell in function.__closure__ or ())
    return _rebuild, (
        source or function.__module__,
        marshal.dumps(function.__code__),
        function.__qualname__,
        function.__defaults__,
        function.__kwdefaults__,
        values,
    )


def _look_up(source: ModuleSource, qualified_name: str) -> Any:
    found: Any = source.load()
    for name in qualified_name.split("."):
        found = getattr(found, name)
    return found


def _look_up_declared(source: ModuleSource, qualified_name: str) -> Callable[..., Any]:
    module = source.load()
    return declared_functions[module.__name__, qualified_name]


def _rebuild(
    source: ModuleSource | str,
    code: bytes,
    qualified_name: str,
    defaults: tuple[Any, ...] | None,
    keyword_defaults: dict[str, Any] | None,
    values: tuple[Any, ...],
) -> types.FunctionType:
    module = importlib.import_module(source) if isinstance(source, str) else source.load()
    closure = tuple(types.CellType(value) for value in values)
    function = types.FunctionType(
        marshal.loads(code), module.__dict__, argdefs=defaults, closure=closure
    )
    function.__qualname__ = qualified_name
    function.__kwdefaults__ = keyword_defaults
    return function


_sources: dict[str, ModuleSource] = {}


def _source_of(module_name: str) -> ModuleSource | None:
    """The source of a module for a rank; None if it is installed or has no file."""
    if module_name not in _sources:
        module = sys.modules.get(module_name)
        file = getattr(module, "__file__", None)
        if module is None or file is None or not Path(file).exists():
            return None
        if _is_importable_everywhere(module_name, file):
            return None
        _sources[module_name] = ModuleSource(module_name, file, _rewritten_code(module, file))
    return _sources[module_name]


def _rewritten_code(module: types.ModuleType, file: str) -> bytes | None:
    """The module's code with pytest's assertion rewriting, if pytest has rewritten it."""
    if type(module.__loader__).__name__ != "AssertionRewritingHook":
        return None
    import ast

    from _pytest.assertion.rewrite import rewrite_asserts

    source = Path(file).read_bytes()
    tree = ast.parse(source, filename=file)
    rewrite_asserts(tree, source, file)
    return marshal.dumps(compile(tree, file, "exec", dont_inherit=True))


def _is_importable_everywhere(module_name: str, file: str) -> bool:
    own_package = __name__.partition(".")[0]
    return file.startswith(_INSTALLED) or module_name.partition(".")[0] == own_package


def _is_local(qualified_name: str) -> bool:
    return "<locals>" in qualified_name or "<lambda>" in qualified_name


def _is_found_by_name(function: types.FunctionType) -> bool:
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def _name_of(function: object) -> str:
    return getattr(function, "__qualname__", None) or repr(function)
