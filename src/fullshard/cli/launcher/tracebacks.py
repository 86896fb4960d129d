"""Formatting an error in one line, in short for a terminal, and in full for a log.

Uses the standard library only, because ``rank.py`` loads this file by its path before the program.
"""

from __future__ import annotations

import re
import traceback
from types import TracebackType

__all__ = ["in_full", "in_one_line", "in_short", "of_interrupt"]

#: The most lines of a traceback that a terminal shows in full.
_SHORT = 24
#: Of a longer one, the number of first and last calls that are shown.
_FIRST_CALLS, _LAST_CALLS = 2, 4
#: The C++ stack trace that torch appends to some messages, which is of no use to users.
_CPP_FRAMES = re.compile(
    r"^(Exception raised from .*\(most recent call first\):|frame #\d+:.*|<omitting .*>)$"
)


def in_one_line(error: BaseException) -> str:
    """The error's type and the first line of its message, then that of its first note."""
    line = _type_and_message(error)
    notes = [str(note) for note in getattr(error, "__notes__", None) or ()]
    if notes and notes[0].strip():
        line += f" (note: {_first_line(notes[0])})"
    return line


def in_full(error: BaseException, start: TracebackType | None) -> str:
    """The traceback as Python prints it, for a program whose first call is at ``start``."""
    return "".join(traceback.format_exception(type(error), error, start))


def in_short(error: BaseException, start: TracebackType | None) -> str:
    """The full traceback if it is short; else the first and last calls, and a line per cause.

    Stack traces of torch's C++ code are always left out.
    """
    full = _without_cpp_frames(in_full(error, start))
    if len(full.splitlines()) <= _SHORT:
        return full
    told = traceback.TracebackException(type(error), error, start)
    calls = len(told.stack)
    left_out = calls - _FIRST_CALLS - _LAST_CALLS
    if left_out > 1:
        lines = ["Traceback (most recent call last):\n"]
        lines += traceback.StackSummary.from_list(told.stack[:_FIRST_CALLS]).format()
        lines += [f"  ... {left_out} more calls ...\n"]
        lines += traceback.StackSummary.from_list(told.stack[-_LAST_CALLS:]).format()
        lines += told.format_exception_only()
    else:
        lines = list(told.format(chain=False))
    lines += [f"Caused by {_type_and_message(cause)}\n" for cause in _causes(error)]
    return _without_cpp_frames("".join(lines))


def of_interrupt(error: KeyboardInterrupt, start: TracebackType | None) -> str:
    """The traceback of an interrupted program; inside an import, only up to the import."""
    calls = traceback.extract_tb(start)
    # The first module is the program itself.
    imports = [place for place, call in enumerate(calls) if place and call.name == "<module>"]
    shown = calls[: imports[0]] if imports else calls
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(shown)]
    return "".join([*lines, *traceback.format_exception_only(error)])


def _type_and_message(error: BaseException) -> str:
    told = traceback.TracebackException(type(error), error, None)
    told.__notes__ = None
    return _first_line([*told.format_exception_only()][-1])


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0]


def _causes(error: BaseException) -> list[BaseException]:
    """The causes of ``error``, from the last to the first, in Python's own order."""
    found: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in found:
        found.append(cause)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return found[1:]


def _without_cpp_frames(text: str) -> str:
    kept = [line for line in text.splitlines() if not _CPP_FRAMES.match(line)]
    return "".join(f"{line}\n" for line in kept)
