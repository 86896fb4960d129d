"""The error for bad input: printed in one line, without a traceback, with exit status 2."""

from __future__ import annotations

__all__ = ["BadInput"]


class BadInput(Exception):
    """Invalid input. The message says what was given, what was expected, and what to do."""
