"""``fullshard run``: a program written for torch's wrapper, on ranks that have ours instead."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.run import get_args_parser

from .launch import launch

__all__ = ["Invocation", "read_invocation", "run_program"]

INSTALL = "fullshard.compat:install"


@dataclass(frozen=True)
class Invocation:
    """A command line of ``fullshard run``, taken apart."""

    ranks: int | None
    launcher_options: tuple[str, ...]
    command: tuple[str, ...]


def run_program(arguments: Sequence[str]) -> int:
    """Run what a command line after ``fullshard run`` asks for; returns the exit status."""
    invocation = read_invocation(arguments)
    return launch(
        invocation.ranks, invocation.launcher_options, invocation.command, before=[INSTALL]
    )


def read_invocation(arguments: Sequence[str]) -> Invocation:
    """Tell our options, torchrun's and the program's own apart.

    torchrun's parser decides where the program begins, so that its options mean what they mean
    there. Ends the process with a usage message where torchrun would.

    >>> read_invocation(["--ranks", "4", "--max-restarts", "1", "train.py", "--ranks", "7"])
    Invocation(ranks=4, launcher_options=('--max-restarts', '1'), \
command=('train.py', '--ranks', '7'))
    """
    torchrun = get_args_parser()
    torchrun.prog = "fullshard run"
    torchrun.add_argument("--ranks", type=int, help="Number of ranks on this machine.")
    parsed = torchrun.parse_args(list(arguments))
    if parsed.no_python or parsed.run_path:
        sys.exit(
            "fullshard run: --no-python and --run-path are not taken, because fullshard has to be "
            "installed in the program's own Python process; give a script or -m and a module"
        )
    program_starts = len(arguments) - len(parsed.training_script_args) - 1
    ours = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    ours.add_argument("--ranks", type=int)
    ours.add_argument("-m", "--module", action="store_true")
    _, launcher_options = ours.parse_known_args(list(arguments[:program_starts]))
    program = (parsed.training_script, *parsed.training_script_args)
    return Invocation(
        ranks=parsed.ranks,
        launcher_options=tuple(launcher_options),
        command=("-m", *program) if parsed.module else program,
    )


if __name__ == "__main__":  # the command where typer is not installed
    sys.exit(run_program(sys.argv[1:]))
