"""Reporting the failures of ranks in the order in which they happened, the cause first.

The elastic launcher records the time of failures in seconds, and only of ranks that had ended when
it polled. So a rank that failed because another one had failed is often listed alone or first. The
error files that ``rank.py`` writes have nanoseconds, and all files of an attempt are read.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

__all__ = ["Failure", "failures_of", "interruptions_in", "render"]

_LAST = 2**63
#: The most lines that are printed to a terminal, and the name of the log for longer reports.
_SHORT = 30
_LOG = "failures.log"
#: When a rank has failed, the launcher stops the others, and some seconds later kills those that
#: are still running: then a kill is a consequence. The launcher records times in seconds.
_SECONDS_APART = 3


@dataclass(frozen=True)
class Failure:
    """The failure of one rank: ``reason`` in one line, ``traceback`` if any, ``when`` in ns.

    ``short`` is the traceback for a terminal, ``folder`` the log folder of the attempt.
    A rank that ``stopped`` was asked to stop, and did so in order.
    """

    rank: int
    reason: str
    traceback: str
    exit_status: int
    when: int
    bad_input: bool = False
    short: str = ""
    folder: Path | None = None
    stopped: bool = False


def failures_of(processes: Mapping[int, ProcessFailure]) -> list[Failure]:
    """All failures of an attempt, the cause first, given those that the launcher has seen."""
    found: dict[int, Failure] = {}
    first = min((process.timestamp for process in processes.values()), default=0)
    for rank, process in processes.items():
        found[rank] = _from_process(rank, process, process.timestamp - first >= _SECONDS_APART)
        if process.error_file != "<N/A>":
            for other in _read_all(Path(process.error_file).parent.parent):
                found.setdefault(other.rank, other)
    return sorted(found.values(), key=lambda failure: failure.when)


def interruptions_in(run_directory: str | Path | None) -> list[Failure]:
    """The errors that ranks recorded before a signal stopped them, oldest first."""
    attempts = sorted(Path(run_directory).glob("attempt_*")) if run_directory else []
    found = _read_all(attempts[-1]) if attempts else []
    return sorted((f for f in found if not f.stopped), key=lambda failure: failure.when)


def render(failures: list[Failure]) -> str:
    """The report of the first failure with its traceback, then one line for each other failure.

    If that is too long for a terminal, the full report goes to a log, and a short one, which begins
    and ends with the cause, is returned. Bad input is a single line, the same for all ranks.
    """
    if not failures:
        return ""
    first, *others = failures
    if first.bad_input:
        return f"fullshard: {first.reason}"
    if first.stopped:
        name = signal.Signals(first.exit_status - 128).name
        return f"Stopped by {name}, which a rank was sent; all ranks left in order."
    why = f"Rank {first.rank} failed first: {first.reason}"
    in_full = [why, *first.traceback.splitlines(), *_one_line_each(others)]
    in_short = [why, *first.short.splitlines(), *_one_line_each(others)]
    if in_short == in_full and len(in_full) <= _SHORT:
        return "\n".join(in_full)
    log = _write_log(failures)
    if log is None:
        return "\n".join(in_full)
    if len(in_short) > _SHORT:
        in_short = [why, *first.short.splitlines(), *_one_line_per_reason(others)]
    return "\n".join([*in_short, f"The full tracebacks of all ranks are in {log}", why])


def _one_line_each(failures: list[Failure]) -> list[str]:
    return [f"Rank {failure.rank} failed after it: {failure.reason}" for failure in failures]


def _one_line_per_reason(failures: list[Failure]) -> list[str]:
    ranks: dict[str, list[int]] = {}
    for failure in failures:
        ranks.setdefault(failure.reason, []).append(failure.rank)
    return [
        f"Rank{'s' * (len(of) > 1)} {', '.join(map(str, sorted(of)))} failed after it: {reason}"
        for reason, of in ranks.items()
    ]


def _write_log(failures: list[Failure]) -> Path | None:
    """Write a full report of ``failures`` to the attempt's log folder; None if that fails."""
    folder = next((failure.folder for failure in failures if failure.folder is not None), None)
    if folder is None:
        return None
    parts = [f"Rank {f.rank}: {f.reason}\n{f.traceback}" for f in failures]
    log = folder / _LOG
    try:
        log.write_text("\n".join(parts), encoding="utf-8")
    except OSError:  # for example because the disk is full, which may also be the failure
        return None
    return log


def _from_process(rank: int, process: ProcessFailure, late: bool) -> Failure:
    written = _read(Path(process.error_file)) if process.error_file != "<N/A>" else None
    if written is not None:
        return written
    status = process.exitcode if process.exitcode > 0 else 128 - process.exitcode
    if process.exitcode < 0:
        if process.exitcode == -signal.SIGKILL and late:
            reason = "did not stop on SIGTERM, and was killed"
            return Failure(rank, reason, "", status, _LAST)
        reason = f"killed by {process.signal_name()}"
        if process.exitcode == -signal.SIGKILL:
            reason += " (often: the machine ran out of memory)"
        # The launcher stops ranks with SIGTERM; any other signal came first, and is the cause.
        when = _LAST if process.exitcode == -signal.SIGTERM else 0
        return Failure(rank, reason, "", status, when)
    reason = f"ended with exit status {process.exitcode} and left no traceback"
    return Failure(rank, reason, "", status, process.timestamp * 10**9)


def _read_all(attempt: Path) -> list[Failure]:
    read = (_read(file) for file in attempt.glob("*/error.json"))
    return [failure for failure in read if failure is not None]


def _read(file: Path) -> Failure | None:
    try:
        content = json.loads(file.read_text())
        info = content["message"]["extraInfo"]
        return Failure(
            int(info["rank"]),
            content["message"]["message"],
            info["py_callstack"],
            int(info["exit_status"]),
            int(info["nanoseconds"]),
            bool(info.get("bad_input")),
            info["short_callstack"],
            file.parent.parent,
            bool(info.get("stopped")),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None  # missing, truncated by a kill, or written by the program's own handler
