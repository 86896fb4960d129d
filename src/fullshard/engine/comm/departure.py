"""Tells the other ranks when an error ends this one, and where its main thread is meanwhile."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
import traceback
import weakref
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import torch

from . import failures

if TYPE_CHECKING:
    from .order_check import Agreement

#: Code that a user does not look into when a rank hangs.
_NOT_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
#: Longest text of an error that others are told.
_LONGEST = 2000
#: Seconds for which a rank stays at most in whose store others will look why it ended, and between
#: two questions whether all have. It is before the first operation: later they are told at once.
_STAYS, _PAUSE = 5.0, 0.05

_agreements: weakref.WeakSet[Any] = weakref.WeakSet()


def leave_word_of(agreement: Agreement) -> None:
    """Tell the other ranks of ``agreement`` when an error ends this process."""
    _agreements.add(agreement)
    _chain_to_hook()


@functools.cache
def _chain_to_hook() -> None:
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _add_explanation(error)
        # First what the user is to see: others are told afterwards.
        previous(kind, error, trace)
        tell_others(error)

    sys.excepthook = hook
    # A child speaks for no rank.
    os.register_at_fork(after_in_child=_agreements.clear)


def _add_explanation(error: BaseException) -> None:
    """Say who is gone in the error of a collective that the program itself called."""
    if not failures.is_of_backend(error):
        return
    agreements = list(_agreements)
    for agreement in agreements:
        agreement.inquiry.note_waiting("after")
    with contextlib.suppress(Exception):
        found = failures.explanation(agreements, error)
        if found is not None:
            error.add_note(f"{type(found).__name__}: {found}")


def tell_others(error: BaseException) -> None:
    """Leave word that ``error`` ends this rank."""
    said = "".join(traceback.format_exception_only(error)).strip()[:_LONGEST]
    agreements = list(_agreements)
    for agreement in agreements:
        # The store may be gone.
        with contextlib.suppress(RuntimeError, OSError):
            agreement.inquiry.depart(said)
    deadline = time.monotonic() + _STAYS
    with contextlib.suppress(RuntimeError, OSError):
        while time.monotonic() < deadline and any(a.inquiry.serves_others for a in agreements):
            time.sleep(_PAUSE)


def whereabouts() -> str:
    """The line that this process's main thread is at, in the user's code where possible."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    innermost = frame
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_USERS):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "a process that is ending"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
