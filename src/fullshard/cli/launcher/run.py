"""``fullshard run``: runs a program written for torch's wrapper with fullshard's instead."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from torch.distributed.run import get_args_parser

from fullshard.tracing.automatic import TRACE, TRACE_STEPS
from fullshard.tracing.output import check_suffix

from ..problems import BadInput
from .launch import launch

__all__ = ["Invocation", "read_invocation", "run_program"]

INSTALL = "fullshard.compat:install"
START_TRACE = "fullshard.tracing.automatic:install"


@dataclass(frozen=True)
class Invocation:
    """A parsed command line of ``fullshard run``."""

    ranks: int | None
    launcher_options: tuple[str, ...]
    command: tuple[str, ...]
    #: Where a trace of the program's steps is to be written, and how many; None for no trace.
    trace: str | None = None
    trace_steps: int = 3


def run_program(arguments: Sequence[str]) -> int:
    """Run the program in the arguments of ``fullshard run``; returns the exit status."""
    invocation = read_invocation(arguments)
    _check_program(invocation.command)
    before = [INSTALL]
    if invocation.trace is not None:
        os.environ[TRACE] = str(Path(invocation.trace).resolve())
        os.environ[TRACE_STEPS] = str(invocation.trace_steps)
        before.append(START_TRACE)
    return launch(invocation.ranks, invocation.launcher_options, invocation.command, before=before)


def read_invocation(arguments: Sequence[str]) -> Invocation:
    """Separate our options, torchrun's options and the program's own arguments.

    torchrun's parser decides where the program begins, so that its options keep their meaning.

    >>> read_invocation(["--ranks", "4", "--max-restarts", "1", "train.py", "--ranks", "7"])
    Invocation(ranks=4, launcher_options=('--max-restarts', '1'), \
command=('train.py', '--ranks', '7'), trace=None, trace_steps=3)
    """
    torchrun = get_args_parser()
    torchrun.prog = "fullshard run"
    torchrun.error = _refuse  # type: ignore[method-assign]
    torchrun.add_argument("--ranks", type=int, help="Number of ranks on this machine.")
    torchrun.add_argument("--trace", metavar="FILE", help="Trace steps, as .html, .json or .png.")
    torchrun.add_argument("--trace-steps", type=int, default=3, help="Steps to trace.")
    torchrun.set_defaults(nproc_per_node=None)
    parsed = torchrun.parse_args(list(arguments))
    if parsed.no_python or parsed.run_path:
        raise BadInput(
            "--no-python and --run-path are not supported, because fullshard has to be installed "
            "in the program's own Python process; pass a script, or -m and a module"
        )
    if parsed.ranks is not None and parsed.ranks < 1:
        raise BadInput(f"--ranks expects 1 or more, but got {parsed.ranks}")
    if None not in (parsed.ranks, parsed.nproc_per_node) and (
        str(parsed.ranks) != parsed.nproc_per_node
    ):
        raise BadInput(
            f"--ranks {parsed.ranks} and --nproc-per-node {parsed.nproc_per_node} both set the "
            "number of ranks on this machine, but differ; pass only one of them"
        )
    if parsed.trace_steps < 1:
        raise BadInput(f"--trace-steps expects 1 or more, but got {parsed.trace_steps}")
    if parsed.trace is not None:
        try:
            check_suffix(Path(parsed.trace))
        except (ValueError, ModuleNotFoundError) as problem:
            raise BadInput(f"--trace: {problem}") from None
    begin = _begin_of_program(torchrun, arguments)
    # Accepts abbreviations, as torchrun's parser does, which has rejected ambiguous ones already.
    ours = argparse.ArgumentParser(add_help=False)
    ours.error = _refuse  # type: ignore[method-assign]
    ours.add_argument("--ranks", type=int)
    ours.add_argument("--trace")
    ours.add_argument("--trace-steps", type=int)
    ours.add_argument("-m", "--module", action="store_true")
    _, launcher_options = ours.parse_known_args([w for w in arguments[:begin] if w != "--"])
    program = tuple(arguments[begin:])
    return Invocation(
        ranks=parsed.ranks,
        launcher_options=tuple(launcher_options),
        command=("-m", *program) if parsed.module else program,
        trace=parsed.trace,
        trace_steps=parsed.trace_steps,
    )


def _check_program(command: Sequence[str]) -> None:
    """Raise ``BadInput`` if the program does not exist."""
    script, *others = command
    if script == "-m":
        if not others or not others[0]:
            raise BadInput(
                "-m expects the name of a module after it, such as package.train, but got "
                + (repr(others[0]) if others else "none")
            )
    elif not script or not Path(script).exists():
        raise BadInput(f"run expects a script or -m and a module, but there is no {script!r}")
    elif Path(script).is_dir() and not any(Path(script).glob("__main__.py*")):
        raise BadInput(
            f"run expects a script or -m and a module, but {script!r} is a folder without a "
            "__main__.py"
        )


def _begin_of_program(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> int:
    """The position of the program: the shortest prefix with it parses as a command line.

    The program's arguments that ``parser`` returns do not help, because argparse drops a leading
    ``--`` from them.
    """
    for end in range(1, len(arguments)):
        with contextlib.suppress(BadInput):
            parser.parse_args(list(arguments[:end]))
            return end - 1
    return len(arguments) - 1


def _refuse(message: str) -> NoReturn:
    raise BadInput(f"{message}; see fullshard run --help")


if __name__ == "__main__":  # the command where typer is not installed
    try:
        sys.exit(run_program(sys.argv[1:]))
    except BadInput as problem:
        print(f"fullshard: {problem}", file=sys.stderr)
        sys.exit(2)
