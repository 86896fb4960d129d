"""Calling the command: bad input is answered in one line, and no command with a list of them."""

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
    """Run the command line of this process; returns its exit status, 2 for bad input."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # An ASCII terminal shows a question mark for a letter that it does not have.
        sys.stdout.reconfigure(errors="replace")
    try:
        status = run_command(app)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except BadInput as problem:
        # Under torchrun all ranks have found out the same: one of them says so.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"fullshard: {problem}", file=sys.stderr)
        return 2
    except OSError as problem:
        if not _output_is_lost():
            raise
        if not isinstance(problem, BrokenPipeError):  # who reads no more wants to hear no more
            print(f"fullshard: the output cannot be written: {problem.strerror}", file=sys.stderr)
        return 1


def run_command(app: typer.Typer) -> int:
    """Run the command line of this process; returns its exit status, and raises bad input."""
    try:
        return int(app(prog_name="fullshard", standalone_mode=False) or 0)
    except CommandLineProblem as problem:
        raise BadInput(_in_one_line(problem)) from None
    except typer.Abort:
        return 128 + signal.SIGINT


def show_help_or_version(context: typer.Context, version: bool) -> None:
    """Where no command was given, say which there are, or the versions if they were asked for."""
    if version:
        typer.echo(f"fullshard {fullshard.__version__}, torch {torch.__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit()


def _output_is_lost() -> bool:
    """Whether standard output takes not even an empty line."""
    try:
        print(flush=True)
    except OSError:
        discard_output()
        return True
    return False


def _in_one_line(problem: Any) -> str:
    """What typer has to say, with the nearest name where a flag does not exist."""
    context = getattr(problem, "ctx", None)
    given = getattr(problem, "option_name", None)
    message = str(problem.format_message())
    words = [word for word in sys.argv if given and word.startswith(f"{given}=")]
    if words and "does not take a value" in message:
        return f"{given} is given without a value, but got {words[0]!r}"
    if context is None:
        return message
    if type(problem).__name__ == "NoSuchOption" and given:
        known = [flag for parameter in context.command.params for flag in parameter.opts]
        return f"there is no option {given!r}{nearest(given, known)}"
    if message.endswith("?"):  # Did you mean ...?
        return f"{message} See {context.command_path} --help"
    return f"{message.rstrip('.')}; see {context.command_path} --help"
