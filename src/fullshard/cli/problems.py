"""What a user can do wrong: one line each, shown without a traceback, exit status 2."""

from __future__ import annotations

__all__ = ["BadInput"]


class BadInput(Exception):
    """Input that cannot work. The message says what was given, what is expected, what to do."""
