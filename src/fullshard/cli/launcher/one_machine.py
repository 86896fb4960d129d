"""The rendezvous of the ranks of one machine, which no other machine can reach.

torch's launcher meets other launchers at a store. It listens on every interface and unpickles what
it finds in the store, even if there are no other launchers. The launcher of a single machine needs
no such store: :class:`OneMachineRendezvous` keeps its store in memory. The store of the ranks,
which all of them have to reach, listens on the loopback interface only, see ``listening.py``.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import uuid
from argparse import Namespace

from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import parse_min_max_nnodes

from ...ports import reserve_port
from .listening import LOOPBACK, is_loopback, is_number

__all__ = ["BACKEND", "loopback_variables", "stay_on_machine"]

#: The name under which this rendezvous is registered with torch's launcher.
BACKEND = "fullshard-one-machine"


class OneMachineRendezvous(RendezvousHandler):
    """The rendezvous of a single launcher, which chooses a port for its ranks.

    The port stays reserved until the next attempt: rank 0 listens there only after it has imported
    torch, and until then the system could give the port to another process. On Linux, a socket that
    is bound to the port but does not listen prevents that.
    """

    def __init__(self, run_id: str, address: str, port: int) -> None:
        self._run_id = run_id
        self._address = address
        self._port = port
        self._held = contextlib.ExitStack()

    def next_rendezvous(self) -> RendezvousInfo:
        """A fresh store and port for the next attempt."""
        place = RendezvousStoreInfo(self._address, self._port or self._choose_port())
        return RendezvousInfo(HashStore(), 0, 1, place)

    def _choose_port(self) -> int:
        self._held.close()
        reserved = self._held.enter_context(reserve_port(""))
        port: int = reserved.getsockname()[1]
        if sys.platform != "linux":
            self._held.close()
        return port

    def get_backend(self) -> str:
        """The name under which this rendezvous is registered."""
        return BACKEND

    def is_closed(self) -> bool:
        """Always False: no other launcher can close this rendezvous."""
        return False

    def set_closed(self) -> None:
        """Does nothing: there are no other launchers to tell."""

    def num_nodes_waiting(self) -> int:
        """Always 0: no other machine can join."""
        return 0

    def get_run_id(self) -> str:
        """The run id, which ranks find in ``TORCHELASTIC_RUN_ID``."""
        return self._run_id

    def shutdown(self) -> bool:
        """Release the port."""
        self._held.close()
        return True


def stay_on_machine(arguments: Namespace) -> bool:
    """Choose this rendezvous if torchrun's ``arguments`` are for one machine.

    Returns True if all ranks are on this machine. That is also the case if several launchers meet
    at a loopback address. These use torch's own rendezvous, and their ranks meet there, too.
    """
    if arguments.rdzv_backend not in ("static", "c10d"):
        return False
    if arguments.standalone or parse_min_max_nnodes(arguments.nnodes)[1] == 1:
        arguments.rdzv_endpoint = _place_of_ranks(arguments)
        arguments.rdzv_backend = BACKEND
        if arguments.rdzv_id == "none":
            arguments.rdzv_id = str(uuid.uuid4())
        return True
    if arguments.local_addr is None:
        endpoint = arguments.rdzv_endpoint
        if arguments.rdzv_backend == "static" and not endpoint:
            endpoint = arguments.master_addr
        if is_loopback(parse_rendezvous_endpoint(endpoint, default_port=0)[0]):
            arguments.local_addr = LOOPBACK
            return True
    return False


def _place_of_ranks(arguments: Namespace) -> str:
    """The endpoint for the ranks of one machine: any free port, unless the user chose one.

    The endpoint of the ``c10d`` backend is for launchers, so it is not used here. A host name, such
    as the machine's own, may stand for an address that others can reach, so only a numeric address
    is used.
    """
    endpoint = arguments.rdzv_endpoint
    if arguments.rdzv_backend == "static" and not endpoint and arguments.master_port is not None:
        endpoint = f"{arguments.master_addr}:{arguments.master_port}"
    host, port = parse_rendezvous_endpoint(endpoint, default_port=0)
    if arguments.standalone or arguments.rdzv_backend == "c10d":
        return f"{LOOPBACK}:0"
    if not is_number(host):
        host = LOOPBACK
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def loopback_variables() -> dict[str, str | None]:
    """Environment variables that restrict communication to the loopback interface.

    Otherwise gloo listens at the address of the machine's host name, and NCCL, which sets up its
    shared-memory and GPU transports over sockets, on any interface.
    """
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    return {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    """Create the rendezvous for torch's launcher.

    The endpoint is the address and port of the ranks' store; port 0 means any free port.
    """
    address, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=0)
    return OneMachineRendezvous(parameters.run_id, parameters.local_addr or address, port)


rendezvous_handler_registry.register(BACKEND, _create)
