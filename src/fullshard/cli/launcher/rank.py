"""The script that ``launch.py`` starts as each rank: set-up, then the program as ``__main__``.

``python rank.py [--call module:function]... -- (script | -m module) arguments...``
An error that ends the program is written, with its traceback, to the file that the launcher reads.
Uses the standard library only and is started by its path, so that a program that does not need
torch does not wait for its import.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import ctypes
import faulthandler
import importlib
import importlib.util
import io
import json
import os
import pkgutil
import runpy
import signal
import sys
import time
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

__all__ = ["LAUNCHER", "RANKS_PRINT", "main"]

#: Set if a rank prints its traceback itself as well, because its output goes to its own log.
RANKS_PRINT = "FULLSHARD_RANKS_PRINT"

#: Set to the process id of the launcher; ranks end when that process does.
LAUNCHER = "FULLSHARD_LAUNCHER"
_PR_SET_PDEATHSIG = 1

#: Exit statuses of a program that leaves because a signal asked it to, see ``StopRequest``.
STOPPED = tuple(
    128 + signal.Signals[name] for name in ("SIGHUP", "SIGINT", "SIGTERM") if hasattr(signal, name)
)


def _sibling(name: str) -> Any:
    """Load a module of this folder without importing its package, which imports torch."""
    file = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"fullshard_{name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_listening, _tracebacks = _sibling("listening"), _sibling("tracebacks")

#: True once the program itself has begun, after everything that is imported and called first.
_program_has_begun = False
_BEFORE_THE_PROGRAM = (__file__, runpy.__file__, "<frozen runpy>")


def main(words: Sequence[str]) -> None:
    """Call the functions given with ``--call``, then run the program as Python itself would."""
    if sys.stderr is not None:  # it may be closed
        faulthandler.enable(all_threads=True)
    end_with_launcher()
    _listening.watch_for_torch()
    parser = argparse.ArgumentParser(prog="rank.py")
    parser.add_argument("--call", action="append", default=[])
    boundary = list(words).index("--")
    calls = parser.parse_args(words[:boundary]).call
    command = words[boundary + 1 :]
    # Python has put this file's folder first on the path. A script expects its own folder there,
    # and a module the working directory.
    sys.path[0] = os.getcwd() if command[0] == "-m" else str(Path(command[0]).resolve().parent)
    try:
        for name in calls:
            module, _, function = name.partition(":")
            getattr(importlib.import_module(module), function)()
        run_program(command)
    except BaseException as error:
        status = _exit_status(error)
        if status == 0:
            raise
        record(error)
        if isinstance(error, SystemExit):
            raise
        if os.environ.get(RANKS_PRINT) and not _is_bad_input(error):
            raise
        sys.exit(status)


def end_with_launcher() -> None:
    """Have the kernel kill this rank when the launcher ends, if the kernel supports that.

    Ranks without a launcher would go on training, and overwrite the checkpoints of a resumed run.
    """
    launcher = int(os.environ.pop(LAUNCHER, "0"))
    if not launcher or sys.platform != "linux" or os.getppid() not in (launcher, 1):
        # Started by something in between.
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        sys.exit("The launcher has ended")


def _begin_program() -> None:
    global _program_has_begun
    _program_has_begun = True


def run_program(command: Sequence[str]) -> None:
    """Run a script, or ``-m`` and a module, with the ``sys.argv`` that it expects."""
    if command[0] == "-m":
        sys.argv = ["-m", *command[2:]]
        _run_module(command[1])
        return
    sys.argv = list(command)
    if pkgutil.get_importer(command[0]) is None:
        _run_script(command[0])
    else:  # a folder or an archive, with a ``__main__`` in it
        _begin_program()
        runpy.run_path(command[0], run_name="__main__")


def _run_script(script: str) -> None:
    path = os.path.join(os.getcwd(), script)  # as Python does: "a/../b" stays
    with io.open_code(path) as file:
        code = pkgutil.read_code(file)
    loader: Any = SourcelessFileLoader("__main__", path)
    if code is None:  # a script, not a compiled one
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        loader = SourceFileLoader("__main__", path)
    _run_as_main(code, __file__=path, __cached__=None, __loader__=loader)


def _run_module(name: str) -> None:
    find = getattr(runpy, "_get_module_details", None)
    if find is None:  # another Python: its ``__main__`` does not outlive the module's last line
        _begin_program()
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    _, spec, code = find(name)
    sys.argv[0] = spec.origin
    _run_as_main(
        code,
        __file__=spec.origin,
        __cached__=spec.cached,
        __loader__=spec.loader,
        __package__=spec.parent,
        __spec__=spec,
    )


def _run_as_main(code: CodeType, **facts: Any) -> None:
    """Run ``code`` in a ``__main__`` that stays alive for threads and exit handlers."""
    program = ModuleType("__main__")
    vars(program).update(facts, __builtins__=builtins)
    sys.modules["__main__"] = program
    _begin_program()
    exec(code, vars(program))


def record(error: BaseException) -> None:
    """Write ``error`` to the launcher's error file, in its format, with fields of our own."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    now = time.time_ns()
    full = short = ""
    if isinstance(error, SystemExit):
        reason = f"sys.exit({error.code!r})"
    elif _is_bad_input(error):
        reason = str(error)
    elif isinstance(error, KeyboardInterrupt):
        reason = _tracebacks.in_one_line(error)
        if _program_has_begun:  # before that a rank imports torch, which takes seconds
            full = short = _tracebacks.of_interrupt(error, _begin_of_program(error))
    else:
        start = _begin_of_program(error)
        reason = _tracebacks.in_one_line(error)
        full, short = _tracebacks.in_full(error, start), _tracebacks.in_short(error, start)
    content = {
        "message": {
            "message": reason,
            "extraInfo": {
                "py_callstack": full,
                "short_callstack": short,
                "timestamp": str(now // 10**9),
                "nanoseconds": now,
                "rank": int(os.environ.get("RANK", "0")),
                "exit_status": _exit_status(error),
                "bad_input": _is_bad_input(error),
                "stopped": isinstance(error, SystemExit) and error.code in STOPPED,
            },
        }
    }
    partial = Path(f"{file}.partial")
    partial.write_text(json.dumps(content))
    partial.replace(file)


def _exit_status(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if _is_bad_input(error):
        return 2
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _is_bad_input(error: BaseException) -> bool:
    """Return True for ``problems.BadInput``, which cannot be imported here without torch."""
    kind = type(error)
    return (kind.__module__, kind.__name__) == ("fullshard.cli.problems", "BadInput")


def _begin_of_program(error: BaseException) -> TracebackType | None:
    """The program's first call in the traceback of ``error``, after our own and Python's."""
    start = error.__traceback__
    while start is not None and _is_ours(start) and start.tb_next is not None:
        start = start.tb_next
    if start is not None and _is_ours(start) and isinstance(error, SyntaxError):
        return None  # a syntax error in the program: none of its lines has run
    return start


def _is_ours(step: TracebackType) -> bool:
    return step.tb_frame.f_code.co_filename in _BEFORE_THE_PROGRAM


if __name__ == "__main__":
    main(sys.argv[1:])
