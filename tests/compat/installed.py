"""fullshard in torch's place for the length of a block: ranks are reused by the tests after."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fullshard import compat


@contextlib.contextmanager
def installed() -> Iterator[None]:
    compat.install()
    try:
        yield
    finally:
        compat.uninstall()
