"""The ``fullshard`` command: its list of commands. What they need is imported when they run."""

from __future__ import annotations

from typing import Annotated

try:
    import typer
except ModuleNotFoundError as missing:
    raise SystemExit(
        "The fullshard command needs typer: pip install 'fullshard[cli]'. Without it, "
        "`python -m fullshard.cli.run` is `fullshard run`."
    ) from missing

app = typer.Typer(
    help="Fully sharded data parallelism for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def commands() -> None:
    """Fully sharded data parallelism for PyTorch."""


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    options_metavar="[--ranks N] [torchrun's options]",
)
def run(
    arguments: Annotated[
        list[str], typer.Argument(metavar="(SCRIPT | -m MODULE) [ARGUMENTS]...", show_default=False)
    ],
) -> None:
    """Run a program written for torch.distributed.fsdp on fullshard, unchanged.

    Starts it on N ranks of this machine (default: one per GPU, or 2 without a GPU), each with
    fullshard in the place of torch.distributed.fsdp's wrapper. All options of torchrun are taken,
    those for several machines included (--nnodes, --rdzv-endpoint, --max-restarts, ...).
    """
    from fullshard.cli.run import run_program

    raise typer.Exit(run_program(arguments))


def main() -> None:
    """Entry point of the installed command."""
    app(prog_name="fullshard")


if __name__ == "__main__":
    main()
