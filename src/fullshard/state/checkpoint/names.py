"""The names of a checkpoint's files and folders."""

from __future__ import annotations

import re

INDEX = "checkpoints.json"
MANIFEST = "manifest.json"
#: A file in the folder of a checkpoint that was damaged when it was read; says why.
DAMAGE_NOTE = "damaged.txt"
#: The prefix of the folder of a checkpoint that is not complete yet, or is being removed.
PARTIAL = ".partial-"

# As many digits as file systems allow; Python converts few more to a number.
_CHECKPOINT = re.compile(r"step-([0-9]{1,250})(?:\.([0-9]{1,9}))?")
_DATA = re.compile(r"rank-[0-9]{5,18}\.bin")


def checkpoint_name(step: int, turn: int = 0) -> str:
    """The folder of a step's checkpoint; ``turn`` counts how often the step was saved before."""
    return f"step-{step:08d}.{turn}" if turn else f"step-{step:08d}"


def step_and_turn(name: str) -> tuple[int, int] | None:
    """The arguments of :func:`checkpoint_name`; None if ``name`` is not that of a checkpoint."""
    found = _CHECKPOINT.fullmatch(name)
    return None if found is None else (int(found[1]), int(found[2] or 0))


def data_name(rank: int) -> str:
    """The file into which a rank writes its chunks of tensors."""
    return f"rank-{rank:05d}.bin"


def is_data_name(name: str) -> bool:
    """True for a name that :func:`data_name` returns."""
    return _DATA.fullmatch(name) is not None
