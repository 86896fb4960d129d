"""Processes that live as long as they are needed and take turns: one for each row of a table."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing
from rows import SkipRow


def start_method() -> str:
    """How processes begin: from nothing, or as copies of one that has imported torch.

    Copies start faster; but an import may touch the driver of a GPU, which no copy survives.
    """
    if torch.cuda.is_available():
        return "spawn"
    # The second is what optimizers import when the first of them is made.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "torch._dynamo"])
    return "forkserver"


class Worker:
    """An object in a process of its own, and the parent's way to call its methods.

    A method that fails does not end the others' turns: its answer says why, as "skipped".
    """

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        context: Any = multiprocessing.get_context(start_method())
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(make, arguments, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Call a method of the object, which is made at the first call."""
        try:
            self._pipe.send((method, arguments))
            answer: dict[str, Any] = self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return {"skipped": "its process ended"}
        return answer

    def close(self) -> None:
        self._pipe.close()
        self._process.join(timeout=10)
        if self._process.is_alive():
            self._process.terminate()


def _serve(make: Callable[..., Any], arguments: tuple[Any, ...], pipe: Connection) -> None:
    torch.set_num_threads(1)
    served: Any = None
    with contextlib.suppress(EOFError):
        while True:
            method, given = pipe.recv()
            try:
                served = served or make(*arguments)
                answer = getattr(served, method)(*given)
            except SkipRow as reason:
                answer = {"skipped": str(reason)}
            except Exception as error:
                answer = {"skipped": f"{type(error).__name__}: {error}"}
            pipe.send(answer)


def run_ranks(rank_main: Callable[..., None], ranks: int, *arguments: Any) -> None:
    """Run ``rank_main(rank, ranks, *arguments)`` in a process for each rank, to its end."""
    torch.multiprocessing.start_processes(
        rank_main, args=(ranks, *arguments), nprocs=ranks, start_method=start_method()
    )
