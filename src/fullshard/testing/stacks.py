"""Requesting the stack of a rank, and formatting it as a traceback."""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import time
from pathlib import Path

from .worker import STACK_SIGNAL

_ANSWER_TIMEOUT = 1.0
_SETTLE_TIME = 0.05
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_THREAD = re.compile(r"(?=^(?:Current thread|Thread) 0x)", re.MULTILINE)
_OWN_DIRECTORY = str(Path(__file__).parent) + os.sep


def request_stacks(processes: list[int]) -> None:
    """Ask ranks to write their stacks to their stack files; see ``read_stack``."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, STACK_SIGNAL)


def await_stack(stack_file: Path) -> str:
    """The requested stack of a rank; empty if the rank does not answer, for example if stopped."""
    deadline = time.monotonic() + _ANSWER_TIMEOUT
    size, settled_at = 0, deadline
    while time.monotonic() < min(deadline, settled_at):
        new_size = stack_file.stat().st_size
        if new_size != size:
            size, settled_at = new_size, time.monotonic() + _SETTLE_TIME
        time.sleep(_SETTLE_TIME / 5)
    return read_stack(stack_file)


def read_stack(stack_file: Path) -> str:
    """The stack in a rank's stack file, as an ordinary traceback.

    The frames of this package, which every rank has, are left out.
    """
    text = stack_file.read_text(errors="replace") if stack_file.exists() else ""
    return format_stack(text)


def format_stack(text: str) -> str:
    """Turn faulthandler's text into a traceback with source lines, innermost call last.

    The main thread comes first, then the thread that crashed, if it is another one.
    """
    # faulthandler writes the threads in the reverse order of their start.
    *others, main = _THREAD.split(text)
    crashed = [thread for thread in others if thread.startswith("Current")]
    stacks = [_format_thread(thread) for thread in (main, *crashed)]
    return "\n  in another thread:\n".join(stack for stack in stacks if stack)


def _format_thread(thread: str) -> str:
    frames = [match.groupdict() for match in map(_FRAME.match, thread.splitlines()) if match]
    shown = [frame for frame in reversed(frames) if not _is_own(frame)]
    lines = []
    for frame in shown:
        lines.append(f'  File "{frame["file"]}", line {frame["line"]}, in {frame["function"]}')
        source = linecache.getline(frame["file"], int(frame["line"])).strip()
        if source:
            lines.append(f"    {source}")
    return "\n".join(lines)


def _is_own(frame: dict[str, str]) -> bool:
    return frame["file"].startswith(_OWN_DIRECTORY) or frame["file"] == "<string>"
