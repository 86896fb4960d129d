"""Ranks of one machine meet without the network: nobody on another machine can reach them.

torch's launcher meets other launchers at a store. It listens for them on every interface and
unpickles what it finds in the store, even where it is to meet nobody. The launcher of a single
machine has nobody to meet: :class:`OneMachineRendezvous` is a store in its own memory. The ranks
need one that all of them can reach; theirs listens on the loopback interface, see ``listening.py``.
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

#: The name of the rendezvous, among those that torch's launcher knows.
BACKEND = "fullshard-one-machine"


class OneMachineRendezvous(RendezvousHandler):
    """The rendezvous of a launcher that meets no other, and chooses a port for its ranks.

    A port is kept from when it is chosen until the next attempt: rank 0 listens there only when it
    has imported torch, and whoever asks the system for any port meanwhile could be given the same
    one. A socket that is bound to it and does not listen prevents that, on Linux.
    """

    def __init__(self, run_id: str, address: str, port: int) -> None:
        self._run_id = run_id
        self._address = address
        self._port = port
        self._held = contextlib.ExitStack()

    def next_rendezvous(self) -> RendezvousInfo:
        """Everything that an attempt needs, with nothing in it from the attempt before."""
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
        """Whether no attempt may follow: nobody else can say so."""
        return False

    def set_closed(self) -> None:
        """Tell the other launchers that no attempt follows: there are none."""

    def num_nodes_waiting(self) -> int:
        """The machines that want to take part: none can."""
        return 0

    def get_run_id(self) -> str:
        """The run's name, which ranks find in ``TORCHELASTIC_RUN_ID``."""
        return self._run_id

    def shutdown(self) -> bool:
        """Give the port back."""
        self._held.close()
        return True


def stay_on_machine(arguments: Namespace) -> bool:
    """Choose this rendezvous where torchrun's ``arguments`` are for one machine.

    Returns whether all ranks are on this machine. They also are where several launchers meet at a
    loopback address, as torch's own launchers; their ranks then meet at that address, too.
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
    """Where the ranks of one machine meet: at any port, unless the user chose one.

    The endpoint of ``c10d`` is where launchers meet, which these do not. A name, such as the
    machine's own, may stand for an address that others can reach; a number was meant.
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
    """Variables that have ranks talk to each other over the loopback interface alone.

    Else gloo listens at the address that the machine's name stands for, and NCCL, which uses
    sockets to set up what it then sends through shared memory and between GPUs, on any interface.
    """
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    return {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    """The rendezvous as torch's launcher asks for it.

    The endpoint is the address and the port of the ranks' store; port 0 stands for any.
    """
    address, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=0)
    return OneMachineRendezvous(parameters.run_id, parameters.local_addr or address, port)


rendezvous_handler_registry.register(BACKEND, _create)
