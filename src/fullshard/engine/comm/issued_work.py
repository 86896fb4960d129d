"""The collective that a host issued last and does not wait for: whether it has completed.

A host that runs ahead of its device goes on; a thread asks for it (see ``watcher.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import failures


class IssuedWork:
    """The last collective of one process group."""

    def __init__(self) -> None:
        self.last: Any = None
        #: Whether what is issued is captured in a graph, and not carried out.
        self.is_capturing = False
        #: Whether the backend has given up.
        self.backend_failed: Callable[[], bool] = lambda: False

    def note(self, work: Any) -> None:
        """Look after ``work``, for which the device waits and the host does not."""
        if not self.is_capturing:
            self.last = work

    def note_capturing(self, active: bool) -> None:
        """From now on what is issued is captured in a graph, or is carried out again.

        What was captured never completes by itself, and the host does not see replays.
        """
        self.is_capturing, self.last = active, None

    def incomplete(self) -> Any:
        """The last collective, if it has not completed.

        One that failed has not: the device still waits for it. Where the backend says that it has
        failed, "backend": it may have been a collective of the program's own.
        """
        work = self.last
        if self.is_capturing:
            return None
        if self.backend_failed():
            return "backend"
        if work is None:
            return None
        try:
            if not work.is_completed() or failures.is_given_up(work):
                return work
        except AttributeError:
            # An object of the user's own, which need only be able to wait.
            pass
        except RuntimeError:
            # The device has failed.
            return work
        if self.last is work:
            # Not asked again: during a capture, a question from any thread may break it.
            self.last = None
        return None
