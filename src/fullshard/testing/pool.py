"""RankPool: a fixed number of ranks that run one function after another."""

from __future__ import annotations

import itertools
import math
import os
import pickle
import socket
import sys
import unittest
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ..ports import reserve_port
from .device import backend, chosen_device_type, require_device
from .errors import RankSetupError, RanksFailed
from .protocol import LOOPBACK, Assignment, Request
from .rank_process import RankProcess
from .report import format_report
from .run import Run
from .session import Session, current_session
from .shipping import pack_call
from .worker import is_rank

DEFAULT_TIMEOUT = 120.0
DEFAULT_GRACE = 3.0
MOST_RANKS = 64

_pool_numbers = itertools.count()


class RankPool:
    """A pool of real processes, one for each rank, in a process group over gloo or NCCL.

    The ranks start with the first run and are reused. If one of them fails, they are replaced
    before the next run. One function runs at a time. Use the pool as a context manager, or call
    ``close``, to end its ranks.

    Most tests need no pool of their own: ``ranks`` and ``run_on_ranks`` share pools.

    Example::

        with RankPool(2) as pool:
            assert pool.run(torch.distributed.get_rank) == [0, 1]
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = checked_world_size(world_size)
        self._session: Session | None = None
        self._ranks: list[RankProcess] = []
        self._chosen = ("", "")
        self._spare_port: socket.socket | None = None

    def run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        grace: float = DEFAULT_GRACE,
    ) -> list[Any]:
        """Call ``function`` on every rank and return the values of all ranks, in order of rank.

        Raises RanksFailed if a rank raised, died, or did not return within ``timeout`` seconds;
        ranks that still run ``grace`` seconds after another one failed count as failed, too. If the
        function skips on every rank, the calling test is skipped.
        """
        __tracebackhide__ = True
        call = pack_call(function, args, kwargs or {})
        timeout, grace = _checked_seconds("timeout", timeout), _checked_seconds("grace", grace)
        _refuse_inside_a_rank()
        session = current_session()
        with session.lock:
            try:
                self._make_ready(session)
                self._send(call)
                run = Run(session.launcher, self._ranks, timeout, grace)
                run.wait()
                return self._conclude(run, getattr(function, "__qualname__", repr(function)))
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """End the ranks and wait until they are gone. A later run starts new ones."""
        ranks, self._ranks = self._ranks, []
        if ranks and self._session is not None and self._session.usable:
            with self._session.lock:
                self._session.launcher.kill_ranks([rank.process for rank in ranks])
        for rank in ranks:
            rank.discard()
        if self._spare_port is not None:
            self._spare_port.close()
            self._spare_port = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _make_ready(self, session: Session) -> None:
        chosen = chosen_device_type(), backend()
        if session is self._session and chosen == self._chosen and self._all_run():
            return
        self.close()
        require_device(chosen[0])
        self._session, self._chosen = session, chosen
        self._start(session)

    def _all_run(self) -> bool:
        if not self._ranks or self._session is None:
            return False
        return all(self._session.launcher.ended(rank.process) is None for rank in self._ranks)

    def _start(self, session: Session) -> None:
        prefix = f"pool-{next(_pool_numbers)}"
        device, backend_name = self._chosen
        self._spare_port = reserve_port(LOOPBACK)
        for rank in range(self.world_size):
            assignment = Assignment(
                rank=rank,
                world_size=self.world_size,
                device=device,
                backend=backend_name,
                store_port=session.port,
                store_prefix=prefix,
                spare_port=self._spare_port.getsockname()[1],
                output_file=session.launcher.directory / f"{prefix}-rank-{rank}-output",
                stack_file=session.launcher.directory / f"{prefix}-rank-{rank}-stack",
            )
            self._ranks.append(RankProcess(session.launcher, assignment))
        for process in self._ranks:
            obstacle = process.join()
            if obstacle is not None:
                raise RankSetupError(
                    f"rank {process.rank} of {self.world_size} could not be started: {obstacle}"
                )

    def _send(self, call: bytes) -> None:
        request = Request(
            call=call,
            environment=dict(os.environ),
            working_directory=os.getcwd(),
            import_path=[os.path.abspath(entry) for entry in sys.path],
        )
        message = pickle.dumps(request)
        for rank in self._ranks:
            rank.send(message)

    def _conclude(self, run: Run, function_name: str) -> list[Any]:
        __tracebackhide__ = True
        outcomes = [run.outcomes.get(rank) for rank in range(self.world_size)]
        if all(outcome is not None and outcome.kind == "skipped" for outcome in outcomes):
            _skip(run.outcomes[0].summary)
        failures = run.failures()
        if failures:
            report = format_report(function_name, self.world_size, failures)
            raise RanksFailed(report, tuple(failures))
        self._show_output()
        values = [pickle.loads(run.outcomes[rank].value) for rank in range(self.world_size)]
        states = {run.outcomes[rank].group_state for rank in range(self.world_size)}
        if None in states or len(states) > 1:
            self.close()
        return values

    def _show_output(self) -> None:
        for rank in self._ranks:
            for line in rank.output().splitlines():
                print(f"[rank {rank.rank}] {line}")


def checked_world_size(world_size: int) -> int:
    """Return ``world_size``; raises RankSetupError if it is not a valid number of ranks."""
    if (
        not isinstance(world_size, int)
        or isinstance(world_size, bool)
        or not 1 <= world_size <= MOST_RANKS
    ):
        raise RankSetupError(
            f"the number of ranks is {world_size!r}, expected a whole number from 1 to "
            f"{MOST_RANKS}: correct the number"
        )
    return world_size


def _checked_seconds(name: str, seconds: float) -> float:
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not (is_number and math.isfinite(seconds) and seconds > 0):
        raise RankSetupError(
            f"{name} is {seconds!r}, expected a number of seconds above 0: correct the number"
        )
    return float(seconds)


def _refuse_inside_a_rank() -> None:
    if is_rank():
        raise RankSetupError(
            "ranks were requested on a rank, expected in the test process only: "
            "call a plain function there, which every rank already runs"
        )


def _skip(reason: str) -> None:
    if "pytest" in sys.modules:
        sys.modules["pytest"].skip(reason)
    raise unittest.SkipTest(reason)
