"""The memory of a device, by its name or as a size with a unit."""

from __future__ import annotations

import re
from decimal import Decimal

from ..problems import BadInput

__all__ = ["DEVICES", "bytes_of_device"]

_GIB = 1024**3

#: The memory of devices, as specified by their makers.
DEVICES = {
    "a10": 24 * _GIB,
    "a100-40g": 40 * _GIB,
    "a100-80g": 80 * _GIB,
    "b200": 180 * _GIB,
    "h100": 80 * _GIB,
    "h200": 141 * _GIB,
    "l4": 24 * _GIB,
    "l40s": 48 * _GIB,
    "mi300x": 192 * _GIB,
    "rtx4090": 24 * _GIB,
    "t4": 16 * _GIB,
    "v100": 32 * _GIB,
}

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)b?|(b))", re.ASCII | re.IGNORECASE)


def bytes_of_device(text: str, option: str = "device-memory") -> int:
    """The memory of a device given by its name, or as a size with a unit, such as 80GiB.

    Errors name the ``option`` that ``text`` was given for.

    >>> bytes_of_device("24 GiB") == bytes_of_device("l4")
    True
    """
    given = text.strip()
    if given.lower() in DEVICES:
        return DEVICES[given.lower()]
    if re.fullmatch(r"\d+(\.\d+)?", given, re.ASCII):
        raise BadInput(
            f"{option} expects a size with a unit, but got {text!r}; write {given}GiB for "
            "gibibytes, or another of GiB, GB, MiB, MB"
        )
    found = _SIZE.fullmatch(given)
    if not found:
        raise BadInput(
            f"{option} expects a size with a unit, such as 80GiB, or one of "
            f"{', '.join(DEVICES)}, but got {text!r}"
        )
    number, unit, binary, _ = found.groups()
    power = " kmgt".index((unit or " ").lower())
    size = int(Decimal(number) * (1024 if binary else 1000) ** power)
    if not size:
        raise BadInput(f"{option} expects more than 0 bytes, but got {text!r}")
    return size
