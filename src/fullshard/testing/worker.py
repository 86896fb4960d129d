"""A rank: the process that runs a test's function, one request after the other."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import sys
import traceback
import unittest
from datetime import timedelta
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Literal, TextIO

import torch
import torch.distributed as dist

from .isolation import (
    destroy_extra_groups,
    group_state,
    isolated,
    keep_imports,
    rank_environment,
)
from .protocol import LOOPBACK, Assignment, Outcome, Ready, Request
from .shipping import unpack_call

# Sent by the test process to learn where a rank is; works inside C++ code, too.
STACK_SIGNAL = signal.SIGUSR1
# Longer than any test: a collective that waits is found by the test's own timeout.
_COLLECTIVE_TIMEOUT = timedelta(hours=1)


def serve_requests(handle: int) -> None:
    """Receive the assignment, join the process group, then run requests until end-of-file."""
    connection = Connection(handle)
    assignment: Assignment = pickle.loads(connection.recv_bytes())
    output = _redirect_output(assignment)
    _leave_stacks(assignment)
    try:
        group = _join(assignment)
    except Exception as error:
        connection.send_bytes(pickle.dumps(Ready(f"{type(error).__name__}: {error}")))
        return
    connection.send_bytes(pickle.dumps(Ready(None)))
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            request: Request = pickle.loads(connection.recv_bytes())
            destroy_extra_groups()
            keep_imports()
            os.ftruncate(output, 0)
            outcome = _run(assignment, request, group)
            connection.send_bytes(pickle.dumps(outcome))


def is_rank() -> bool:
    """Return True if the calling process is a rank of a pool."""
    return _this_rank is not None


_this_rank: Assignment | None = None


def _join(assignment: Assignment) -> dist.ProcessGroup:
    global _this_rank
    _this_rank = assignment
    os.environ.update(rank_environment(assignment, dict(os.environ)))
    torch.set_num_threads(1)
    if assignment.device == "cuda":
        torch.cuda.set_device(assignment.rank % torch.cuda.device_count())
    server = dist.TCPStore(LOOPBACK, assignment.store_port, is_master=False, wait_for_workers=False)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if assignment.backend == "nccl" else "gloo",
        store=dist.PrefixStore(assignment.store_prefix, server),
        rank=assignment.rank,
        world_size=assignment.world_size,
        timeout=_COLLECTIVE_TIMEOUT,
    )
    group = dist.group.WORLD
    assert group is not None
    return group


def _run(assignment: Assignment, request: Request, group: dist.ProcessGroup) -> Outcome:
    value, summary, details = b"", "", ""
    kind: Literal["returned", "raised", "skipped"] = "returned"
    try:
        with isolated(assignment, request):
            function, args, kwargs = unpack_call(request.call)
            returned = function(*args, **kwargs)
            value = _pickle_value(returned)
            del function, args, kwargs, returned
    except BaseException as error:
        kind = "skipped" if _is_skip(error) else "raised"
        summary = str(error) if kind == "skipped" else _one_line(error)
        details = _format(error)
    finally:
        _flush()
    return Outcome(kind, value, summary, details, group_state(group))


def _pickle_value(returned: Any) -> bytes:
    try:
        return pickle.dumps(returned)
    except Exception as error:
        raise TypeError(
            f"the value returned on this rank, of type {type(returned).__name__}, cannot be "
            f"sent to the test ({error}): return plain values and tensors"
        ) from None


def _is_skip(error: BaseException) -> bool:
    # pytest's own exception, recognised by name because pytest may not be installed.
    return isinstance(error, unittest.SkipTest) or type(error).__name__ == "Skipped"


def _one_line(error: BaseException) -> str:
    first_line = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__


def _format(error: BaseException) -> str:
    shown = _without_own_frames(error.__traceback__)
    return "".join(traceback.format_exception(type(error), error, shown)).rstrip()


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    frames = trace
    while frames is not None and frames.tb_frame.f_globals.get("__package__") == __package__:
        frames = frames.tb_next
    # If the test's module cannot be loaded, all frames are ours, and all of them are shown.
    return frames or trace


def _redirect_output(assignment: Assignment) -> int:
    flags = os.O_CREAT | os.O_RDWR | os.O_TRUNC | os.O_APPEND
    output = os.open(assignment.output_file, flags, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream in (1, 2):
        os.dup2(output, stream)
    return output


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _leave_stacks(assignment: Assignment) -> None:
    """Make the rank write its stack to its stack file on request, on a crash and on exit."""
    stack_file = assignment.stack_file.open("w")
    faulthandler.enable(stack_file)
    faulthandler.register(STACK_SIGNAL, stack_file)
    _leave_stack_on_exit(stack_file)


def _leave_stack_on_exit(stack_file: TextIO) -> None:
    exit_at_once = os._exit
    rank_process = os.getpid()

    def exit_with_stack(status: int) -> Any:
        if os.getpid() == rank_process:
            faulthandler.dump_traceback(stack_file)
        exit_at_once(status)

    os._exit = exit_with_stack
