"""Starts the ranks of ``faults.py`` by forking, so that torch is imported once for all of them.

Reads lines of JSON, each a list of ranks (environment, log, arguments); starts them as if each were
a Python program of its own, and answers with when and how each ended.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
from typing import Any

import torch  # noqa: F401

import fullshard  # noqa: F401


def start(rank: dict[str, Any]) -> int:
    """Fork a rank; returns its process number. In the child, returns 0 when it is set up."""
    process = os.fork()
    if process:
        return process
    os.environ.update(rank["environment"])
    log = os.open(rank["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    sys.argv = rank["arguments"]
    return 0


def wait_for(processes: list[int], limit: float) -> list[tuple[float, int | None]]:
    """When each process ended, and how; those that have not in time are killed."""
    deadline = time.time() + limit
    ends: dict[int, tuple[float, int | None]] = {}
    while len(ends) < len(processes):
        is_late = time.time() > deadline
        for process in set(processes) - set(ends):
            if is_late:
                os.kill(process, signal.SIGKILL)
            found, status = os.waitpid(process, 0 if is_late else os.WNOHANG)
            if found:
                ended = None if is_late else os.waitstatus_to_exitcode(status)
                ends[process] = time.time(), ended
        time.sleep(0.02)
    return [ends[process] for process in processes]


def serve() -> str | None:
    """Answer requests; in a rank, return the program that it is to run."""
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        processes = []
        for rank in request["ranks"]:
            process = start(rank)
            if process == 0:
                return str(sys.argv[0])
            processes.append(process)
        print(json.dumps(wait_for(processes, request["limit"])), flush=True)
    return None


if __name__ == "__main__":
    program = serve()
    if program is not None:
        runpy.run_path(program, run_name="__main__")
