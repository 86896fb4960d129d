"""Starting ranks through torch's elastic launcher, and stopping them all when one fails.

Every command that needs ranks calls :func:`launch`. Each rank first runs ``rank.py``. The ranks of
one machine meet in ``one_machine.py``, those of several machines in ``rendezvous.py``.
``failures.py`` reports failures, and ``restarts.py`` decides about restarts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import (
    config_from_args,
    determine_local_world_size,
    get_args_parser,
    parse_min_max_nnodes,
)

from ..problems import BadInput
from . import rank
from .failures import failures_of, interruptions_in, render
from .hosts import HostsLost
from .one_machine import loopback_variables, stay_on_machine
from .rendezvous import guarded_rendezvous
from .restarts import attempts_watched
from .several_machines import interface_variables, patient_backend, stores_found_by_address

__all__ = ["default_ranks", "launch"]

#: The script that every rank runs first; the command follows as its arguments.
_RANK = str(Path(rank.__file__).resolve())
#: Seconds between SIGTERM to the launcher, which forwards it, and SIGKILL to the ranks: the time in
#: which a program can save (see ``StopRequest``). After it, the option and the variable that set
#: another number. Unless one of them is given, ranks have less time after Ctrl-C, because a rank
#: that waits inside a collective does not react to it, and a person is waiting.
_SECONDS_TO_SAVE = 30
_SECONDS_OPTION, _SECONDS_VARIABLE = "--shutdown-timeout", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_AT_A_TERMINAL = [signal.Signals[n] for n in ("SIGINT", "SIGQUIT") if hasattr(signal, n)]

#: The exceptions that ended launches. Their tracebacks keep the launcher's rendezvous alive, which
#: a thread of torch's polls: if that thread held the last reference, it would have to join itself,
#: and would print an error.
_ended_by: list[Exception] = []


def launch(
    ranks: int | None,
    launcher_options: Sequence[str],
    command: Sequence[str],
    *,
    before: Sequence[str] = (),
) -> int:
    """Run a Python program on ``ranks`` ranks of this machine; returns the exit status.

    ``command`` is what follows ``python`` on a command line: a script, or ``-m`` and a module, then
    arguments. ``launcher_options`` are options of torchrun. ``before`` names functions, each as
    ``module:function``, that every rank calls before the program.

    When a rank fails, the others are stopped, and the traceback of the rank that failed first is
    printed first. Ctrl-C stops all ranks. Options with which no rank can start raise ``BadInput``.

    >>> launch(2, ["--max-restarts", "1"], ["train.py", "--steps", "10"])  # doctest: +SKIP
    0
    """
    arguments = _arguments(ranks, launcher_options, command, before)
    try:
        on_one_machine = stay_on_machine(arguments)
    except ValueError as error:
        raise _refusal(arguments, error) from error
    if arguments.master_port is None:
        arguments.master_port = 29500
    ranks_print = arguments.redirects != "0" or arguments.tee != "0"
    environment = {
        "OMP_NUM_THREADS": str(
            threads_per_rank(determine_local_world_size(arguments.nproc_per_node))
        ),
        _SECONDS_VARIABLE: str(_SECONDS_TO_SAVE),
        # Every attempt gets a store of its own. In a shared one, restarted ranks would find the
        # addresses of ranks that have died, and gloo would try to connect to them.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # When a rank is killed, torch's C++ code prints a warning with a stack trace on every other
        # rank, before the launcher can report the cause. Errors that matter are raised as well.
        "TORCH_CPP_LOG_LEVEL": None if "TORCH_DISTRIBUTED_DEBUG" in os.environ else "ERROR",
        rank.LAUNCHER: str(os.getpid()),
        rank.RANKS_PRINT: "1" if ranks_print else None,
        **(loopback_variables() if on_one_machine else interface_variables(arguments)),
    }
    given = getattr(arguments, "shutdown_timeout", None) or os.environ.get(_SECONDS_VARIABLE)
    with (
        _environment_defaults(environment),
        _quiet_launcher(),
        attempts_watched(soon=() if given else _AT_A_TERMINAL) as attempts,
        guarded_rendezvous(),
        stores_found_by_address(),
    ):
        try:
            config, program, program_arguments = config_from_args(arguments)
        except (AssertionError, OSError, ValueError) as error:
            raise _refusal(arguments, error) from error
        config.rdzv_backend = patient_backend(config.rdzv_backend)
        try:
            elastic_launch(config=config, entrypoint=program)(*program_arguments)
        except ChildFailedError as error:
            failures = failures_of(error.failures)
            print("\n".join([render(failures), *attempts.elsewhere]), file=sys.stderr, flush=True)
            return failures[0].exit_status
        except HostsLost as error:
            _ended_by.append(error)
            print(f"fullshard: {error}", file=sys.stderr, flush=True)
            return 1
        except SignalException as error:
            _ended_by.append(error)
            logs = getattr(config.logs_specs, "_run_log_dir", None)
            told = [f"Stopped by {error.sigval.name}; all ranks were ended."]
            if attempts.killed:
                told.append(
                    f"Killed, because they had not ended in time: ranks {attempts.killed} "
                    f"({_SECONDS_OPTION} SECONDS gives them more)"
                )
            told.append(render(interruptions_in(logs)))
            print("\n".join(filter(None, told)), file=sys.stderr, flush=True)
            return 128 + error.sigval.value
        except RendezvousError as error:
            _ended_by.append(error)
            print(
                f"fullshard: the rendezvous of the launchers failed: {_causes(error)}",
                file=sys.stderr,
                flush=True,
            )
            return 1
        except (OSError, ValueError) as error:
            if _may_have_started(config.logs_specs):
                raise
            raise _refusal(arguments, error) from error
    return 0


def default_ranks() -> int:
    """One rank per GPU; without a GPU two, the fewest ranks that shard anything."""
    return torch.cuda.device_count() or 2


def threads_per_rank(ranks: int) -> int:
    """The threads per rank that use each core of this process once."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // ranks)


def _arguments(
    ranks: int | None, options: Sequence[str], command: Sequence[str], before: Sequence[str]
) -> Namespace:
    """Parse the options with torchrun's parser, with defaults of our own."""
    if not command:
        raise ValueError(
            "launch expects a command such as ['train.py', '--steps', '10'], but got an empty one"
        )
    if ranks is not None and ranks < 1:
        raise ValueError(f"ranks expects at least 1, but got {ranks}")
    parser = get_args_parser()
    if "PET_NPROC_PER_NODE" not in os.environ:
        parser.set_defaults(nproc_per_node=str(default_ranks()))
    if "PET_MASTER_PORT" not in os.environ:
        parser.set_defaults(master_port=None)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        # Under nohup, which ignores SIGHUP, the launcher must not stop its ranks on it.
        parser.set_defaults(signals_to_handle="SIGTERM,SIGINT,SIGQUIT")
    calls = [word for name in before for word in ("--call", name)]
    arguments = parser.parse_args([*options, _RANK])
    if arguments.training_script != _RANK or arguments.training_script_args:
        raise ValueError(
            "launcher_options expects torchrun's options without a program, but got "
            f"{arguments.training_script!r} in {list(options)}"
        )
    # Ranks start with rank.py, a script, even if variables such as PET_MODULE say otherwise.
    arguments.module = arguments.no_python = arguments.run_path = False
    arguments.training_script_args = [*calls, "--", *command]
    if ranks is not None:
        arguments.nproc_per_node = str(ranks)
    _check_numbers(arguments)
    return arguments


def _check_numbers(arguments: Namespace) -> None:
    """Raise ``BadInput`` for numbers of ranks, machines and so on with which no rank can start."""
    try:
        ranks = determine_local_world_size(arguments.nproc_per_node)
    except (RuntimeError, ValueError):
        ranks = 0
    if ranks < 1:
        raise BadInput(
            "--nproc-per-node expects 1 or more, auto, cpu, or gpu if torch finds one, but got "
            f"{arguments.nproc_per_node!r}"
        )
    try:
        fewest, most = parse_min_max_nnodes(arguments.nnodes)
    except (RuntimeError, ValueError):
        fewest = most = 0
    if not 0 < fewest <= most:
        raise BadInput(
            "--nnodes expects a number of machines, or a minimum and a maximum such as 1:4, but "
            f"got {arguments.nnodes!r}"
        )
    if arguments.standalone and fewest > 1:
        raise BadInput(f"--standalone is for one machine, but got --nnodes {arguments.nnodes}")
    if arguments.max_restarts < 0:
        raise BadInput(f"--max-restarts expects 0 or more, but got {arguments.max_restarts}")
    if not arguments.monitor_interval > 0:
        raise BadInput(
            f"--monitor-interval expects more than 0 seconds, but got {arguments.monitor_interval}"
        )


def _refusal(arguments: Namespace, problem: Exception) -> BadInput:
    """The error that torch's launcher raised about its options, in one line."""
    if isinstance(problem, OSError) and arguments.log_dir is not None:
        return BadInput(
            f"--log-dir expects a writable folder, but got {arguments.log_dir!r}: "
            f"{problem.strerror or problem}"
        )
    return BadInput(f"torch's launcher rejects its options: {' '.join(str(problem).split())}")


def _causes(error: BaseException) -> str:
    """The type and first line of an error and of each of its causes."""
    said = []
    cause: BaseException | None = error
    while cause is not None:
        said.append(f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0]}")
        cause = cause.__cause__
    return " ".join(said)


def _may_have_started(logs: object) -> bool:
    """Return True if the launcher may have started ranks, because its log folder exists.

    Also True if it creates no such folder, or if this version of torch has another name for it.
    """
    if getattr(logs, "root_log_dir", None) == os.devnull:
        return True
    return getattr(logs, "_run_log_dir", "") is not None


@contextlib.contextmanager
def _environment_defaults(defaults: dict[str, str | None]) -> Iterator[None]:
    """Set environment variables for the ranks, except those that the user has set."""
    missing = {k: v for k, v in defaults.items() if v is not None and k not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]


@contextlib.contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Silence the launcher's own report of a failure; ours puts the cause first."""
    names = (
        "torch.distributed.elastic.multiprocessing.api",
        "torch.distributed.elastic.agent.server.api",
    )
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
