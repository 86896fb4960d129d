"""Formatting numbers for messages."""

from __future__ import annotations

__all__ = ["counted", "rounded"]


def counted(number: int, noun: str) -> str:
    """A number with its noun, in the singular or the plural.

    >>> counted(1, "file"), counted(2048, "file")
    ('1 file', '2,048 files')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def rounded(number: int) -> str:
    """A large number in millions (M) or billions (B).

    >>> rounded(875_264), rounded(85_547_520), rounded(6_446_784_512)
    ('0.9 M', '86 M', '6.4 B')
    """
    size, unit = (number / 1e9, "B") if number >= 1e9 else (number / 1e6, "M")
    return f"{size:.0f} {unit}" if size >= 10 else f"{size:.1f} {unit}"
