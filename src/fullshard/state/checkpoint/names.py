"""What the files and folders of checkpoints are called."""

from __future__ import annotations

import re

INDEX = "checkpoints.json"
MANIFEST = "manifest.json"
#: Stands in the folder of a checkpoint that was found damaged when it was read, and says why.
NOTE_OF_DAMAGE = "damaged.txt"
#: How the name of a checkpoint begins that is not complete yet, or is being removed.
PARTIAL = ".partial-"

# As many digits as a file system may allow; Python refuses to count in many more.
_CHECKPOINT = re.compile(r"step-([0-9]{1,250})(?:\.([0-9]{1,9}))?")
_DATA = re.compile(r"rank-[0-9]{5,18}\.bin")


def checkpoint_name(step: int, turn: int = 0) -> str:
    """The folder of a step that is saved for the first time, or, in another turn, again."""
    return f"step-{step:08d}.{turn}" if turn else f"step-{step:08d}"


def step_and_turn(name: str) -> tuple[int, int] | None:
    """What :func:`checkpoint_name` was given; None if ``name`` is not of a checkpoint."""
    found = _CHECKPOINT.fullmatch(name)
    return None if found is None else (int(found[1]), int(found[2] or 0))


def data_name(rank: int) -> str:
    """The file into which a rank writes its parts of tensors."""
    return f"rank-{rank:05d}.bin"


def is_data_name(name: str) -> bool:
    """Whether a file is called as :func:`data_name` calls them."""
    return _DATA.fullmatch(name) is not None
