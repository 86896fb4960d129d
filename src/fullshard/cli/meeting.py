"""The port at which ranks meet, kept for them from when it is chosen until one listens there.

torch's launcher looks for a port that is free and tells the ranks; the first of them listens there
seconds later, when it has imported torch. Whoever asks the system for any port meanwhile, such as
a rank of another run, may be given the same one. A socket that is bound to it and does not listen
keeps it from being given away, and lets those listen who ask for it by its number.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from torch.distributed.elastic.rendezvous import api

from ..ports import reserve_port

__all__ = ["ports_held"]

#: What the launcher calls for a port; it has no way to be given one for each attempt.
_FREE_PORT = "get_free_port"


@contextlib.contextmanager
def ports_held() -> Iterator[None]:
    """Inside the context, hold the ports that the launcher chooses.

    Where ports cannot be held, which is everywhere but on Linux, and where a version of torch has
    another way to choose, they are chosen as torch does.
    """
    choose = vars(api).get(_FREE_PORT)
    if sys.platform != "linux" or not callable(choose):
        yield
        return
    with contextlib.ExitStack() as held:

        def choose_and_hold() -> int:
            port: int = held.enter_context(reserve_port("")).getsockname()[1]
            return port

        setattr(api, _FREE_PORT, choose_and_hold)
        try:
            yield
        finally:
            setattr(api, _FREE_PORT, choose)
