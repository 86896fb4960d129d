"""The messages between the test process and a rank. Plain data, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Assignment:
    """The first message to a new rank: its number, and the store at which ranks meet.

    The store belongs to the test process. ``spare_port`` is for a store that the code under test
    may create.
    """

    rank: int
    world_size: int
    device: str
    backend: str
    store_port: int
    store_prefix: str
    spare_port: int
    output_file: Path
    stack_file: Path


@dataclass(frozen=True)
class Ready:
    """A rank's answer to its assignment: None if it has joined the process group, or an error."""

    error: str | None


@dataclass(frozen=True)
class Request:
    """A function to run. ``call`` is pickled by shipping.py; the rest is its environment."""

    call: bytes
    environment: dict[str, str]
    working_directory: str
    import_path: list[str]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a request on one rank.

    If ``group_state`` differs between ranks, they did not issue the same collectives and cannot be
    reused. None means that the rank's process group was destroyed or replaced.
    """

    kind: Literal["returned", "raised", "skipped"]
    value: bytes
    summary: str
    details: str
    group_state: tuple[int, int] | None
