"""Processes that live as long as they are needed and take turns: one for each row of a table."""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import connection
from pathlib import Path
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
    ``source`` is a folder from which the process imports packages first, such as the ``src`` of
    another version of this project.
    """

    def __init__(
        self, make: Callable[..., Any], *arguments: Any, source: Path | None = None
    ) -> None:
        context: Any = multiprocessing.get_context(start_method())
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(make, arguments, theirs), daemon=True)
        with _importing_first_from(source):
            self._process.start()
        theirs.close()

    def ask(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Call a method of the object, which is made at the first call."""
        self.tell(method, *arguments)
        return self.answer()

    def tell(self, method: str, *arguments: Any) -> None:
        """Have a method called, without waiting for its answer."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send((method, arguments))

    def answer(self) -> dict[str, Any]:
        """What the method returned that was told last."""
        try:
            answer: dict[str, Any] = self.pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return {"skipped": "its process ended"}
        return answer

    def close(self, at_once: bool = False) -> None:
        self.pipe.close()
        self._process.join(timeout=0 if at_once else 10)
        if self._process.is_alive():
            self._process.terminate()


@contextlib.contextmanager
def _importing_first_from(source: Path | None) -> Iterator[None]:
    """Let processes that are started inside, which take over ``sys.path``, look there first."""
    before = [*sys.path]
    if source is not None:
        sys.path.insert(0, str(source.resolve()))
    try:
        yield
    finally:
        sys.path[:] = before


class Team:
    """The ranks of one row, each a worker: all are asked at once, and the first one answers.

    What they make is given a rank, the number of ranks, and where they find each other.
    """

    def __init__(self, make: Callable[..., Any], ranks: int, *arguments: Any) -> None:
        self._folder = tempfile.TemporaryDirectory()
        meeting = f"file://{self._folder.name}/meeting"
        self._workers = [Worker(make, rank, ranks, meeting, *arguments) for rank in range(ranks)]

    def ask(self, method: str, *arguments: Any) -> dict[str, Any]:
        for worker in self._workers:
            worker.tell(method, *arguments)
        waiting = {worker.pipe: worker for worker in self._workers}
        first: dict[str, Any] = {}
        while waiting:
            for pipe in connection.wait([*waiting]):
                worker = waiting.pop(pipe)
                answer = worker.answer()
                if "skipped" in answer:
                    # The others may wait for this one for ever.
                    self.close(at_once=True)
                    return answer
                if worker is self._workers[0]:
                    first = answer
        return first

    def close(self, at_once: bool = False) -> None:
        for worker in self._workers:
            worker.close(at_once)
        self._workers = []
        self._folder.cleanup()


def _serve(
    make: Callable[..., Any], arguments: tuple[Any, ...], pipe: connection.Connection
) -> None:
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
