"""What the test process and a rank say to each other. Plain data, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Assignment:
    """The first message to a new rank: who it is and where it meets the others.

    The store belongs to the test process. ``spare_port`` is for a store that the code under
    test may want to make.
    """

    rank: int
    world_size: int
    device: str
    store_port: int
    store_prefix: str
    spare_port: int
    output_file: Path
    stack_file: Path


@dataclass(frozen=True)
class Ready:
    """A rank's answer to its assignment: the process group stands, or why it does not."""

    error: str | None


@dataclass(frozen=True)
class Request:
    """One function to run. ``call`` is pickled by shipping.py; the rest is where to run it."""

    call: bytes
    environment: dict[str, str]
    working_directory: str
    import_path: list[str]


@dataclass(frozen=True)
class Outcome:
    """What became of a request on one rank.

    ``group_state`` differs between ranks when they did not issue the same collectives; such
    ranks cannot be used again. None means that the rank's process group is gone or replaced.
    """

    kind: Literal["returned", "raised", "skipped"]
    value: bytes
    summary: str
    details: str
    group_state: tuple[int, int] | None
