"""The rendezvous with launchers on other machines, at a store that strangers may be able to reach.

torch's launcher hosts the store or connects to it, and has the ranks host a store of their own.
While it runs, three of its functions are replaced. If a version of torch lacks one of them, ranks
run all the same.

- Stores listen only at the address that they were given, see ``listening.py``.
- The launcher unpickles the state of the rendezvous from the store, which can run any code. Here
  only the types that such a state consists of are unpickled.
- The launcher chooses a free port and tells the ranks, but rank 0 listens there only seconds later,
  after it has imported torch. Until then the system could give the same port to another process,
  such as a rank of another run. A socket that is bound to the port but does not listen prevents
  that, while a process that asks for the port by number can still listen there.
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

#: The function with which the launcher chooses a port for each attempt.
_FREE_PORT = "get_free_port"
#: The module with which the launcher reads the state of the rendezvous.
_PICKLE = "pickle"
#: The types in a rendezvous state, besides numbers, strings and containers.
_IN_STATES = {
    (dynamic_rendezvous.__name__, "_RendezvousState"),
    (dynamic_rendezvous.__name__, "_NodeDesc"),
    ("datetime", "datetime"),
    ("datetime", "timedelta"),
    ("datetime", "timezone"),
}


@contextlib.contextmanager
def guarded_rendezvous() -> Iterator[None]:
    """Inside the context, replace functions of torch's launcher as this module's docstring says."""
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
                f"the rendezvous store holds a pickle with {module}.{name} in it, which no "
                "launcher writes; it was not loaded. Check who else can reach the store"
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
    """Reserve the ports that the launcher chooses. Works on Linux only."""
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
