"""Running the command line: bad input becomes one line on standard error and exit status 2."""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import Any

import torch
import typer

import fullshard

from .options import nearest
from .output import discard_output
from .problems import BadInput

try:
    from typer import TyperException as CommandLineProblem
except ImportError:  # an older typer, which has it from click
    from click import ClickException as CommandLineProblem  # type: ignore

__all__ = ["call", "run_command", "show_help_or_version"]


def call(app: typer.Typer) -> int:
    """Run this process's command line; returns the exit status, 2 for bad input."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Print a question mark for characters that the terminal's encoding does not have.
        sys.stdout.reconfigure(errors="replace")
    try:
        status = run_command(app)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except BadInput as problem:
        # Under torchrun all ranks raise the same error: only one of them prints it.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"fullshard: {problem}", file=sys.stderr)
        return 2
    except OSError as problem:
        if not _output_is_lost():
            raise
        if not isinstance(problem, BrokenPipeError):  # the reader has closed the pipe on purpose
            print(
                f"fullshard: cannot write to standard output: {problem.strerror}", file=sys.stderr
            )
        return 1


def run_command(app: typer.Typer) -> int:
    """Run this process's command line; returns the exit status, or raises ``BadInput``."""
    try:
        return int(app(prog_name="fullshard", standalone_mode=False) or 0)
    except CommandLineProblem as problem:
        raise BadInput(_in_one_line(problem)) from None
    except typer.Abort:
        return 128 + signal.SIGINT


def show_help_or_version(context: typer.Context, version: bool) -> None:
    """Print the versions if asked to, or the help if no command was given, and exit."""
    if version:
        typer.echo(f"fullshard {fullshard.__version__}, torch {torch.__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit()


def _output_is_lost() -> bool:
    """Return True if not even an empty line can be written to standard output."""
    try:
        print(flush=True)
    except OSError:
        discard_output()
        return True
    return False


def _in_one_line(problem: Any) -> str:
    """Typer's error message in one line, with a suggestion for an unknown flag."""
    context = getattr(problem, "ctx", None)
    given = getattr(problem, "option_name", None)
    message = str(problem.format_message())
    words = [word for word in sys.argv if given and word.startswith(f"{given}=")]
    if words and "does not take a value" in message:
        return f"{given} takes no value, but got {words[0]!r}"
    if context is None:
        return message
    if type(problem).__name__ == "NoSuchOption" and given:
        known = [flag for parameter in context.command.params for flag in parameter.opts]
        return f"there is no option {given!r}{nearest(given, known)}"
    if message.endswith("?"):  # Did you mean ...?
        return f"{message} See {context.command_path} --help"
    return f"{message.rstrip('.')}; see {context.command_path} --help"
