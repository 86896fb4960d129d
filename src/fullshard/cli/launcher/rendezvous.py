"""Meeting the launchers of other machines, at a store that strangers may be able to reach.

torch's launcher hosts the store, or connects to it, and has the ranks host one of their own. It is
changed in three places, for as long as it runs; where a version of torch does not have one of them,
ranks run all the same.

- Stores listen at the address that they were given, see ``listening.py``.
- The launcher reads the state of the rendezvous from the store and unpickles it, which can run any
  code. Here a pickle is read only if it is made of what such a state consists of.
- The launcher looks for a port that is free and tells the ranks; the first of them listens there
  seconds later, when it has imported torch. Whoever asks the system for any port meanwhile, such as
  a rank of another run, may be given the same one. A socket that is bound to it and does not listen
  keeps it from being given away, and lets those listen who ask for it by its number.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from torch.distributed.elastic.rendezvous import (
    api,
    c10d_rendezvous_backend,
    dynamic_rendezvous,
    static_tcp_rendezvous,
)

from ...ports import reserve_port
from .listening import stores_listen_at_given_address

__all__ = ["guarded_rendezvous"]

#: What the launcher calls for a port; it has no way to be given one for each attempt.
_FREE_PORT = "get_free_port"
#: The module with which the launcher reads the state of the rendezvous.
_PICKLE = "pickle"
#: What a state consists of, beside numbers, strings and containers.
_IN_STATES = {
    (dynamic_rendezvous.__name__, "_RendezvousState"),
    (dynamic_rendezvous.__name__, "_NodeDesc"),
    ("datetime", "datetime"),
    ("datetime", "timedelta"),
    ("datetime", "timezone"),
}


@contextlib.contextmanager
def guarded_rendezvous() -> Iterator[None]:
    """Inside the context, torch's launcher is changed as the head of this file says."""
    with (
        stores_listen_at_given_address(c10d_rendezvous_backend, static_tcp_rendezvous),
        _only_states_unpickled(),
        _ports_held(),
    ):
        yield


class _StateUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _IN_STATES:
            raise pickle.UnpicklingError(
                f"the store at which launchers meet holds a pickle with {module}.{name} in it, "
                "which no launcher puts there; it was not loaded. Who else can reach the store?"
            )
        return super().find_class(module, name)


def _read_state(pickled: bytes) -> Any:
    return _StateUnpickler(io.BytesIO(pickled)).load()


@contextlib.contextmanager
def _only_states_unpickled() -> Iterator[None]:
    before = vars(dynamic_rendezvous).get(_PICKLE)
    if before is not pickle:
        yield
        return
    guarded = SimpleNamespace(**{**vars(pickle), "loads": _read_state})
    setattr(dynamic_rendezvous, _PICKLE, guarded)
    try:
        yield
    finally:
        setattr(dynamic_rendezvous, _PICKLE, pickle)


@contextlib.contextmanager
def _ports_held() -> Iterator[None]:
    """Hold the ports that the launcher chooses. Only on Linux: they cannot be held elsewhere."""
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
