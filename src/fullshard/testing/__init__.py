"""Real ranks for tests: runs a function in real processes with a real process group.

The names below are public. docs/testing.md shows how to use them.
"""

from .decorator import ranks
from .device import backend, device
from .errors import RankFailure, RankSetupError, RanksFailed
from .pool import RankPool
from .session import close_session
from .shared import run_on_ranks

__all__ = [
    "RankFailure",
    "RankPool",
    "RankSetupError",
    "RanksFailed",
    "backend",
    "close_session",
    "device",
    "ranks",
    "run_on_ranks",
]
